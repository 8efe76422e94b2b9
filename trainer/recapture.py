"""Recapture: after an optimizer step, refresh the states that are needed again, and no more than is exact.

Idea: a prefix is captured span by span, and what each span wrote is kept on a shelf beside the digests of the tokens before it
and of the weights it depends on. The next capture walks its tokens along the kept spans. Where nothing changed, a span's states
are taken over. Where only layers from the frontier on train, the layers below are taken over, and the span is run from the
frontier's stored input. What was never captured (a longer prefix, a new one) is run whole. A state is found only under the
stamps of the weights that read it, so a stale one cannot be read: there is no second copy to keep in step.

The reverse pass stops at the frontier too: it runs a span again from the same stored input.

Vocabulary
    span      the positions [start, stop) of one run, and the digest of all tokens before `stop`, with the borders between spans
    below     the part of a span that survives a step: states of the layers under the frontier, and the frontier's input
    above     its other part: states from the frontier on
    hit       a span of which nothing was run; refreshed: it was kept under other weights; extended: it is new and follows a
              kept one; missed: all else. Counted in tokens (positions)

Shapes: T tokens, C hidden size, L layers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from longstraw_agents.errors import ConfigError, CorruptionError
from longstraw_agents.trainer.architectures import make_state
from longstraw_agents.trainer.frontier import Entry, kept_input
from longstraw_agents.trainer.shelf import Shelf, ShelfConfig, Stamp
from longstraw_agents.trainer.stamps import Stamps, require_fresh
from longstraw_agents.trainer.state import Run, StateCache
from longstraw_agents.types import TokenArray

if TYPE_CHECKING:
    from longstraw_agents.trainer.replay import Engine


#: What a report counts, in tokens. run_anyway: fresh, but run for its loss tokens' scores; whole and from_frontier: how what
#: ran was run; corrupt: kept, but not what had been written.
KINDS = ("hit", "refreshed", "extended", "missed", "run_anyway", "from_frontier", "whole", "corrupt")


@dataclass(frozen=True)
class Span:
    """Positions [start, stop) on a path; `chain` is the digest of everything before `stop`, `before` that before `start`."""

    start: int
    stop: int
    before: str
    chain: str

    @classmethod
    def after(cls, before: str, start: int, inputs_T: TokenArray) -> Span:
        """The span of `inputs_T` that follows what `before` stands for ("" at position 0)."""
        data = before.encode() + np.ascontiguousarray(inputs_T, dtype="<i4").tobytes()
        return cls(start, start + len(inputs_T), before, hashlib.blake2b(data, digest_size=16).hexdigest())


@dataclass(frozen=True)
class Recapture:
    """Kept states of one model over many updates."""

    engine: Engine
    shelf: Shelf
    counts: Counter[str] = field(default_factory=Counter)
    _following: dict[str, dict[str, Span]] = field(default_factory=dict)  # chain before -> the spans that begin there

    @classmethod
    def of(cls, engine: Engine, config: ShelfConfig) -> Recapture:
        """Begin with what the shelf's directory, if it has one, still holds.

        Raises ConfigError where several processes share the context: they would have to agree on what is kept; and for states in
        8 bits, which rounding once more would change.
        """
        if engine.config.placement.bits is not None:
            raise ConfigError("kept states are exact; leave `bits` out of the placement, or recapture out of the configuration")
        if engine.context.size > 1:
            raise ConfigError("states are kept by one process; leave recapture out where several share the context")
        recapture = cls(engine, Shelf(config))
        for note in recapture.shelf.notes().values():
            recapture.remember(Span(**note))
        return recapture

    def under(self, stamps: Stamps) -> FreshStates:
        """The kept states as the weights with these stamps may read them."""
        return FreshStates(self, stamps, self.engine.frontier)

    def refresh(self, tokens: TokenArray, chunk: int) -> Iterator[Span]:
        """Bring the states of `tokens` [T] up to date, one span at each `next`, so that it fits between other work.

        What was finished stays finished if it is not carried on, or the process dies. Raises StaleStateError if the weights
        change on the way: begin again then.
        """
        return Prefix(self, len(tokens)).refresh(tokens, chunk)

    def beginning(self, tokens: TokenArray) -> tuple[int, list[dict[str, Tensor]]]:
        """The longest kept beginning of `tokens` that is fresh, for a policy on the same weights to go on from.

        Returns its length and each layer's keys and values [1, K, length, D]; length 0 where nothing is kept, or where some
        layer keeps something else.
        """
        inputs = np.asarray(tokens, dtype=np.int32)
        fresh, found, length = self.under(self.engine.stamps.stamps()), list[dict[str, Tensor]](), 0
        for span in fresh.walk("", inputs, 0, len(inputs)):
            tensors = fresh.tensors(span)
            if tensors is None:
                break
            found.append(tensors)
            length = span.stop
        layers = len(fresh.stamps.states)
        if not found or any({f"{layer}.keys", f"{layer}.values"} - found[0].keys() for layer in range(layers)):
            return 0, []
        join = lambda layer, name: torch.cat([tensors[f"{layer}.{name}"] for tensors in found], dim=2).to(self.engine.device)
        return length, [{name: join(layer, name) for name in ("keys", "values")} for layer in range(layers)]

    def report(self) -> dict[str, Any]:
        """For a receipt: what happened since the last report, in tokens (evictions in items), and what is held now."""
        evicted = {f"evicted_{place}": self.shelf.evicted[place] for place in ("device", "host", "disk")}
        report: dict[str, Any] = {kind: self.counts[kind] for kind in KINDS} | evicted
        report |= {"bytes": self.shelf.nbytes(), "frontier": self.engine.frontier}
        report["saving"] = self.saving()
        self.counts.clear()
        self.shelf.evicted.clear()
        return report

    def saving(self) -> str:
        """In words, what a step leaves fresh, and what adapting only the upper half would."""
        frontier, layers = self.engine.frontier, len(self.engine.stamps.layers(fresh=False))
        if frontier > 0:
            return f"layers 0 to {frontier - 1} of {layers} stay fresh: a refresh runs {layers - frontier} of {layers} layers"
        return (
            "parameters train in the lowest layer or the embeddings, so a step makes every state stale; "
            f"adapting only layers {layers // 2} to {layers - 1} would halve a refresh"
        )

    def remember(self, span: Span) -> None:
        """Let later walks find a span."""
        self._following.setdefault(span.before, {})[span.chain] = span

    def following(self, chain: str) -> list[Span]:
        """Kept spans that begin where `chain` ends, longest first; those of which nothing is left on the shelf are forgotten."""
        spans = self._following.get(chain, {})
        for key in list(spans):
            if self.shelf.stamps(f"{key}-below") is None and self.shelf.stamps(f"{key}-above") is None:
                del spans[key]
        return sorted(spans.values(), key=lambda span: -span.stop)


class Prefix:
    """A prefix that grows, with its state in place: a trajectory under way, whose new tokens are run as they come."""

    def __init__(self, recapture: Recapture, capacity: int) -> None:
        """capacity: the most tokens that it will have."""
        self._recapture, self._capacity = recapture, capacity
        self.state = self._new_state()
        self._tokens: TokenArray = np.empty(0, dtype=np.int32)  # those whose states are in place
        self._chain = ""
        self._fresh: FreshStates | None = None

    def refresh(self, tokens: TokenArray, chunk: int) -> Iterator[Span]:
        """`Recapture.refresh`; tokens that follow those of the call before are run on what is there, if that is still fresh."""
        inputs = np.asarray(tokens, dtype=np.int32)
        stamps = self._recapture.engine.stamps.stamps()
        held = len(self._tokens)
        if self._fresh is None or self._fresh.stamps != stamps or not np.array_equal(inputs[:held], self._tokens):
            self._fresh = self._recapture.under(stamps)
            self._tokens, self._chain, held = inputs[:0], "", 0
            self.state = self._new_state()
        fresh, checked = self._fresh, True
        fresh.missed.clear()  # what an earlier call captured can be extended now
        for span in fresh.walk(self._chain, inputs[held:], held, chunk):
            with fresh.reading(checked=checked), self._recapture.engine.attached(), torch.no_grad():
                fresh.capture(span, inputs[span.start : span.stop], self.state)
            self._tokens, self._chain, checked = inputs[: span.stop], span.chain, False
            yield span

    def _new_state(self) -> StateCache:
        engine = self._recapture.engine
        return make_state(engine.base, self._capacity, placement=engine.config.placement)


class FreshStates:
    """`Recapture` as one set of weights may read it: spans to walk, states to take over, and states to keep."""

    def __init__(self, recapture: Recapture, stamps: Stamps, frontier: int) -> None:
        self._recapture, self._frontier, self.stamps = recapture, frontier, stamps
        self._shelf, self._engine = recapture.shelf, recapture.engine
        self._wanted: dict[str, Stamp] = {
            "below": (*stamps.states[:frontier], stamps.inputs[frontier]),
            "above": stamps.states[frontier:],
        }
        self._since: int | None = None  # within `reading`: what `WeightStamps.changes` was at its start
        self.missed: set[str] = set()  # what follows these is no extension
        self._parts = [part for part in ("below", "above") if (frontier > 0 if part == "below" else stamps.states[frontier:])]

    def walk(self, chain: str, inputs_T: TokenArray, begin: int, chunk: int) -> Iterator[Span]:
        """Part inputs that begin at position `begin` into kept spans where any fresh ones fit, and new ones of `chunk` else.

        `chain` stands for what precedes them.
        """
        at = 0
        while at < len(inputs_T):
            span = self._kept(chain, inputs_T[at:], begin + at, chunk)
            if span is None:
                span = Span.after(chain, begin + at, inputs_T[at : at + chunk])
            yield span
            at, chain = at + span.stop - span.start, span.chain

    def capture(self, span: Span, inputs_T: TokenArray, state: StateCache, *, run_anyway: bool = False) -> Tensor | None:
        """Bring the state of a span into `state`, which holds all before it: taken over, run from the frontier, or run whole.

        Returns the hidden states [1, T, C] of the run where `run_anyway` asks for them; None where no run was needed, and nothing
        of use where one was only for the state: it ends as soon as that is written. Raises StaleStateError, and keeps nothing, if
        the weights changed.
        """
        self.require()
        known = any(self._shelf.stamps(f"{span.chain}-{part}") is not None for part in self._parts)
        below, above = self._read(span, "below"), self._read(span, "above")
        if below is not None:
            self._adopt(span, state, below)
        if below is not None and above is not None and not run_anyway:
            self._adopt(span, state, above)
            self._count("hit", span)
            return None
        entry = self._entry(below)
        hidden = self._run(span, inputs_T, state, entry, wanted=run_anyway)
        if below is not None and above is not None:
            self._count("run_anyway", span)
        else:
            extends = span.before not in self.missed and self._is_kept(span.before)
            kind = "refreshed" if known else "extended" if extends else "missed"
            self._count(kind, span)
            if kind == "missed":
                self.missed.add(span.chain)
        self._count("from_frontier" if entry is not None else "whole", span)
        return hidden

    def require(self) -> None:
        """Raise StaleStateError unless the weights are those with these stamps; within `reading`, as far as torch can tell."""
        if self._since is not None and not self._engine.stamps.moved(self._since):
            return
        now = self._engine.stamps.stamps()
        require_fresh(self.stamps.states, now.states, "the kept state")
        require_fresh(self.stamps.inputs[: self._frontier + 1], now.inputs[: self._frontier + 1], "the kept input")

    @contextmanager
    def reading(self, *, checked: bool = False) -> Iterator[None]:
        """One pass: all weights are checked at its start, unless they just were, and by torch's version counters on the way."""
        if not checked:
            self.require()
        self._since = self._engine.stamps.changes
        try:
            yield
        finally:
            self._since = None

    def entry(self, span: Span) -> Entry | None:
        """Where a run of the span may start; None: at the embeddings."""
        self.require()
        return self._entry(self._read(span, "below")) if self._frontier > 0 else None

    def tensors(self, span: Span) -> dict[str, Tensor] | None:
        """All of a span's states by "layer.name", or None where not all of them are kept fresh."""
        self.require()
        below, above = self._read(span, "below"), self._read(span, "above")
        return None if below is None or above is None else below | above

    # -- parts ----------------------------------------------------------------------------------------------------------

    def _run(self, span: Span, inputs_T: TokenArray, state: StateCache, entry: Entry | None, *, wanted: bool) -> Tensor:
        wanted |= self._frontier == len(self.stamps.states)  # then what is kept is the last layer's output
        run = Run(span.start, span.stop - span.start, 1, writes=True, gradient=False, hidden=wanted)
        with kept_input(self._engine.decoder, self._frontier) as kept:
            hidden = self._engine.decode(inputs_T[None], run, state, entry)
        state.collect()
        self.require()  # they may have changed while it ran
        if entry is None:
            below = self._export(span, state, range(self._frontier))
            self._put(span, "below", below | {"input": kept[0]} if self._frontier > 0 else below)
        self._put(span, "above", self._export(span, state, range(self._frontier, len(state.layers))))
        self._recapture.remember(span)
        return hidden

    def _kept(self, chain: str, inputs_T: TokenArray, start: int, chunk: int) -> Span | None:
        """The longest kept span of these tokens, not longer than `chunk`, of which a part is fresh."""
        for span in self._recapture.following(chain):
            length = span.stop - span.start
            if length <= min(chunk, len(inputs_T)) and Span.after(chain, start, inputs_T[:length]) == span:
                if any(self._shelf.stamps(f"{span.chain}-{part}") == self._wanted[part] for part in self._parts):
                    return span
        return None

    def _is_kept(self, chain: str) -> bool:
        return all(self._shelf.stamps(f"{chain}-{part}") == self._wanted[part] for part in self._parts)

    def _read(self, span: Span, part: str) -> dict[str, Tensor] | None:
        """A fresh part of a span; None where there is none, or what the disk gave back was not what was written."""
        if part not in self._parts:
            return {}
        key = f"{span.chain}-{part}"
        if self._shelf.stamps(key) != self._wanted[part]:
            return None
        try:
            return self._shelf.get(key, self._wanted[part])
        except CorruptionError:
            self._count("corrupt", span)
            return None

    def _put(self, span: Span, part: str, tensors: dict[str, Tensor]) -> None:
        if tensors:
            self._shelf.put(f"{span.chain}-{part}", self._wanted[part], tensors, vars(span))

    def _entry(self, below: dict[str, Tensor] | None) -> Entry | None:
        if not below or "input" not in below:
            return None
        return Entry(self._frontier, below["input"].to(self._engine.device))

    def _export(self, span: Span, state: StateCache, layers: range) -> dict[str, Tensor]:
        named = ((i, state.export(i, span.start, span.stop)) for i in layers)
        return {f"{i}.{name}": tensor for i, tensors in named for name, tensor in tensors.items()}

    def _adopt(self, span: Span, state: StateCache, part: dict[str, Tensor]) -> None:
        by_layer: dict[int, dict[str, Tensor]] = {}
        for key, tensor in part.items():
            layer, _, name = key.partition(".")
            if name:
                by_layer.setdefault(int(layer), {})[name] = tensor
        for index, tensors in by_layer.items():
            state.adopt(index, span.start, span.stop, tensors)

    def _count(self, kind: str, span: Span) -> None:
        self._recapture.counts[kind] += span.stop - span.start
