"""The other side of `long_context.py`: conventional training of one member of a group, through the untouched model."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.long_runs import timed
from longstraw_agents.trainer import conventional, kernels
from longstraw_agents.types import Trajectory


def with_our_kernel() -> str:
    """Register the chosen fast kernel as an ordinary attention function, so that conventional training can use it too."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            kernel = kernels.choose(q, k, v)
            assert kernel is not None
            out, lse = kernel.forward(q, k, v, True, scale)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.kernel, ctx.scale = kernel, scale
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Any:
            q, k, v, out, lse = ctx.saved_tensors
            return *ctx.kernel.backward(dout.contiguous(), q, k, v, out, lse, True, ctx.scale), None

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **kwargs: Any) -> Any:
        return Attention.apply(q, k, v, scaling).transpose(1, 2), None

    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register("benchmark_kernel", attention)
    transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("benchmark_kernel", lambda *a, **k: None)
    return "benchmark_kernel"


def conventional_member(model: nn.Module, trajectory: Trajectory, attention: str) -> dict[str, Any]:
    """One scoring pass, and one forward and backward with activation checkpointing, of one member."""
    config = model.get_base_model().config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, attention
    positions = conventional.loss_positions(trajectory)
    try:
        with torch.no_grad():
            _, score = timed(lambda: conventional.log_probabilities(model, trajectory.tokens, positions))

        def train() -> None:
            logp = conventional.log_probabilities(model, trajectory.tokens, positions, checkpointing=True)
            (logp.sum() / 1000).backward()

        _, step = timed(train)
    finally:
        config._attn_implementation = before
        model.zero_grad()
    return {"score": score, "train": step, "seconds": score["seconds"] + step["seconds"]}
