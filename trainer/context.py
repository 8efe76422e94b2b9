"""Context parallelism: the tokens of a run, and the states they leave, spread over processes.

Idea: R processes share each run. Process r takes the r-th of R equal spans of the run's tokens through the whole model, and
keeps the state of these tokens for good: a long path is striped over the processes, so states, cotangents and work stay
balanced as it grows. Keys, values and their gradients never move. Attention is where tokens meet:

    forward    the run's queries are gathered; every process attends with all of them to the keys it owns (its part of the
               prefix, and its own span of the run); the partial outputs with their log-sum-exp go back to the queries'
               owners, who merge them in float32 or wider
    backward   queries, output gradients, merged outputs and log-sum-exps are gathered; every process computes dK and dV of
               its own keys, whole, and a part of dQ for all queries; the parts are summed at the queries' owners

What moves depends on the run's length, not on the prefix's. Every hidden state has one owner, so its gradient is whole there,
the one that leaves the key and value projections included; gradients of weights are sums over tokens and are summed over
processes once, before the step. Runs are padded at their end to R equal spans; nothing real sees padding.

Shapes: R processes, B rows, H query heads, K key heads, c tokens of one span, T = R * c tokens of a run, S keys, D/E head
sizes. Wide: float32, or the compute type where that is wider.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longstraw_agents.trainer.attention import Prefix, Spec, Visibility, first_seen, merge, part_backward, part_forward
from longstraw_agents.trainer.latent import LatentPrefix, LatentState, require_latent
from longstraw_agents.trainer.ranks import Ranks
from longstraw_agents.trainer.stack import wide
from longstraw_agents.trainer.state import AttentionState, Run, Seed, StoredPrefix


@dataclass(frozen=True)
class Part:
    """A process's span of a run: its first token's offset, its size (equal on all, padding included), its real tokens."""

    first: int
    size: int
    real: int


class Context:
    """How runs are shared out. With one process every run is whole."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.size, self.rank = ranks.size("context"), ranks.rank("context")

    def part(self, length: int, rank: int | None = None) -> Part:
        """The span of a run of `length` tokens that process `rank` (by default this one) takes."""
        rank = self.rank if rank is None else rank
        size = -(-length // self.size)
        return Part(rank * size, size, min(size, max(0, length - rank * size)))

    def gather_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """Each [B, H, c, ...], all of one type, from every process in one exchange: [B, H, T, ...]."""
        flat = self.ranks.gather(torch.cat([x.reshape(-1) for x in tensors]), name="gather tokens")
        parts = flat.split([x.numel() for x in tensors], dim=1)
        return [_tokens_in_order(part, x.shape) for part, x in zip(parts, tensors, strict=True)]

    def merge_partials(self, out_BHTE: Tensor, lse_BHT: Tensor) -> tuple[Tensor, Tensor]:
        """Partial outputs of all queries on this process's keys -> merged out [B, H, c, E] and lse [B, H, c] of its own."""
        B, H, T, E = out_BHTE.shape
        R, c = self.size, T // self.size
        outs = out_BHTE.reshape(B, H, R, c, E).permute(2, 0, 1, 3, 4).reshape(R, -1)
        lses = lse_BHT.reshape(B, H, R, c).permute(2, 0, 1, 3).reshape(R, -1)
        got = self.ranks.exchange(torch.cat([outs, lses], dim=1), name="partial outputs")
        outs, lses = got.split([outs.shape[1], lses.shape[1]], dim=1)
        lse_RBHc = lses.reshape(R, B, H, c)
        lse = lse_RBHc.logsumexp(0)
        return (outs.reshape(R, B, H, c, E) * torch.exp(lse_RBHc - lse)[..., None]).sum(0), lse

    def sum_to_owners(self, x_BHTD: Tensor) -> Tensor:
        """Parts of a gradient of all tokens -> its sum for this process's own, [B, H, c, D]."""
        B, H, T, D = x_BHTD.shape
        parts = x_BHTD.reshape(B, H, self.size, T // self.size, D).permute(2, 0, 1, 3, 4)
        return self.ranks.scatter_sum(parts, name="query gradients")


def _tokens_in_order(flat_Rn: Tensor, shape: Sequence[int]) -> Tensor:
    B, H, c, *rest = shape
    parts = flat_Rn.reshape(-1, B, H, c, *rest)
    return parts.permute(1, 2, 0, 3, *range(4, parts.ndim)).reshape(B, H, -1, *rest)


@dataclass(frozen=True)
class Span:
    """Positions [start, stop) of the path, which this process keeps in the rows from `row` on."""

    start: int
    stop: int
    row: int


class OwnedPositions:
    """Which positions of the path this process owns, in order; its rows are them without gaps."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def write(self, start: int, part: Part) -> int:
        """A run from `start` on is written: whatever lay there is forgotten. Returns the row of its first own token."""
        self.truncate(start)
        row = self.rows_before(start)
        if part.real:
            first = start + part.first
            self._spans.append(Span(first, first + part.real, row))
        return row

    def truncate(self, position: int) -> None:
        """Forget positions from `position`, a border between runs, on."""
        while self._spans and self._spans[-1].start >= position:
            self._spans.pop()

    def rows_before(self, position: int) -> int:
        """How many rows hold positions before `position`, a border between runs."""
        for span in reversed(self._spans):
            if span.start < position:
                return span.row + span.stop - span.start
        return 0

    def positions(self, stop: int, device: torch.device) -> Tensor:
        """The positions before `stop`, a border between runs, by row."""
        kept = [torch.arange(span.start, span.stop, device=device) for span in self.spans(0, stop)]
        return torch.cat(kept) if kept else torch.zeros(0, dtype=torch.int64, device=device)

    def spans(self, first: int, stop: int) -> Iterator[Span]:
        """The spans with a position in [first, stop), whole; `stop` is a border between runs."""
        return (span for span in self._spans if span.stop > first and span.start < stop)


class SharedAttentionState(AttentionState):
    """Keys and values of the positions that this process owns."""

    def __init__(self, capacity: int, context: Context) -> None:
        super().__init__(capacity)
        self.context = context
        self.owned = OwnedPositions()

    @property
    def part(self) -> Part:
        """This process's span of the current run."""
        return self.context.part(self.run.length)

    def update(self, k_BKTD: Tensor, v_BKTE: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of this process's span."""
        self._own = (k_BKTD, v_BKTE)
        if self.run.writes:
            part = self.part
            row = self.owned.write(self.run.start, part)
            self.keys.write(row, k_BKTD.detach()[:, :, : part.real], self.device)
            self.values.write(row, v_BKTE.detach()[:, :, : part.real], self.device)
        return k_BKTD, v_BKTE

    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
        """Attention over the prefix and the run of all processes."""
        return ContextAttention.apply(q, k, v, self, self.run, self.prefix(module), spec)  # type: ignore[no-untyped-call,no-any-return]

    def prefix(self, module: torch.nn.Module) -> Prefix:
        """What this process holds of the run's prefix; rows are its positions."""
        return StoredPrefix(self, self.run_in_rows)

    @property
    def run_in_rows(self) -> Run:
        """The current run with its start and cut counted in rows."""
        before = self.owned.rows_before
        return replace(self.run, start=before(self.run.start), cut=before(self.run.cut))

    @property
    def own_rows(self) -> tuple[int, int]:
        """The rows of the stacks that this process's span of the run takes."""
        row = self.owned.rows_before(self.run.start)
        return row, row + self.part.real

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """The kept output of this process's span, padding included: no gradient reaches it, and it sees no key."""
        known = super().recall()
        if known is None:
            return None
        missing = self.part.size - self.part.real
        pad = torch.nn.functional.pad
        return pad(known[0], (0, 0, 0, missing)), pad(known[1], (0, missing), value=torch.inf)

    def seeds(self) -> list[Seed]:
        """See `LayerState`."""
        part = self.part
        if self._own is None or self.run.rows != 1 or not part.real:
            return []
        pairs = zip(self._own, (self.keys, self.values), strict=True)
        taken = [(out, stack.take(*self.own_rows)) for out, stack in pairs]
        pad = (0, 0, 0, part.size - part.real)
        return [(out, torch.nn.functional.pad(grad, pad).to(out.dtype)) for out, grad in taken if grad is not None]

    def export(self, start: int, stop: int) -> dict[str, Tensor]:
        """See `LayerState`."""
        row, real = self.owned.rows_before(start), self.context.part(stop - start).real
        return {"keys": self.keys.read(row, row + real), "values": self.values.read(row, row + real)}

    def adopt(self, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
        """See `LayerState`."""
        row = self.owned.write(start, self.context.part(stop - start))
        for name, stack in (("keys", self.keys), ("values", self.values)):
            stack.write(row, tensors[name], self.device)
        self._kept.pop(start, None)

    def truncate(self, position: int) -> None:
        """See `LayerState`."""
        super().truncate(position)
        self.owned.truncate(position)


class SharedLatentState(SharedAttentionState, LatentState):
    """Latents and rotary keys of the positions that this process owns, up-projected when read."""

    def prefix(self, module: torch.nn.Module) -> Prefix:
        """What this process holds of the prefix, up-projected when read."""
        require_latent(module)
        return LatentPrefix(self, self.run_in_rows, module)


@dataclass(frozen=True)
class _Piece:
    """Queries [first, last) of the gathered run against keys of this process, from `row` of its stacks on or of its own span."""

    first: int
    last: int
    see: Visibility
    row: int | None  # None: the run's own keys
    k: Tensor
    v: Tensor


def _pieces(state: SharedAttentionState, run: Run, prefix: Prefix, spec: Spec, k: Tensor, v: Tensor) -> Iterator[_Piece]:
    """Every pair of queries and keys of this process that see each other, as calls of a kernel. Own keys come last."""
    c, R, r = k.shape[2], state.context.size, state.context.rank
    own = run.start + r * c
    if spec.window is None:
        for row, kb, vb in prefix.blocks(0):
            yield _Piece(0, R * c, Visibility(run.start, 0, False), row, kb, vb)
        if r + 1 < R:
            yield _Piece((r + 1) * c, R * c, Visibility(own + c, own, False), None, k, v)
    else:
        for s in range(R):
            start = run.start + s * c
            first = first_seen(start, spec.window)
            for span in state.owned.spans(first, run.start):
                see = Visibility(start, span.start, False, spec.window)
                kb, vb = (stack.read(span.row, span.row + span.stop - span.start) for stack in (state.keys, state.values))
                yield _Piece(s * c, (s + 1) * c, see, span.row, kb, vb)
            if s > r and own + c > first:
                yield _Piece(s * c, (s + 1) * c, Visibility(start, own, False, spec.window), None, k, v)
    yield _Piece(r * c, (r + 1) * c, Visibility(own, own, True, spec.window), None, k, v)


class ContextAttention(torch.autograd.Function):
    """out_BHcE of this process's queries over prefix and run, wherever their keys are; see the module's head."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, state: SharedAttentionState, run: Run, prefix: Prefix, spec: Spec
    ) -> Tensor:
        """The merged output of this process's part; see the class."""
        known = state.recall()  # of this run: all processes kept it, or none
        if known is None:
            known = ContextAttention._attend(q, k, v, state, run, prefix, spec)
            state.keep(*known)
        ctx.save_for_backward(q, k, v, *known)
        ctx.rest = (state, run, prefix, spec)
        return known[0]

    @staticmethod
    def _attend(
        q: Tensor, k: Tensor, v: Tensor, state: SharedAttentionState, run: Run, prefix: Prefix, spec: Spec
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of this process's queries, merged from all processes."""
        (q_all,) = state.context.gather_tokens(q)
        B, H, T, _ = q_all.shape
        out = torch.zeros(B, H, T, v.shape[-1], dtype=wide(q.dtype), device=q.device)
        lse = torch.full((B, H, T), -torch.inf, dtype=wide(q.dtype), device=q.device)
        for piece in _pieces(state, run, prefix, spec, k, v):
            at = slice(piece.first, piece.last)
            part = part_forward(q_all[:, :, at].contiguous(), piece.k, piece.v, piece.see, spec)
            out[:, :, at], lse[:, :, at] = merge(out[:, :, at], lse[:, :, at], *part)
        merged, lse = state.context.merge_partials(out, lse)
        return merged.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v; the prefix's go to their owners' cotangents."""
        q, k, v, out, lse = ctx.saved_tensors
        state, run, prefix, spec = ctx.rest
        context = state.context
        given = [*context.gather_tokens(q, dout, out), *context.gather_tokens(lse)]
        dq_all = torch.zeros_like(given[0], dtype=wide(q.dtype))
        dk, dv = torch.zeros_like(k, dtype=wide(k.dtype)), torch.zeros_like(v, dtype=wide(v.dtype))
        for piece in _pieces(state, run, prefix, spec, k, v):
            at = slice(piece.first, piece.last)
            q_at, dout_at, out_at, lse_at = (x[:, :, at].contiguous() for x in given)
            dq_part, dk_part, dv_part = part_backward(dout_at, q_at, piece.k, piece.v, out_at, lse_at, piece.see, spec)
            dq_all[:, :, at] += dq_part
            if piece.row is None:
                dk, dv = dk + dk_part, dv + dv_part
            elif piece.row >= prefix.gradient_start():
                prefix.add(piece.row, dk_part, dv_part)
        dq = context.sum_to_owners(dq_all)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None
