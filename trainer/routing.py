"""Expert routing that a recomputed chunk repeats as it was captured.

Idea: a router picks k of E experts per token by a top-k of its scores, a decision that rounding can flip. When a chunk is
captured its picks are recorded beside the state; when it runs again under autograd its routers are given the recorded picks,
so that the gradient is that of the function that was captured, and tokens whose own scores would now pick otherwise are counted
(`flips`). The weights of the picked experts are computed from the scores of the rerun, as ever. Picks take k bytes per token and
layer where there are at most 256 experts, else 2 k: 600 MB for 75 layers, k = 8 and a million tokens.

Shapes: T tokens of a run, E experts, k picks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer.state import Run

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class RoutingState:
    """The recorded picks of one layer's router along the current path, by run: [T, k] at the position where the run began."""

    def __init__(self) -> None:
        self._changed: Tensor | int = 0  # counted where they lie, read when asked for
        self.picks: dict[int, Tensor] = {}

    @property
    def flips(self) -> int:
        """Tokens of captured runs whose own scores would now pick otherwise."""
        return int(self._changed)

    @flips.setter
    def flips(self, count: int) -> None:
        self._changed = count

    def decide(self, run: Run, picks_Tk: Tensor, experts: int) -> Tensor:
        """Record a captured run's picks, or give a rerun those that were recorded."""
        if run.rows != 1:
            return picks_Tk
        if run.writes:
            self.picks[run.start] = picks_Tk.to(torch.uint8 if experts <= 256 else torch.int16)
        elif run.gradient and len(self.picks.get(run.start, ())) == len(picks_Tk):
            before = self.picks[run.start].to(picks_Tk)
            self._changed = self._changed + (before.sort(-1).values != picks_Tk.sort(-1).values).any(-1).sum()
            return before
        return picks_Tk

    def export(self, start: int, stop: int) -> dict[str, Tensor]:
        """The picks of the run [start, stop), for `adopt`."""
        return {"picks": self.picks[start]}

    def adopt(self, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
        """Take what `export` gave."""
        self.picks[start] = tensors["picks"]

    def truncate(self, position: int) -> None:
        """Forget what was recorded at `position` and after it."""
        self.picks = {start: picks for start, picks in self.picks.items() if start < position}

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(picks.nbytes for picks in self.picks.values())


class _Picks(TorchFunctionMode):
    """Passes the picks of a router's top-k over all experts through `decide`."""

    def __init__(self, decide: Callable[[Tensor], Tensor], experts: int, count: int) -> None:
        super().__init__()
        self._decide, self._experts, self._count = decide, experts, count
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.Tensor.topk, torch.topk):
            return result
        scores: Tensor = args[0]
        if scores.ndim != 2 or scores.shape[-1] != self._experts or result.indices.shape[-1] != self._count:
            return result  # a choice among groups of experts; the last top-k is over the experts
        self.seen = True
        picks = self._decide(result.indices)
        return result if picks is result.indices else torch.return_types.topk((scores.gather(-1, picks), picks))


def routing(router: Any, state_of: Callable[[], tuple[RoutingState, Run]]) -> Callable[..., Any]:
    """A forward for a router module that records and repeats its picks."""
    forward = router.forward

    def route(*args: Any, **kwargs: Any) -> Any:
        state, run = state_of()
        decide = lambda picks: state.decide(run, picks, router.num_experts)
        with _Picks(decide, router.num_experts, router.top_k) as mode:
            result = forward(*args, **kwargs)
        if not mode.seen:
            raise ModelError(f"{type(router).__name__} routes without a top-k over its experts; no exact replay is known")
        return result

    return route


def routers(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """(layer, module) of every router of a model."""
    for name, module in model.named_modules():
        match = _LAYER.search(name)
        if match and hasattr(module, "top_k") and hasattr(module, "num_experts") and hasattr(module, "weight"):
            yield int(match[1]), module
