"""Lifting: a float64 model that really computes in float64.

Transformers' models up-cast parts of themselves to float32 whatever their type is: norms, rotary embeddings, routers, the
delta rule, eager softmax. A float64 comparison then ends near 1e-7, and a mistake below that can't be told from rounding.
Inside `lifted()` every request for float32 is answered with float64: `.float()`, `.to(torch.float32)`, `dtype=torch.float32`.
Nothing of the model is changed, so there is nothing to restore: the rewriting is a torch function mode of the calling thread,
and ends with the block. The backward pass, and what is recomputed in it, is lifted too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _edges(value: Any) -> Any:
    """The same places in the graph, named without tensors."""
    if isinstance(value, torch.Tensor):
        return get_gradient_edge(value)
    if isinstance(value, (tuple, list)):
        return tuple(_edges(part) for part in value)
    return value


class _Lift(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            return self._differentiate(func, args, kwargs)
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*(_widen(value) for value in args), **{name: _widen(value) for name, value in kwargs.items()})

    def _differentiate(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a backward pass with the mode on. Torch turns it off while it handles a call, and would hand one that has
        tensors among its arguments back to it without end: places in the graph stand in for them."""
        if func is torch.Tensor.backward:
            func = torch.autograd.backward
            kwargs["grad_tensors"] = kwargs.pop("gradient", None)
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = _edges(kwargs["inputs"])
        places = 2 if func is torch.autograd.grad else 1  # (outputs, inputs) or (tensors,)
        with self:
            return func(*map(_edges, args[:places]), *args[places:], **kwargs)


@contextmanager
def lifted(enabled: bool = True) -> Iterator[None]:
    """Within the block, requests for float32 give float64. For models whose parameters are float64; others would be mixed."""
    if not enabled:
        yield
        return
    with _Lift():
        yield
