"""The discontinuous decisions of one full-sequence pass, imposed on other ways of computing the same trajectories.

Idea: in a 16-bit type routers and indexers decide otherwise than in float32 for some tokens. Each such token moves the gradient
by a jump, so that the error of a whole gradient, ours or conventional training's, is that of which tokens happened to flip: it
varies tenfold from seed to seed and says nothing of rounding or mistakes. A comparison in such a type therefore gives both ways
the decisions of the float32 pass, and counts, for each way, the decisions that it would have made otherwise.

Vocabulary
    decision   the experts that a router picks for a token, or the positions that an indexer picks for a query
    own        what the way at hand would decide by itself

Shapes: B rows, T inputs of a run or trajectory, k picks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer.architectures import unwrap
from longstraw_agents.trainer.replay import TreeReplay
from longstraw_agents.trainer.routing import routers, routing
from longstraw_agents.trainer.sparse import SparseState, indexers

KINDS = ("routing", "selection")


class Decisions:
    """Decisions by trajectory (its inputs' bytes), kind and layer, as a full-sequence pass made them."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, str, int], Tensor] = {}

    @contextmanager
    def recorded(self, model: nn.Module) -> Iterator[None]:
        """Within the block full-sequence passes of `model`, one trajectory each, are recorded."""

        def note(inputs: bytes, kind: str, layer: int, own_Tk: Tensor) -> Tensor:
            self._known[inputs, kind, layer] = own_Tk
            return own_Tk

        with _deciding(model, note):
            yield

    @contextmanager
    def imposed(self, model: nn.Module) -> Iterator[Counter[str]]:
        """Within the block full-sequence passes of `model` decide as was recorded. Yields the counts that `differing` reads."""
        counts: Counter[str] = Counter()

        def repeat(inputs: bytes, kind: str, layer: int, own_Tk: Tensor) -> Tensor:
            known_Tk = self._of(inputs, kind, layer).to(own_Tk)
            seen = (lambda picks: _visible(picks, 0)) if kind == "selection" else (lambda picks: picks)
            _count(counts, kind, seen(own_Tk), seen(known_Tk))
            return known_Tk

        with _deciding(model, repeat):
            yield counts

    def impose_on(self, work: TreeReplay) -> Counter[str]:
        """Make the tree's runs decide as was recorded for its trajectories. Returns the counts that `differing` reads."""
        counts: Counter[str] = Counter()
        inputs = [trajectory.tokens[:-1].astype("int64").tobytes() for trajectory in work.tree.trajectories]

        def repeat(kind: str, layer: int, own_BTk: Tensor) -> Tensor:
            run, result_BTk = work.state.run, own_BTk.clone()
            assert run is not None
            part = work.engine.context.part(run.length)
            start = run.start + part.first
            for row, index in enumerate(run.nodes):
                node = work.tree.nodes[index]
                stop = max(start, min(start + part.real, node.stop - 1))  # what lies after it is padding
                known_Tk = self._of(inputs[node.trajectories[0]], kind, layer)[start:stop].to(own_BTk)
                own_Tk = result_BTk[row, : stop - start]
                if kind == "selection":
                    own_Tk, known_Tk = _visible(own_Tk, start), _fit(_visible(known_Tk, start), own_Tk.shape[-1])
                _count(counts, kind, own_Tk, known_Tk)
                result_BTk[row, : stop - start] = known_Tk
            return result_BTk

        for number, state in enumerate(work.state.layers):
            if state.routing is not None:
                state.routing.decide = _routed(state.routing, number, repeat)  # type: ignore[attr-defined]
            if isinstance(state, SparseState):
                state.select = _selected(state, number, repeat)  # type: ignore[method-assign]
        return counts

    def _of(self, inputs: bytes, kind: str, layer: int) -> Tensor:
        if (inputs, kind, layer) not in self._known:
            raise ModelError(f"no {kind} was recorded in layer {layer} for this trajectory; run it under `recorded` first")
        return self._known[inputs, kind, layer]


def differing(counts: Counter[str]) -> dict[str, float]:
    """The share of decisions, by kind, that a way would have made otherwise than it was made to. Kinds without any are absent."""
    return {kind: counts[kind] / counts[f"all {kind}"] for kind in KINDS if counts[f"all {kind}"]}


def _count(counts: Counter[str], kind: str, own_Tk: Tensor, known_Tk: Tensor) -> None:
    """Compare decisions as sets; only those of runs that are differentiated, so that each is counted once."""
    if torch.is_grad_enabled():
        counts[kind] += int((own_Tk.sort(-1).values != known_Tk.sort(-1).values).any(-1).sum())
        counts[f"all {kind}"] += len(own_Tk)


def _visible(picks_Tk: Tensor, start: int) -> Tensor:
    """Picked positions in descending order; -1, last, in place of those after the query, which are picked for want of others."""
    query_T1 = torch.arange(start, start + len(picks_Tk), device=picks_Tk.device)[:, None]
    return picks_Tk.masked_fill(picks_Tk > query_T1, -1).sort(-1, descending=True).values


def _fit(picks_Tk: Tensor, count: int) -> Tensor:
    """The first `count` picks, or all and -1 for what is missing: a run that sees fewer positions gives fewer picks."""
    return nn.functional.pad(picks_Tk[:, :count], (0, max(0, count - picks_Tk.shape[-1])), value=-1)


def _routed(state: Any, layer: int, repeat: Callable[[str, int, Tensor], Tensor]) -> Callable[..., Tensor]:
    decide = state.decide

    def decided(run: Any, picks_Nk: Tensor, experts: int) -> Tensor:
        own_Nk = decide(run, picks_Nk, experts)
        return repeat("routing", layer, own_Nk.view(run.rows, -1, own_Nk.shape[-1])).flatten(0, 1)

    return decided


def _selected(state: Any, layer: int, repeat: Callable[[str, int, Tensor], Tensor]) -> Callable[..., Tensor]:
    select = state.select
    return lambda indexer, score: repeat("selection", layer, select(indexer, score))


@contextmanager
def _deciding(model: nn.Module, settle: Callable[[bytes, str, int, Tensor], Tensor]) -> Iterator[None]:
    """Within the block every decision of a full-sequence pass goes through `settle`(inputs, kind, layer, own [T, k])."""
    base: Any = unwrap(model)
    inputs = b""
    replaced: list[nn.Module] = []

    def begin(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        nonlocal inputs
        if len(arguments[0]) != 1:
            raise ModelError(f"decisions are those of one trajectory at a time, but {len(arguments[0])} rows were run")
        inputs = arguments[0].cpu().numpy().tobytes()

    class Router:
        """What `routing.routing` asks, in the place of a run's state."""

        def __init__(self, layer: int) -> None:
            self.layer = layer

        def decide(self, run: Any, own_Tk: Tensor, experts: int) -> Tensor:
            return settle(inputs, "routing", self.layer, own_Tk)

    def seat(layer: int) -> Any:
        return Router(layer), None

    def selecting(indexer: Any) -> Callable[..., Tensor]:
        forward = indexer.forward
        return lambda *args, **kwargs: settle(inputs, "selection", indexer.layer_idx, forward(*args, **kwargs)[0])[None]

    hook = base.get_input_embeddings().register_forward_pre_hook(begin)
    try:
        for layer, router in routers(base):
            router.forward = routing(router, partial(seat, layer))
            replaced.append(router)
        for indexer in indexers(base):
            indexer.forward = selecting(indexer)
            replaced.append(indexer)
        yield
    finally:
        hook.remove()
        for module in replaced:
            del module.forward
