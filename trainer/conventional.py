"""Conventional training: the full-sequence forward pass of each trajectory through the untouched model, and autograd.

This is what our gradient is compared with, by verification, tests and benchmarks. It knows nothing of trees, states or chunks.
The loss is any function of the log-probabilities of all loss tokens, in the order of trajectories, then positions.

Shapes: T tokens of a trajectory, N loss tokens of all trajectories, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from longstraw_agents.errors import NonFiniteError
from longstraw_agents.types import Trajectory

Loss = Callable[[Tensor], Tensor]  # log-probabilities [N] -> scalar


def loss_positions(trajectory: Trajectory) -> np.ndarray:
    """Positions of a trajectory's tokens that carry loss, ascending."""
    return np.flatnonzero(trajectory.action_mask)


def log_probabilities(
    model: nn.Module, tokens: np.ndarray, positions: np.ndarray, *, checkpointing: bool = False
) -> Tensor:
    """Log-probabilities [N] of `tokens` [T] at `positions` [N] (each >= 1), float32 or the model's type where that is wider.

    One forward pass over the whole trajectory, without a cache; only the asked positions reach the head. `checkpointing`
    recomputes each layer in the backward pass, as conventional training on long sequences does.
    """
    device = next(model.parameters()).device
    ids_T = torch.as_tensor(np.asarray(tokens, dtype=np.int64), device=device)
    at_N = torch.as_tensor(np.asarray(positions, dtype=np.int64), device=device)
    inputs_1T = ids_T[None, :-1]
    with _checkpointed(model, checkpointing):
        logits_NV = model(input_ids=inputs_1T, use_cache=False, logits_to_keep=at_N - 1).logits[0]
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return wide_NV.log_softmax(-1).gather(-1, ids_T[at_N][:, None])[:, 0]


class _checkpointed:
    """Within the block the decoder layers are recomputed in the backward pass; outside they are as before."""

    def __init__(self, model: nn.Module, enabled: bool) -> None:
        self._layers = [module for module in model.modules() if enabled and isinstance(module, GradientCheckpointingLayer)]

    def __enter__(self) -> None:
        for layer in self._layers:
            forward = layer.forward

            def recomputed(*args: Any, _forward: Callable[..., Any] = forward, **kwargs: Any) -> Any:
                return checkpoint(_forward, *args, use_reentrant=False, **kwargs)

            layer.forward = recomputed

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del layer.forward


def backward(
    model: nn.Module, trajectories: Sequence[Trajectory], loss: Loss, *, in_series: bool = False, checkpointing: bool = False
) -> tuple[Tensor, Tensor]:
    """Add the gradient of `loss` to the parameters' `.grad`; return the loss (scalar) and the log-probabilities [N].

    By default all trajectories are in one graph, which is the definition of the gradient. `in_series` scores all of them
    first and then runs one trajectory after the other, forward and backward: the same gradient within the memory of one.
    Raises NonFiniteError when the loss is not finite.
    """
    spans = [(trajectory.tokens, loss_positions(trajectory)) for trajectory in trajectories]
    if not in_series:
        parts = [log_probabilities(model, *span, checkpointing=checkpointing) for span in spans]
        logp_N = torch.cat(parts)
        value = loss(logp_N)
        _check(value)
        value.backward()
        return value.detach(), logp_N.detach()
    with torch.no_grad():
        logp_N = torch.cat([log_probabilities(model, *span) for span in spans])
    leaf_N = logp_N.clone().requires_grad_()
    value = loss(leaf_N)
    _check(value)
    (coefficient_N,) = torch.autograd.grad(value, leaf_N)
    for span, coefficient in zip(spans, coefficient_N.split([len(span[1]) for span in spans]), strict=True):
        if len(coefficient):
            (log_probabilities(model, *span, checkpointing=checkpointing) * coefficient).sum().backward()
    return value.detach(), logp_N


def _check(value: Tensor) -> None:
    if not torch.isfinite(value):
        raise NonFiniteError(f"the conventional loss is {value.item()}; check rewards and log-probabilities")
