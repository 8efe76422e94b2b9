"""The state of sparse index attention: latent attention in which each query reads only the keys that an indexer picks.

Idea: DeepSeek Sparse Attention (DeepSeek-V3.2-Exp, 2025) scores all earlier tokens with a small indexer and attends to the best
k. The indexer runs without autograd, so the gradient is that of the layer at a fixed selection, and index keys carry no
cotangent. Two things are done here rather than by the model's own eager code, because that holds scores and masks of
[chunk x everything before it]:

    selection   the model's indexer is called for a piece of queries and a block of keys at a time, and its scores are merged
                into a running best k; equal scores go to the lower position, so that a selection is a function of the
                scores alone
    attention   the picked latents are gathered, and queries and outputs are moved into the latent space by the
                up-projection's own matrices (the "absorbed" form of DeepSeek-V2, 2024, section 2.1.2); gradients of gathered
                latents are added to the cotangents of c and r where they were gathered. Latents in host memory are staged
                one layer at a time, for as long as that layer gathers

Selections of captured spans are checked when they are recomputed: eight bytes per query and index layer hold a digest of the
picked set, and queries whose set changed are counted (`flips`). Recording the sets themselves would take 4 bytes for each pick,
8 GiB per index layer at a million tokens and k = 2,048.

Shapes: B rows, S queries, T positions of the chunk, P positions of the path, I index size, H heads, n picks per query,
R latent rank, D rotary size, N other key size, E value size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longstraw_agents.errors import ConfigError, ModelError
from longstraw_agents.trainer.attention import Spec
from longstraw_agents.trainer.indexing import DEVICES, Factors, Watching, agrees
from longstraw_agents.trainer.latent import LatentState, require_latent
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.stack import Stack
from longstraw_agents.trainer.state import Run

#: Elements of float held at once: scores of the indexer [B, S, heads, keys], and gathered latents [B, s, n, R].
ELEMENTS = 2**27


class SparseState(LatentState):
    """A LatentState with index keys and the digests of captured selections.

    A layer that shares another's selection writes no index keys: its stack stays empty.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.index = Stack(capacity)
        self._changed: Tensor | int = 0  # queries; counted where they lie, read when asked for
        self._digests: dict[int, Tensor] = {}
        self.latents: tuple[Tensor, Tensor] | None = None  # what the layer up-projected before it called `update`
        self._block: tuple[int, int] | None = None  # of the prefix, or, from the run's start on, of the run itself
        self._index_1PI: Tensor | None = None  # the prefix's index keys where they are scored
        self._own_index_BTI: Tensor | None = None

    @property
    def flips(self) -> int:  # type: ignore[override]
        """Queries of captured spans whose recomputed selection was another."""
        return int(self._changed)

    @flips.setter
    def flips(self, count: int) -> None:
        self._changed = count

    def begin(self, run: Run) -> None:
        """See `LayerState`; latents that were noted are forgotten."""
        super().begin(run)
        self.latents = None

    def collect(self) -> None:
        """See `LayerState`; what was staged is let go."""
        super().collect()
        self.release()

    def release(self) -> None:
        """Let staged latents go, their cotangents back to where they lie."""
        self.keys.release()
        self.values.release()

    def update(self, k_BKTD: Tensor, v_BKTE: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As for every layer; but before transformers 5.24 sparse layers give up-projected keys and values: keep the latents."""
        super().update(*(self.latents or (k_BKTD, v_BKTE)))
        return k_BKTD, v_BKTE

    def put(self, placement: Placement) -> None:
        """Choose where latents and index keys lie. Raises ConfigError for 8 bits: a selection is only exact by exact keys."""
        if placement.bits is not None:
            raise ConfigError("layers that select keys need them as they are; leave `bits` off for this model")
        super().put(placement)
        self.index = placement.stack(self.index.capacity)

    # -- selection ------------------------------------------------------------------------------------------------------

    def all_tokens(self, x_BTn: Tensor) -> Tensor:
        """What the indexer reads of the run's tokens, [B, T, ...]: all of them are here."""
        return x_BTn

    def update_indexer(self, k_BTI: Tensor) -> Tensor:
        """The indexer gives its tokens' index keys and gets those that it is to score.

        The first call of a run gives those of all its tokens, which are kept; what it scores then is not used.
        """
        if self._block is None:
            if self.run.writes:
                self.index.write(self.run.start, k_BTI[:, None])
            self._own_index_BTI = k_BTI
            return k_BTI[:, :1]
        return self._block_keys().expand(len(k_BTI), -1, -1)

    def _block_keys(self) -> Tensor:
        """The index keys of the block, [B or 1, keys, I]."""
        assert self._block is not None and self._own_index_BTI is not None
        start, stop = self._block
        if start < self.run.start:
            assert self._index_1PI is not None
            return self._index_1PI[:, start:stop]
        return self._own_index_BTI[:, start - self.run.start : stop - self.run.start]

    def _scorer(self, indexer: Any, score: Callable[..., Watching], factors: Factors | None) -> Callable[[slice], Tensor]:
        """Scores of queries over the current block: by the indexer's factors where that is known to be the same, else by it."""
        own = lambda queries: score(queries).found()
        if factors is None or factors.q_BSHI.device.type not in DEVICES:
            return own
        few = slice(0, min(32, self.run.length))
        self._block = (self.run.start, self.run.start + few.stop)
        if not agrees(indexer, factors, self._block_keys(), lambda: own(few)):
            return own
        return lambda queries: factors.scores(queries, self._block_keys())

    def select(self, indexer: Any, score: Callable[..., Watching]) -> Tensor:
        """Positions picked for each of the run's queries, [B, T, n] int32 ascending, -1 where fewer than n can be seen.

        `score(queries)` calls the indexer, which scores a slice of the run's queries over the keys that `update_indexer` hands
        it, and gives what was seen of that.
        """
        run, count = self.run, indexer.index_topk
        self._block = None
        factors = score().factors()
        self._index_1PI = self.index.read(0, run.start)[0] if run.start else None
        score_block = self._scorer(indexer, score, factors)
        each = run.rows * indexer.n_heads
        piece = max(1, min(run.length, ELEMENTS // (each * min(run.stop, 8 * count))))
        step = max(1, ELEMENTS // (each * piece))
        found = []
        for first in range(0, run.length, piece):
            last = min(run.length, first + piece)
            best: tuple[Tensor, Tensor] | None = None
            for self._block in _blocks(run.start, run.start + last, step):
                scores = score_block(slice(first, last))
                if self._block[1] > run.start + first:  # keys of later tokens among them
                    at = torch.arange(run.start + first, run.start + last, device=scores.device)[:, None]
                    later = torch.arange(*self._block, device=scores.device)[None] > at
                    scores = scores.masked_fill(later, float("-inf"))
                best = best_picks(best, scores, self._block[0], count)
            assert best is not None
            picks = best[1].masked_fill(best[0] == float("-inf"), -1).to(torch.int32)
            found.append(nn.functional.pad(picks, (0, min(count, run.stop) - picks.shape[-1]), value=-1))
        self._block = self._index_1PI = self._own_index_BTI = None
        picks_BTn = torch.cat(found, 1)
        self._check(picks_BTn)
        return picks_BTn

    def _check(self, picks_BTn: Tensor) -> None:
        run = self.run
        if run.rows != 1:
            return
        digest_T = _digest(picks_BTn[0])
        if run.writes:
            self._digests[run.start] = digest_T
        elif run.gradient:
            before = self._digests.get(run.start)
            if before is not None and len(before) == len(digest_T):
                self._changed = self._changed + (before != digest_T).sum()

    # -- attention ------------------------------------------------------------------------------------------------------

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
        """out_BHTE over the picked positions. k and v, the chunk's own up-projected keys and values, are not read."""
        require_latent(module)
        if spec.picks is None or self._own is None or spec.softcap is not None or spec.window is not None:
            raise ModelError(f"layer {type(module).__name__} attends without a selection, a window or a cap unknown here")
        c_BTR, r_BTD = (own[:, 0] for own in self._own)
        picks = spec.picks
        piece = max(1, ELEMENTS // (q.shape[0] * picks.shape[-1] * (c_BTR.shape[-1] + r_BTD.shape[-1])))
        key_RHN, value_RHE = up_projection(module)
        if torch.is_grad_enabled():
            c_BTR, r_BTD = _Releasing.apply(c_BTR, r_BTD, self)  # type: ignore[no-untyped-call]
        out = []
        for first in range(0, q.shape[2], piece):
            queries = slice(first, first + piece)
            arguments = (q[:, :, queries], picks[:, queries], c_BTR, r_BTD, key_RHN, value_RHE, spec.scale)
            if torch.is_grad_enabled():
                part = checkpoint(self._piece, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                part = self._piece(*arguments)
            out.append(part)
        self.release()
        return torch.cat(out, dim=2)

    def _piece(
        self, q: Tensor, picks_BSn: Tensor, c_BTR: Tensor, r_BTD: Tensor, key_RHN: Tensor, value_RHE: Tensor, scale: float
    ) -> Tensor:
        """Attention of some queries [B, H, S, N + D] over their picks."""
        picks_BSn = picks_BSn.long()
        wide = torch.promote_types(q.dtype, torch.float32)
        c_BSnR = GatherPicks.apply(c_BTR, picks_BSn, self.keys, self.run)  # type: ignore[no-untyped-call]
        r_BSnD = GatherPicks.apply(r_BTD, picks_BSn, self.values, self.run)  # type: ignore[no-untyped-call]
        q_BHSN, q_BHSD = q.split([key_RHN.shape[-1], r_BTD.shape[-1]], dim=-1)
        q_BSHR = torch.einsum("bhsn,rhn->bshr", q_BHSN, key_RHN)
        scores = q_BSHR @ c_BSnR.transpose(-1, -2) + q_BHSD.transpose(1, 2) @ r_BSnD.transpose(-1, -2)
        scores = (scores.to(wide) * scale).masked_fill(picks_BSn[:, :, None] < 0, float("-inf"))
        out_BSHR = torch.softmax(scores, -1).to(q.dtype) @ c_BSnR
        return torch.einsum("bshr,rhe->bhse", out_BSHR, value_RHE)

    def export(self, start: int, stop: int) -> dict[str, Tensor]:
        """See `LayerState`."""
        tensors = super().export(start, stop)
        if self.index.values_PKD is not None:
            tensors |= {"index": self.index.read(start, stop), "digest": self._digests[start]}
        return tensors

    def adopt(self, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
        """See `LayerState`."""
        super().adopt(start, stop, tensors)
        if "index" in tensors:
            self.index.write(start, tensors["index"], self.device)
            self._digests[start] = tensors["digest"].to(self.device)

    def truncate(self, position: int) -> None:
        """See `LayerState`."""
        super().truncate(position)
        self._digests = {start: digest for start, digest in self._digests.items() if start < position}

    def stacks(self) -> dict[str, Stack]:
        """See `LayerState`."""
        return super().stacks() | {"index": self.index}

    def nbytes(self) -> dict[str, int]:
        """See `LayerState`."""
        held = super().nbytes()
        held["state"] += self.index.nbytes()["state"] + sum(digest.nbytes for digest in self._digests.values())
        return held


def _digest(picks_Tn: Tensor) -> Tensor:
    """A digest [T] int64 of each query's picked set, whatever its order."""
    x = (picks_Tn.long() + 2) * -7046029254386353131
    x = (x ^ (x >> 29)) * -4658895280553007687
    return (x ^ (x >> 32)).sum(-1)


def _blocks(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Blocks of at most `step` positions in [0, stop) with a border at `start`."""
    for begin, end in ((0, start), (start, stop)):
        for first in range(begin, end, step):
            yield first, min(end, first + step)


def best_picks(
    best: tuple[Tensor, Tensor] | None, scores_BSk: Tensor, start: int | Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Merge scores of the positions from `start` on into a running best `count`: (scores, positions), positions ascending.

    `start` may also be the positions themselves, [k] or [B, S, k], ascending. Of equal scores the lower positions win, as if
    all were scored at once.
    """
    if isinstance(start, int):
        start = torch.arange(start, start + scores_BSk.shape[-1], device=scores_BSk.device)
    positions = start.expand_as(scores_BSk)
    if best is not None:
        scores_BSk, positions = torch.cat([best[0], scores_BSk], -1), torch.cat([best[1], positions], -1)
    total = scores_BSk.shape[-1]
    if total <= count:
        return scores_BSk, positions
    # One key orders by score, then by place: a float's bits, as an integer that grows with it, above the place from the end.
    if scores_BSk.dtype == torch.float32:
        bits = (scores_BSk + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: minus zero is zero
        grows = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        key = (grows << 32) | (total - 1 - torch.arange(total, device=bits.device))
        chosen = total - 1 - (key.topk(count, dim=-1, sorted=False).values & 0xFFFFFFFF)
    else:
        chosen = scores_BSk.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    chosen = chosen.sort(-1).values
    return scores_BSk.gather(-1, chosen), positions.gather(-1, chosen)


def up_projection(module: Any) -> tuple[Tensor, Tensor]:
    """The matrices that make keys [R, H, N] and values [R, H, E] of a latent, under autograd.

    They are read by up-projecting the unit vectors, so adapters on the layer are in them.
    """
    like = next(module.kv_b_proj.parameters())
    unit_RR = torch.eye(module.kv_lora_rank, dtype=like.dtype, device=like.device)
    both = module.kv_b_proj(unit_RR).view(module.kv_lora_rank, -1, module.qk_nope_head_dim + module.v_head_dim)
    return both.split([module.qk_nope_head_dim, module.v_head_dim], dim=-1)  # type: ignore[no-any-return]


class GatherPicks(torch.autograd.Function):
    """Rows of a latent at picked positions, [B, S, n, R]: from the stack before the run's start, else from the run's own.

    The backward pass adds the stack's share to its cotangent and returns the run's own share.
    """

    @staticmethod
    def forward(ctx: Any, own_BTR: Tensor, picks_BSn: Tensor, stack: Stack, run: Run) -> Tensor:
        """The picked rows, from the prefix and the run."""
        ctx.save_for_backward(picks_BSn)
        ctx.stack, ctx.run, ctx.own_shape = stack, run, own_BTR.shape
        if run.writes:  # the run's own are in the stack already
            return stack.pick(picks_BSn.clamp(min=0), run.stop)
        rows = torch.arange(own_BTR.shape[0], device=own_BTR.device)[:, None, None]
        own = own_BTR[rows, (picks_BSn - run.start).clamp(min=0)]
        if run.start == 0:
            return own
        before = stack.pick(picks_BSn.clamp(0, run.start - 1), run.start)
        return torch.where((picks_BSn >= run.start)[..., None], own, before)

    @staticmethod
    def backward(ctx: Any, grad_BSnR: Tensor) -> tuple[Tensor, None, None, None]:
        """The run's own gradient; the prefix's goes to its cotangent."""
        (picks,) = ctx.saved_tensors
        run: Run = ctx.run
        B, T, R = ctx.own_shape
        wide = torch.promote_types(grad_BSnR.dtype, torch.float32)
        inside = picks >= run.start
        rows = torch.arange(B, device=picks.device)[:, None, None]
        slots = (rows * T + (picks - run.start).clamp(min=0)).flatten()
        mine = torch.where(inside[..., None], grad_BSnR, 0).to(wide).flatten(0, 2)
        own = torch.zeros(B * T, R, dtype=wide, device=picks.device).index_add_(0, slots, mine)
        if run.start > run.cut:
            before = (picks >= run.cut) & ~inside
            places = torch.where(before, picks, run.cut + (picks - run.cut) % (run.start - run.cut)).flatten()  # or any, with 0
            ctx.stack.add_at(places, torch.where(before[..., None], grad_BSnR, 0).flatten(0, 2), run.cut)
        return own.view(B, T, R).to(grad_BSnR.dtype), None, None, None


class _Releasing(torch.autograd.Function):
    """c and r as they are; once the backward pass has come back to them, the layer's staged latents go."""

    @staticmethod
    def forward(ctx: Any, c_BTR: Tensor, r_BTD: Tensor, state: SparseState) -> tuple[Tensor, Tensor]:
        """Its input, unchanged."""
        ctx.state = state
        return c_BTR.view_as(c_BTR), r_BTD.view_as(r_BTD)

    @staticmethod
    def backward(ctx: Any, dc_BTR: Tensor, dr_BTD: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradient, unchanged; what was staged is let go."""
        ctx.state.release()
        return dc_BTR, dr_BTD, None


def selecting(indexer: Any, state_of: Callable[[int], Any]) -> Callable[..., Tensor]:
    """A forward for an indexer module that selects piece by piece; `state_of(layer)` gives the run's state."""
    forward = indexer.forward
    signature = inspect.signature(forward)

    def select(*args: Any, **kwargs: Any) -> Tensor:
        call = signature.bind(*args, **kwargs)
        state = state_of(indexer.layer_idx)
        with torch.no_grad():
            for name in ("hidden_states", "q_resid"):
                call.arguments[name] = state.all_tokens(call.arguments[name])
            call.arguments["position_embeddings"] = tuple(state.all_tokens(x) for x in call.arguments["position_embeddings"])
        tokens = {name: call.arguments[name] for name in ("hidden_states", "q_resid", "position_embeddings")}
        causal = torch.ones(1, 1, 1, dtype=torch.bool, device=tokens["hidden_states"].device)  # causality is ours
        call.arguments["attention_mask"] = causal

        def score(queries: slice = slice(None)) -> Watching:
            for name in ("hidden_states", "q_resid"):
                call.arguments[name] = tokens[name][:, queries]
            call.arguments["position_embeddings"] = tuple(x[:, queries] for x in tokens["position_embeddings"])
            with torch.no_grad(), Watching(indexer) as seen:
                forward(*call.args, **call.kwargs)
            return seen

        return state.select(indexer, score)  # type: ignore[no-any-return]

    return select


def noting(module: Any, state_of: Callable[[int], Any]) -> Callable[..., Any]:
    """An `expand_kv` for an attention layer that notes the latents it is given in the run's state."""
    expand = module.expand_kv

    def note(c_B1TR: Tensor, r_B1TD: Tensor) -> Any:
        state_of(module.layer_idx).latents = (c_B1TR, r_B1TD)
        return expand(c_B1TR, r_B1TD)

    return note


def sparse_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The attention modules of a model that may read a selection: those that have an indexer, or a place for one."""
    for module in model.modules():
        if hasattr(module, "indexer") and hasattr(module, "expand_kv"):
            yield module


def indexers(model: nn.Module) -> Iterator[nn.Module]:
    """The indexer modules of a model."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] == "indexer" and hasattr(module, "index_topk"):
            yield module
