"""Sparse index attention under context parallelism: candidates from every process, one selection, attention where keys are.

Idea: each process scores all queries of the run against the index keys it owns and keeps its best k with their positions. The
candidates go to the queries' owners, who pick the best k of all: a key among the best of all is among the best of its owner, so
the selection is the single process's, ties by position included. Attention then works as for full attention: queries and
selections are gathered, each process attends to the picked latents that it owns, and partial outputs are merged at the
queries' owners. Layers that share a selection read the owner's picks, which are kept per query.

Shapes as in `sparse`; T tokens of the whole run, c of one process's span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer.attention import Spec
from longstraw_agents.trainer.context import SharedAttentionState
from longstraw_agents.trainer.indexing import Watching
from longstraw_agents.trainer.latent import require_latent
from longstraw_agents.trainer.sparse import ELEMENTS, GatherPicks, SparseState, best_picks, up_projection
from longstraw_agents.trainer.stack import wide

_NOWHERE = 2**40  # stands for the position of a candidate that does not exist: after all others


class SharedSparseState(SharedAttentionState, SparseState):
    """A SparseState of the positions that this process owns."""

    def update(self, k_BKTD: Tensor, v_BKTE: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As in `SparseState`: before transformers 5.24 the latents are those that were noted."""
        super().update(*(self.latents or (k_BKTD, v_BKTE)))
        return k_BKTD, v_BKTE

    def all_tokens(self, x_BTn: Tensor) -> Tensor:
        """The tokens [B, T, n] of all processes."""
        (gathered,) = self.context.gather_tokens(x_BTn[:, None])
        return gathered[:, 0]

    def update_indexer(self, k_BTI: Tensor) -> Tensor:
        """Keep this process's index keys; returns those that the indexer reads."""
        if self._block is not None:
            return self.index.read(*self._block)[0].expand(k_BTI.shape[0], -1, -1)
        part = self.part
        own = k_BTI[:, part.first : part.first + part.real]
        if self.run.writes:
            self.index.write(self.owned.rows_before(self.run.start), own[:, None])
        return own

    def select(self, indexer: Any, score: Callable[..., Watching]) -> Tensor:
        """The best tokens over all processes; see `SparseState.select`."""
        run, part, count = self.run, self.part, indexer.index_topk
        rows, tokens = self.owned.rows_before(run.start), part.size * self.context.size
        step = max(1, ELEMENTS // (run.rows * tokens * indexer.n_heads))
        device = next(indexer.parameters()).device
        positions = self.owned.positions(run.start, device)
        best: tuple[Tensor, Tensor] | None = None
        for first in range(0, rows, step):
            self._block = (first, min(rows, first + step))
            best = best_picks(best, score().found(), positions[slice(*self._block)], count)
        self._block = None
        own = score().found()
        keys = torch.arange(part.first, part.first + part.real, device=device)
        later = keys[None, :] > torch.arange(tokens, device=device)[:, None]
        best = best_picks(best, own.masked_fill(later, -math.inf), run.start + keys, count)
        picks = self._best_of_all(*best, count)
        self._check(picks)
        return picks.to(torch.int32)

    def _best_of_all(self, scores_BTn: Tensor, positions_BTn: Tensor, count: int) -> Tensor:
        """Each process's candidates of all queries -> picks [B, c, count] of this process's queries, -1 for none."""
        missing = (0, count - scores_BTn.shape[-1])
        scores = nn.functional.pad(scores_BTn, missing, value=-math.inf)
        positions = nn.functional.pad(positions_BTn, missing, value=_NOWHERE)
        R = self.context.size
        apart = lambda x: x.reshape(len(x), R, -1, count).movedim(1, 0)  # [R, B, c, count]
        together = lambda x: self.context.ranks.exchange(apart(x), name="candidates").movedim(0, 2).flatten(2)
        scores, positions = together(scores), together(positions)
        order = positions.argsort(-1)
        best, picks = best_picks(None, scores.gather(-1, order), positions.gather(-1, order), count)
        return picks.masked_fill(best == -math.inf, -1)

    def rows_of(self, picks_BTn: Tensor) -> Tensor:
        """Positions -> rows of this process (its own span of the run follows the rows before it), -1 for what others own."""
        part, before = self.part, self.owned.rows_before(self.run.start)
        first = self.run.start + part.first
        rows = torch.where((picks_BTn >= first) & (picks_BTn < first + part.real), picks_BTn - first + before, -1)
        if before:
            owned = self.owned.positions(self.run.start, picks_BTn.device)
            found = torch.searchsorted(owned, picks_BTn.contiguous()).clamp(max=before - 1)
            rows = torch.where(owned[found] == picks_BTn, found, rows)
        return rows

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
        """Attention over the selected tokens, wherever they lie."""
        require_latent(module)
        if spec.picks is None or self._own is None or spec.softcap is not None or spec.window is not None:
            raise ModelError(f"layer {type(module).__name__} attends without a selection, a window or a cap unknown here")
        (picks,) = self.context.gather_tokens(spec.picks[:, None].long())
        rows = self.rows_of(picks[:, 0])
        most = max(1, int((rows >= 0).sum(-1).max()))
        rows = rows.sort(-1, descending=True).values[..., :most]  # what this process owns comes first
        own = (x[:, 0] for x in self._own)
        return _Attention.apply(q, *own, *up_projection(module), self, rows, spec.scale)  # type: ignore[no-untyped-call,no-any-return]


class _Attention(torch.autograd.Function):
    """out_BHcE of this process's queries over their picks, wherever these are."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, c_BcR: Tensor, r_BcD: Tensor, key_RHN: Tensor, value_RHE: Tensor, state: SharedSparseState,
        rows_BTn: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        """The output over the selected tokens; see the class."""
        run, context = state.run_in_rows, state.context
        (q_all,) = context.gather_tokens(q)
        outs, lses = [], []
        for at in _queries(rows_BTn, c_BcR, r_BcD):
            scores, c_BSnR = _scores(q_all[:, :, at], rows_BTn[:, at], c_BcR, r_BcD, key_RHN, state, run, scale)
            lse = scores.logsumexp(-1)
            p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
            outs.append(torch.einsum("bshr,rhe->bhse", p.to(q.dtype) @ c_BSnR, value_RHE))
            lses.append(lse.transpose(1, 2))
        out, lse = context.merge_partials(torch.cat(outs, 2).to(wide(q.dtype)), torch.cat(lses, 2))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, c_BcR, r_BcD, key_RHN, value_RHE, rows_BTn, out, lse)
        ctx.rest = (state, run, scale)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, those of other processes' tokens sent to them."""
        q, *inputs, rows, out, lse = ctx.saved_tensors
        state, run, scale = ctx.rest
        context = state.context
        q_all, dout_all, out_all = context.gather_tokens(q, dout, out)
        (lse_all,) = context.gather_tokens(lse)
        leaves = [x.detach().requires_grad_() for x in (q_all, *inputs)]
        q_leaf, c_BcR, r_BcD, key_RHN, value_RHE = leaves
        delta = (dout_all.to(lse.dtype) * out_all.to(lse.dtype)).sum(-1)
        for at in _queries(rows, c_BcR, r_BcD):
            with torch.enable_grad():
                scores, c_BSnR = _scores(q_leaf[:, :, at], rows[:, at], c_BcR, r_BcD, key_RHN, state, run, scale)
                p = torch.exp(scores.detach() - lse_all[:, :, at].transpose(1, 2)[..., None])
                part = torch.einsum("bshr,rhe->bhse", p.to(q.dtype) @ c_BSnR, value_RHE)
            dlatent_BSHR = torch.einsum("bhse,rhe->bshr", dout_all[:, :, at], value_RHE.detach())
            dp = (dlatent_BSHR @ c_BSnR.detach().transpose(-1, -2)).to(p.dtype)
            ds = p * (dp - delta[:, :, at].transpose(1, 2)[..., None])  # of the merged softmax
            torch.autograd.backward([scores, part], [ds, dout_all[:, :, at]])
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        dq = context.sum_to_owners(grads[0].to(wide(q.dtype))).to(q.dtype)
        return dq, *grads[1:], None, None, None


def _queries(rows_BTn: Tensor, c: Tensor, r: Tensor) -> Iterator[slice]:
    """Pieces of queries whose gathered latents fit."""
    B, T, n = rows_BTn.shape
    step = max(1, ELEMENTS // (B * n * (c.shape[-1] + r.shape[-1])))
    return (slice(first, min(T, first + step)) for first in range(0, T, step))


def _scores(
    q: Tensor, rows_BSn: Tensor, c: Tensor, r: Tensor, key_RHN: Tensor, state: SharedSparseState, run: Any, scale: float
) -> tuple[Tensor, Tensor]:
    """Scores [B, S, H, n] of some queries over their rows, -inf for none, and the rows' latents [B, S, n, R]."""
    c_BSnR = GatherPicks.apply(c, rows_BSn, state.keys, run)  # type: ignore[no-untyped-call]
    r_BSnD = GatherPicks.apply(r, rows_BSn, state.values, run)  # type: ignore[no-untyped-call]
    q_BHSN, q_BHSD = q.split([key_RHN.shape[-1], r.shape[-1]], dim=-1)
    q_BSHR = torch.einsum("bhsn,rhn->bshr", q_BHSN, key_RHN)
    scores = q_BSHR @ c_BSnR.transpose(-1, -2) + q_BHSD.transpose(1, 2) @ r_BSnD.transpose(-1, -2)
    return (scores.to(wide(q.dtype)) * scale).masked_fill(rows_BSn[:, :, None] < 0, -math.inf), c_BSnR
