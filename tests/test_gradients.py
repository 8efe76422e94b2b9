"""One call leaves what back-propagation through full sequences leaves, and adds to what is there."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers

from longstraw_agents.errors import ConfigError, GroupError, NonFiniteError
from longstraw_agents.trainer.gradients import accumulate
from longstraw_agents.types import StopReason, Trajectory


def tiny() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return transformers.LlamaForCausalLM(config).eval()


def group(prompt: int = 20, lengths: tuple[int, ...] = (5, 9, 7)) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 61, prompt)
    made = []
    for index, length in enumerate(lengths):
        tokens = np.concatenate([shared, rng.integers(0, 61, length)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= prompt
        made.append(
            Trajectory(
                str(index), tokens, mask, np.where(mask, 0.0, np.nan).astype(np.float32), np.where(mask, 0, -1).astype(np.int32),
                (len(tokens),), (0.0,), 0.0, StopReason.ANSWERED,
            )  # fmt: skip
        )
    return made


def loss(logp: torch.Tensor) -> torch.Tensor:
    """Couples all tokens, so that a wrong order or a wrong share shows."""
    return (logp * torch.linspace(-1, 1, len(logp))).sum() + logp.mean().square()


def conventional(model: transformers.LlamaForCausalLM, trajectories: list[Trajectory]) -> list[torch.Tensor]:
    parts = []
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.tokens.astype(np.int64))[None]
        logp = torch.log_softmax(model(ids).logits[0, :-1].float(), -1).gather(-1, ids[0, 1:, None])[:, 0]
        parts.append(logp[torch.from_numpy(trajectory.action_mask[1:])])
    loss(torch.cat(parts)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_it_equals_full_sequences_and_accumulates() -> None:
    model, trajectories = tiny(), group()
    expected = conventional(model, trajectories)
    model.zero_grad()
    logp, _ = accumulate(model, trajectories, loss)
    assert len(logp) == 21
    once = [parameter.grad.clone() for parameter in model.parameters()]
    for mine, theirs in zip(once, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5, rtol=1e-3)
    accumulate(model, trajectories, loss)
    for parameter, single in zip(model.parameters(), once, strict=True):
        assert torch.allclose(parameter.grad, 2 * single, atol=1e-5, rtol=1e-4)


def test_bad_losses_and_empty_groups_leave_no_gradient() -> None:
    model, trajectories = tiny(), group()
    with pytest.raises(NonFiniteError):
        accumulate(model, trajectories, lambda logp: logp.sum() * math.inf)
    with pytest.raises(ConfigError, match="does not depend"):
        accumulate(model, trajectories, lambda logp: torch.ones((), requires_grad=True))
    with pytest.raises(GroupError):
        accumulate(model, group(lengths=(0,)), loss)
    assert all(parameter.grad is None for parameter in model.parameters())
