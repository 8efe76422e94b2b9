"""Recurrent layers under context parallelism: tokens change places with heads.

Idea: a recurrence over tokens can't be cut along tokens without waiting, but its heads do not see each other. So for the
delta rule alone the processes swap: each gives away its span of tokens of all heads and gets all tokens of its own heads, runs
the layer's own rule on them from its own heads' state, and swaps back. Nobody waits for a neighbour's state, the recurrent
matrices and their cotangents stay where their heads are, and each process keeps 1/R of them. The convolution before it is per
channel and reaches back a few tokens: it reads the tail of the spans before, gathered (a few tokens each); of the tail at a
border each process keeps its share of the channels.

Shapes: R processes, B rows, c tokens of a span, T = R * c, H heads, C channels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longstraw_agents.trainer.context import Context
from longstraw_agents.trainer.delta_rule import RULE, SINGLE_RULE
from longstraw_agents.trainer.ranks import Ranks
from longstraw_agents.trainer.stack import wide
from longstraw_agents.trainer.state import RecurrentState


class SharedRecurrentState(RecurrentState):
    """A recurrent layer's state on one process: the matrices of its own heads, and the tail of its own channels."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context

    def update_conv_state(self, new_BCT: Tensor, kernel: int) -> Tensor:
        """Return the convolution's inputs: the `kernel` positions before this process's span, then the span."""
        context, length = self.context, self.run.length
        R, r, C = context.size, context.rank, new_BCT.shape[1]
        share = -(-C // R)  # channels of the stored tail that each process keeps
        kept = [min(kernel, context.part(length, s).real) for s in range(R)]
        real = new_BCT[..., : context.part(length).real]
        last = nn.functional.pad(real, (kernel, 0))[..., -kernel:]
        stored = self._incoming("tail")
        if stored is None:
            stored = new_BCT.new_zeros(len(new_BCT), share, kernel)
        tails = _Gather.apply(torch.cat([last, stored], dim=1), context.ranks)  # type: ignore[no-untyped-call]
        before = tails[:, :, C:].movedim(0, 1).flatten(1, 2)[:, :C]
        # One sequence of the stored tail and the ends of all spans. Reading slices of it keeps every process's graph alike,
        # so that all of them take part in the exchange of its backward pass.
        sequence = torch.cat([before, *(tails[s, :, :C, kernel - kept[s] :] for s in range(R))], dim=-1)
        whole = nn.functional.pad(sequence[..., -kernel:], (0, 0, 0, share * R - C))
        self._keep("tail", whole[:, r * share : (r + 1) * share])
        own = kernel + sum(kept[:r])
        return torch.cat([sequence[..., own - kernel : own], new_BCT], dim=-1)


class _Gather(torch.autograd.Function):
    """Every process's x: [R, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        """The whole, from all processes' parts."""
        ctx.ranks = ranks
        return ranks.gather(x, name="convolution tails")

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None]:
        """This process's part of the summed gradient."""
        return ctx.ranks.scatter_sum(grad_R.to(wide(grad_R.dtype)), name="convolution tails").to(grad_R.dtype), None


def _swap(ranks: Ranks, tensors: tuple[Tensor, ...], to_heads: bool) -> tuple[Tensor, ...]:
    """[B, c, H, ...] of all heads -> [B, T, H / R, ...] of all tokens, or back; one exchange for each type."""
    R = ranks.size("context")
    result: list[Tensor] = list(tensors)
    for dtype in sorted({x.dtype for x in tensors}, key=str):
        chosen = [i for i, x in enumerate(tensors) if x.dtype == dtype]
        parts = []
        for i in chosen:
            B, n, H, *rest = tensors[i].shape
            apart = tensors[i].reshape(B, n, R, H // R, *rest) if to_heads else tensors[i].reshape(B, R, n // R, H, *rest)
            parts.append(apart.movedim(2 if to_heads else 1, 0))  # [R, B, c, h, ...]
        got = ranks.exchange(torch.cat([part.reshape(R, -1) for part in parts], dim=1), name="heads")
        for i, part, flat in zip(chosen, parts, got.split([part[0].numel() for part in parts], dim=1), strict=True):
            _, B, c, h, *rest = part.shape
            joined = flat.reshape(part.shape).movedim(0, 1 if to_heads else 2)
            result[i] = joined.reshape(B, R * c, h, *rest) if to_heads else joined.reshape(B, c, R * h, *rest)
    return tuple(result)


class _Swap(torch.autograd.Function):
    """`_swap` of several tensors, differentiable."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Heads for tokens, or tokens for heads."""
        ctx.ranks, ctx.to_heads = ranks, to_heads
        return _swap(ranks, tensors, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The other way round."""
        return None, None, *_swap(ctx.ranks, grads, not ctx.to_heads)


def _pad_heads(x_BcH: Tensor, heads: int) -> Tensor:
    missing = heads - x_BcH.shape[2]
    return x_BcH if not missing else nn.functional.pad(x_BcH, (0, 0) * (x_BcH.ndim - 3) + (0, missing))


def by_heads(rule: Callable[..., Any], context: Context, length: Callable[[], int]) -> Callable[..., Any]:
    """The delta rule `rule` over spans of tokens [B, c, H, ...]. length: the current run's tokens, padding not counted.

    Heads that do not divide evenly are padded with empty ones; key heads shared by several value heads are repeated first
    where they do not divide.
    """

    def shared(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, Any]:
        R, c, values = context.size, query.shape[1], value.shape[2]
        if query.shape[2] % R:
            repeats = values // query.shape[2]
            query, key = query.repeat_interleave(repeats, dim=2), key.repeat_interleave(repeats, dim=2)
        padded = (_pad_heads(x, -(-x.shape[2] // R) * R) for x in (query, key, value, g, beta))
        mine = [x[:, : length()] for x in _Swap.apply(context.ranks, True, *padded)]  # type: ignore[no-untyped-call]
        out, final = rule(*mine[:3], g=mine[3], beta=mine[4], **options)
        out = nn.functional.pad(out, (0, 0, 0, 0, 0, R * c - out.shape[1]))
        (out,) = _Swap.apply(context.ranks, False, out)  # type: ignore[no-untyped-call]
        return out[:, :, :values], final

    return shared


@contextmanager
def shared_rules(decoder: nn.Module, context: Context, length: Callable[[], int]) -> Iterator[None]:
    """Within the block the delta rule of the decoder's layers runs by heads over the context's processes."""
    modules = {sys.modules[type(module).__module__] for module in decoder.modules()}
    before = {module: getattr(module, RULE) for module in modules if hasattr(module, RULE)}
    singles = {module: getattr(module, SINGLE_RULE) for module in before}
    try:
        for module, rule in before.items():
            shared = by_heads(rule, context, length)
            setattr(module, RULE, shared)
            setattr(module, SINGLE_RULE, shared)  # a span of one token is not a run of one token
        yield
    finally:
        for module in before:
            setattr(module, RULE, before[module])
            setattr(module, SINGLE_RULE, singles[module])
