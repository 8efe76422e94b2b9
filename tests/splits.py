"""A model's own differentiable split: its forward pass in pieces with transformers' cache, under autograd, nothing detached.

Untouched hybrid models are not exact to themselves: up-casts to float32 round differently when a sequence is run in pieces. This
is what their error is measured by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from longstraw_agents.segmenter import PrefixTree
from longstraw_agents.trainer import comparison, conventional
from longstraw_agents.types import Trajectory


class Assigning(LinearAttentionLayer):
    """A recurrent layer's cache that keeps graphs: it assigns where the library's copies into a buffer."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int = 4, **kwargs: Any) -> Tensor:
        before = self.conv_states[state_idx] if self.has_previous_state[state_idx] else None
        full = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        kept = full[..., -conv_kernel_size:]
        self.conv_states[state_idx] = torch.nn.functional.pad(kept, (conv_kernel_size - kept.shape[-1], 0))
        self.has_previous_state[state_idx] = True
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


def gradient(
    model: Any, data: list[Trajectory], tree: PrefixTree, chunk: int, loss: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """The gradient of `loss` with each trajectory run in the pieces that the tree and `chunk` part its path into."""
    model.zero_grad()
    parts = []
    for index, trajectory in enumerate(data):
        borders = [0]
        for node in (tree.nodes[i] for i in tree.paths[index]):
            borders += [*range(node.start - 1 + chunk, node.stop - 1, chunk), node.stop - 1]
        parts.append(_log_probabilities(model, trajectory, borders))
    loss(torch.cat(parts)).backward()
    found = comparison.gradients(model)
    model.zero_grad()
    return found


def _log_probabilities(model: Any, trajectory: Trajectory, borders: list[int]) -> Tensor:
    cache = DynamicCache(config=model.config.get_text_config())
    cache.layers = [Assigning() if isinstance(layer, LinearAttentionLayer) else layer for layer in cache.layers]
    for layer in cache.layers:
        if isinstance(layer, Assigning):
            layer.record_past = True  # off the one-token path, which copies in place
    ids = torch.as_tensor(trajectory.tokens, dtype=torch.int64)
    logits = []
    for start, stop in zip(borders, borders[1:], strict=False):
        logits.append(model(input_ids=ids[None, start:stop], past_key_values=cache, use_cache=True).logits[0])
    positions = torch.as_tensor(conventional.loss_positions(trajectory))
    wide = torch.cat(logits)[positions - 1]
    return wide.log_softmax(-1).gather(-1, ids[positions][:, None])[:, 0]
