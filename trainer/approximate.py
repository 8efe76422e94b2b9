"""A prefix's state of which only some tokens are fresh, and the replay that reads it. Exact code refuses it.

Idea: a step moves some tokens' keys and values more than others'. The lowest layers that change are run for all tokens, which
is exact and cheap; how far a token's keys and values moved there says how far they will move above. Only the tokens that moved
most are run through the layers above, each reading what lies before it, fresh or stale. (The choice by deviation in a low layer
is CacheBlend's, arXiv:2405.16444; there it is text chunks that meet, here it is weights that change.) Where a layer is
recurrent, or records decisions per run, single tokens can't be run: there the last spans are run again, from a stale state on.

Vocabulary
    drift    how far a token's keys and values moved in one layer: the sum of |new - old| / mean |old| of both
    probe    the layer whose drift is measured: the one above the lowest that trains
    share    the part of a prefix's tokens that is run through all layers

Shapes: P tokens of the prefix, M chosen ones, H query heads, K key heads, D and E head sizes, C hidden size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from longstraw_agents.segmenter import PrefixTree
from longstraw_agents.trainer.architectures import make_state
from longstraw_agents.trainer.attention import ACTIVE, Spec
from longstraw_agents.trainer.frontier import Entry, kept_input, started_from, stopped_before
from longstraw_agents.trainer.replay import Engine, Scores, TreeReplay
from longstraw_agents.trainer.state import AttentionState, Run, StateCache
from longstraw_agents.types import TokenArray

_QUERIES = 256  # chosen tokens that attend at once


class ApproximateState:
    """The state of one prefix of which, after steps of the weights, only some tokens are fresh. Exact code refuses it.

    `tokens_run` counts tokens times layers that refreshes ran.
    """

    def __init__(self, engine: Engine, tokens: TokenArray, state: StateCache, spans: list[tuple[int, int]]) -> None:
        self.tokens, self.spans = tokens, spans
        self.tokens_run = 0
        self._engine, self._state = engine, state
        self._stamps = engine.stamps.layers()
        self._input: tuple[str, Tensor] | None = None  # of the frontier: its stamp, and [1, P, C]

    @classmethod
    def of(cls, engine: Engine, tokens: TokenArray, exact: StateCache | None = None) -> ApproximateState:
        """Begin with an exact state of the input tokens [P]: a copy of `exact`, or captured here."""
        chunk = engine.config.chunk
        spans = [(start, min(len(tokens), start + chunk)) for start in range(0, len(tokens), chunk)]
        state = make_state(engine.base, len(tokens), placement=engine.config.placement)
        approximate = cls(engine, tokens, state, spans)
        if exact is not None:
            _copy(exact, approximate._state, spans)
        else:
            with engine.attached(), torch.no_grad():
                for start, stop in spans:
                    engine.decode(tokens[None, start:stop], _capture(start, stop), approximate._state)
                    approximate._state.collect()
        return approximate

    def nbytes(self) -> int:
        """Bytes held."""
        return self._state.nbytes()["state"] + (0 if self._input is None else self._input[1].nbytes)

    def give(self, state: StateCache) -> None:
        """Copy into an `ApproximateReplay`'s working state."""
        _copy(self._state, state, self.spans)

    def refresh(self, share: float, choose: str = "drift", seed: int = 0) -> None:
        """Bring `share` of the tokens up to the current weights, through all layers. Does nothing if those did not change."""
        stamps = self._engine.stamps.layers()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        count = math.ceil(share * len(self.tokens))
        with self._engine.attached(), torch.no_grad():
            if all(type(layer) is AttentionState and layer.routing is None for layer in self._state.layers):
                self._refresh_tokens(count, choose, seed)
            else:
                self._rescan(count)

    # -- attention: single tokens ---------------------------------------------------------------------------------------

    def _refresh_tokens(self, count: int, choose: str, seed: int) -> None:
        layers = len(self._state.layers)
        frontier = self._engine.frontier
        if frontier == layers:
            return
        probe = min(frontier + 1, layers - 1)
        old = self._read(probe)
        hidden_1PC = self._run_low(probe)
        if choose == "drift":
            new = self._read(probe)
            chosen_M = (_moved(new[0], old[0]) + _moved(new[1], old[1])).topk(count).indices.sort().values
        else:
            generator = torch.Generator().manual_seed(seed)
            chosen_M = torch.randperm(len(self.tokens), generator=generator)[:count].sort().values
        if probe + 1 < layers and count:
            chosen_M = chosen_M.cpu()
            self._run_chosen(chosen_M, Entry(probe + 1, hidden_1PC[:, chosen_M.to(hidden_1PC.device)]))
            self.tokens_run += count * (layers - probe - 1)

    def _read(self, layer: int) -> tuple[Tensor, Tensor]:
        state = self._state.layers[layer]
        assert isinstance(state, AttentionState)
        return state.keys.read(0, len(self.tokens)).clone(), state.values.read(0, len(self.tokens)).clone()

    def _run_low(self, probe: int) -> Tensor:
        """Run all tokens up to and including layer `probe`, exactly; returns the input [1, P, C] of the layer above it."""
        engine, frontier = self._engine, self._engine.frontier
        stamp = engine.stamps.stamps(fresh=False).inputs[frontier]
        stored = self._input[1] if self._input is not None and self._input[0] == stamp else None
        with (
            stopped_before(engine.decoder, probe + 1), kept_input(engine.decoder, frontier) as low,
            kept_input(engine.decoder, probe + 1) as high,
        ):  # fmt: skip
            for start, stop in self.spans:
                entry = None if stored is None or frontier == 0 else Entry(frontier, stored[:, start:stop])
                engine.decode(self.tokens[None, start:stop], _capture(start, stop), self._state, entry)
                self._state.collect()
        self._input = (stamp, torch.cat(low, dim=1)) if stored is None else self._input
        self.tokens_run += len(self.tokens) * (probe + 1 - (0 if stored is None else frontier))
        return torch.cat(high, dim=1)

    def _run_chosen(self, chosen_M: Tensor, entry: Entry) -> None:
        """Run chosen tokens from `entry` on; each reads all that lies before it, and writes where it lies."""
        engine = self._engine
        scattered = _Scattered(self._state, chosen_M.to(engine.device))
        token = ACTIVE.set(scattered)
        try:
            with started_from(engine.decoder, entry):
                engine.decoder(
                    input_ids=torch.as_tensor(self.tokens, dtype=torch.int64)[chosen_M][None].to(engine.device),
                    position_ids=scattered.positions_M[None], use_cache=True, **{engine.cache_argument: scattered},
                )  # fmt: skip
        finally:
            ACTIVE.reset(token)

    # -- recurrent layers: the last spans -------------------------------------------------------------------------------

    def _rescan(self, count: int) -> None:
        for start, stop in self.spans:
            if count and stop > len(self.tokens) - count:
                self._engine.decode(self.tokens[None, start:stop], _capture(start, stop), self._state)
                self._state.collect()
                self.tokens_run += (stop - start) * len(self._state.layers)


class _Scattered(StateCache):
    """The states as a run of single tokens at `positions_M` meets them."""

    def __init__(self, state: StateCache, positions_M: Tensor) -> None:
        super().__init__(state.layers)
        self.positions_M = positions_M
        self.start = int(positions_M[0])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """transformers: a layer stores the chosen tokens' keys and values."""
        state = self.layers[layer_idx]
        assert isinstance(state, AttentionState)
        state.keys.write_at(self.positions_M, key_states)
        state.values.write_at(self.positions_M, value_states)
        return key_states, value_states

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
        """out_1HME: each chosen token's attention over everything up to its own position."""
        state = self.layers[module.layer_idx]  # type: ignore[index]
        assert isinstance(state, AttentionState)
        last = int(self.positions_M[-1]) + 1
        keys, values = state.keys.read(0, last), state.values.read(0, last)
        parts = zip(q.split(_QUERIES, dim=2), self.positions_M.split(_QUERIES), strict=True)
        return torch.cat([_masked(part, keys, values, positions, spec) for part, positions in parts], dim=2)


def _masked(q_1HMD: Tensor, k_1KSD: Tensor, v_1KSE: Tensor, positions_M: Tensor, spec: Spec) -> Tensor:
    _, H, M, D = q_1HMD.shape
    K = k_1KSD.shape[1]
    wide = torch.promote_types(q_1HMD.dtype, torch.float32)
    q = q_1HMD.reshape(K, H // K * M, D)
    scores = (q @ k_1KSD[0].transpose(1, 2)).to(wide).reshape(K, H // K, M, -1) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    key_1S = torch.arange(k_1KSD.shape[2], device=q.device)[None]
    hidden = key_1S > positions_M[:, None]
    if spec.window is not None:
        hidden |= key_1S <= positions_M[:, None] - spec.window
    weights = scores.masked_fill_(hidden, -math.inf).softmax(-1).to(v_1KSE.dtype)
    return (weights.reshape(K, H // K * M, -1) @ v_1KSE[0]).reshape(1, H, M, -1)


def _moved(new_1KPD: Tensor, old_1KPD: Tensor) -> Tensor:
    """How far each token moved [P], in units of the mean token's size."""
    size = lambda x_1KPD: x_1KPD[0].to(torch.float32).square().sum((0, 2)).sqrt()
    return size(new_1KPD - old_1KPD) / size(old_1KPD).mean()


def _capture(start: int, stop: int) -> Run:
    return Run(start, stop - start, 1, writes=True, gradient=False)


def _copy(source: StateCache, target: StateCache, spans: list[tuple[int, int]]) -> None:
    for start, stop in spans:
        for layer in range(len(source.layers)):
            target.adopt(layer, start, stop, source.export(layer, start, stop))


class ApproximateReplay(TreeReplay):
    """A tree whose root is read from an approximate state; everything after the root is run under the current weights."""

    def __init__(self, engine: Engine, tree: PrefixTree, root: ApproximateState) -> None:
        super().__init__(engine, tree)
        self._root = root

    def _capture(self, index: int, out: Scores | None) -> None:
        node = self.tree.nodes[index]
        if node.parent is not None:
            super()._capture(index, out)
        elif index not in self._resident:
            self._leave_to(None)
            self._root.give(self.state)
            self._resident.append(index)
