"""Gradients of 16-bit parameters, summed in float32 over the runs of a tree.

Idea: a parameter gets one summand from every run, and a long trajectory has a thousand runs. Added up in bfloat16, a summand
below a two-hundred-and-fiftieth of the sum is lost, so the error would grow with the number of chunks; conventional training has
one summand for each trajectory. Here the summands are added in float32 and rounded once for each tree. Parameters of 32 bits and
more, as adapters are by default, are left alone and cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def accumulated(model: nn.Module) -> Iterator[dict[Tensor, Tensor | None]]:
    """Within the block, what back-propagation leaves in 16-bit parameters' `.grad` goes to a float32 sum; on exit the sum is
    added to what `.grad` was before. Costs four bytes for each such parameter, within the block.

    Yields the sums by parameter: a sum may be read, or replaced, between two back-propagations."""
    chosen = [p for p in model.parameters() if p.requires_grad and p.dtype.itemsize < 4]
    sums: dict[Tensor, Tensor | None] = {p: None if p.grad is None else p.grad.to(torch.float32) for p in chosen}

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        held = sums[parameter]
        sums[parameter] = parameter.grad.to(torch.float32) if held is None else held.add_(parameter.grad)
        parameter.grad = None

    for parameter in chosen:
        parameter.grad = None
    hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in chosen]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
        while sums:  # one after the other, so that sums and gradients are not held twice
            owner, total = sums.popitem()
            owner.grad = None if total is None else total.to(owner.dtype)
