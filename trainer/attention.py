"""Attention of a chunk over a stored prefix and itself, with a gradient for both.

Idea: a chunk's queries attend to the prefix's keys (all of them visible, no mask) and to the chunk's own keys (causal). Each
part is computed by a raw kernel that returns its output and log-sum-exp; the parts are merged in float32 or wider:

    L = log(exp(L1) + exp(L2)),   O = O1 exp(L1 - L) + O2 exp(L2 - L)

The backward runs each part's raw backward with the *merged* O and L. With P = exp(S - L) and D = sum(dO * O) being the global
ones, every part's dQ, dK, dV are exact and no gradient through a log-sum-exp is needed (Dao et al., FlashAttention, 2022,
section 3.1 and appendix B.2). dK and dV of prefix blocks go straight into the state's cotangent, block by block.

Shapes: B rows, H query heads, K key heads, T queries, S keys, D head size, E value head size. q_BHTD, k_BKSD, v_BKSE,
out_BHTE, lse_BHT.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer.kernels import Kernel, choose
from longstraw_agents.trainer.paged import Page, PageKernel, choose_pages
from longstraw_agents.trainer.stack import BLOCK

#: The name under which transformers models call `attention`.
IMPLEMENTATION = "longstraw"

#: Scores held at once by the reference kernel, in elements of one float: 64 Mi.
_SCORES = 64 * 2**20

#: Queries (rows times tokens) up to which our page kernel beats making values of codes first: on an H200 1.4 times as fast at
#: 512 queries over 131,072 keys, 0.36 times at 8,192; backward it is 0.3 to 0.5 times as fast at any number.
FEW = 1024


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees: absolute position of the first query and key, causal or all, and the sliding window."""

    query_start: int
    key_start: int
    causal: bool
    window: int | None = None


def _hidden(see: Visibility, first: int, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Mask [queries, keys], True where a key is not seen by queries first, first + 1, ...; None where all are seen."""
    if not see.causal and see.window is None:
        return None
    query_T1 = torch.arange(queries, device=device)[:, None] + (see.query_start + first)
    key_1S = torch.arange(keys, device=device)[None, :] + see.key_start
    hidden = key_1S > query_T1
    if see.window is not None:
        hidden |= key_1S <= query_T1 - see.window
    return hidden


def _pieces(batch_heads: int, queries: int, keys: int) -> Iterator[tuple[int, int]]:
    step = max(1, min(queries, _SCORES // max(1, batch_heads * keys)))
    for first in range(0, queries, step):
        yield first, min(queries, first + step)


def _scores(q_BKGTD: Tensor, k_BKSD: Tensor, scale: float, softcap: float | None, wide: torch.dtype) -> Tensor:
    scores = torch.einsum("bkgtd,bksd->bkgts", q_BKGTD, k_BKSD).to(wide) * scale
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def reference_forward(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, see: Visibility, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention by plain matrix products, a piece of queries at a time: the definition that other kernels are held to.

    Rows that see no key give output 0 and log-sum-exp minus infinity. Returns out_BHTE and lse_BHT (float32 or wider).
    """
    (B, H, T, D), K, S = q_BHTD.shape, k_BKSD.shape[1], k_BKSD.shape[2]
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    q = q_BHTD.reshape(B, K, H // K, T, D)
    out = q_BHTD.new_empty(B, K, H // K, T, v_BKSE.shape[-1])
    lse = torch.empty(B, K, H // K, T, dtype=wide, device=q.device)
    for first, last in _pieces(B * H, T, S):
        scores = _scores(q[..., first:last, :], k_BKSD, scale, softcap, wide)
        hidden = _hidden(see, first, last - first, S, q.device)
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        part = scores.logsumexp(-1)
        probabilities = torch.exp(scores - part.masked_fill(part == -math.inf, 0)[..., None])
        out[..., first:last, :] = torch.einsum("bkgts,bkse->bkgte", probabilities.to(v_BKSE.dtype), v_BKSE)
        lse[..., first:last] = part
    return out.reshape(B, H, T, -1), lse.reshape(B, H, T)


def reference_backward(
    dout_BHTE: Tensor, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, out_BHTE: Tensor, lse_BHT: Tensor,
    see: Visibility, scale: float, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of `reference_forward`, given merged output and log-sum-exp; dk, dv summed over B if k has one row."""
    (B, H, T, D), (R, K, S) = q_BHTD.shape, k_BKSD.shape[:3]
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    group = lambda x: x.reshape(B, K, H // K, *x.shape[2:])
    q, dout, lse = group(q_BHTD), group(dout_BHTE), group(lse_BHT)
    delta = (dout.to(wide) * group(out_BHTE).to(wide)).sum(-1)
    dq = torch.empty_like(q)
    dk = torch.zeros(B, K, S, D, dtype=wide, device=q.device)
    dv = torch.zeros(B, K, S, v_BKSE.shape[-1], dtype=wide, device=q.device)
    for first, last in _pieces(B * H, T, S):
        rows = slice(first, last)
        capped = _scores(q[..., rows, :], k_BKSD, scale, softcap, wide)
        hidden = _hidden(see, first, last - first, S, q.device)
        p = torch.exp(capped - lse[..., rows, None])
        if hidden is not None:
            p = p.masked_fill(hidden, 0)
        narrow = p.to(v_BKSE.dtype)
        dv += torch.einsum("bkgts,bkgte->bkse", narrow, dout[..., rows, :])
        dp = torch.einsum("bkgte,bkse->bkgts", dout[..., rows, :], v_BKSE).to(wide)
        ds = p * (dp - delta[..., rows, None])
        if softcap is not None:
            ds = ds * (1 - (capped / softcap) ** 2)
        ds = (ds * scale).to(q.dtype)
        dq[..., rows, :] = torch.einsum("bkgts,bksd->bkgtd", ds, k_BKSD)
        dk += torch.einsum("bkgts,bkgtd->bksd", ds, q[..., rows, :])
    if R == 1 and B > 1:
        dk, dv = dk.sum(0, keepdim=True), dv.sum(0, keepdim=True)
    return dq.reshape(B, H, T, D), dk, dv


@dataclass(frozen=True)
class Spec:
    """How one layer attends: scale, sliding window, soft cap, and the kernel for parts without window and cap.

    picks: where an indexer chose them, the positions [B, T, n] that each query reads, -1 for none.
    """

    scale: float
    window: int | None
    softcap: float | None
    kernel: Kernel | None
    picks: Tensor | None = None

    def joins(self) -> bool:
        """Whether one bottom-right causal call over prefix and chunk in one buffer is exact."""
        return self.kernel is not None and self.kernel.bottom_right and self.softcap is None and self.window is None

    def plain(self, window_covers: bool) -> bool:
        """Whether the fast kernel computes a part exactly: no soft cap, and the window hides nothing in it."""
        return self.kernel is not None and self.softcap is None and (self.window is None or window_covers)


def part_forward(q: Tensor, k: Tensor, v: Tensor, see: Visibility, spec: Spec) -> tuple[Tensor, Tensor]:
    """One part's out_BHTE and lse_BHT, by the fast kernel where it is exact for this part, else by the reference."""
    if not spec.plain(_covered(q, k, see)):
        return reference_forward(q, k, v, see, spec.scale, spec.softcap)
    assert spec.kernel is not None
    if see.causal or len(k) > 1:  # rows with keys of their own
        return spec.kernel.forward(q, k, v, see.causal, spec.scale)
    out, lse = spec.kernel.forward(_fold(q, k), k, v, False, spec.scale)
    return _unfold(out, q), _unfold(lse, q)


def part_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, see: Visibility, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """One part's dq, dk, dv from the merged out_BHTE and lse_BHT."""
    if not spec.plain(_covered(q, k, see)):
        return reference_backward(dout, q, k, v, out, lse, see, spec.scale, spec.softcap)
    assert spec.kernel is not None
    if see.causal or len(k) > 1:
        return spec.kernel.backward(dout, q, k, v, out, lse, see.causal, spec.scale)
    fold = lambda x: _fold(x, k)
    dq, dk, dv = spec.kernel.backward(fold(dout), fold(q), k, v, fold(out), fold(lse), False, spec.scale)
    return _unfold(dq, q), dk, dv


def _covered(q: Tensor, k: Tensor, see: Visibility) -> bool:
    """Whether the window, if there is one, reaches from the last query back to the first key."""
    return see.window is None or see.query_start + q.shape[2] - 1 - see.window < see.key_start


def _fold(x_BHTn: Tensor, k_1KSD: Tensor) -> Tensor:
    """Rows and grouped heads become queries of one key head: [B, H, T, ...] -> [1, K, B * (H / K) * T, ...].

    A prefix block has no mask, so all queries that read the same keys can be one long query. This is what keeps a GPU busy
    with short branches, and what sums dK and dV over rows and groups without a copy.
    """
    B, H, T = x_BHTn.shape[:3]
    K = k_1KSD.shape[1]
    x = x_BHTn.reshape(B, K, H // K, T, *x_BHTn.shape[3:]).transpose(0, 1)
    return x.reshape(1, K, B * (H // K) * T, *x_BHTn.shape[3:])


def _unfold(x_1Kn: Tensor, like_BHTD: Tensor) -> Tensor:
    B, H, T = like_BHTD.shape[:3]
    K = x_1Kn.shape[1]
    x = x_1Kn.reshape(K, B, H // K, T, *x_1Kn.shape[3:]).transpose(0, 1)
    return x.reshape(B, H, T, *x_1Kn.shape[3:])


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts' outputs by log-sum-exp. out_a and both lse are float32 or wider; a query that sees nothing has -inf."""
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(lse == -math.inf, 0)
    out = out_a * torch.exp(lse_a - finite)[..., None]
    return out.addcmul_(out_b.to(out.dtype), torch.exp(lse_b - finite)[..., None]), lse


class Prefix(Protocol):
    """What a chunk reads of a layer's keys and values before it, and where their cotangent goes."""

    length: int  # positions before the chunk

    def joined(self, k_1KTD: Tensor, v_1KTE: Tensor) -> tuple[Tensor, Tensor] | None:
        """Prefix and the chunk's own keys and values in one buffer, [1, K, length + T, ...], where they lie so; else None."""
        ...

    def blocks(self, first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (start, k_1KSD, v_1KSE), together all positions from `first` or a little before it to `length`."""
        ...

    def pages(self, gradient: bool) -> Iterator[list[Page]] | None:
        """All positions before the chunk as codes where they lie, the pages of one launch at a time; None where they are values.

        gradient: pages from `gradient_start` on say where dK and dV are to be added; all lists must then be gone through.
        """
        ...

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """out_BHTE and lse_BHT of this chunk as its capture computed them, where they were kept."""
        ...

    def keep(self, out_BHTE: Tensor, lse_BHT: Tensor) -> None:
        """A capture's result, to be kept where that is asked for."""
        ...

    def gradient_start(self) -> int:
        """The first position whose cotangent is wanted; a border of `blocks` where it lies inside the prefix."""
        ...

    def add(self, start: int, dk_1KSD: Tensor, dv_1KSE: Tensor) -> None:
        """Add to the cotangent of the positions from `start` on."""
        ...


def _reader(
    q: Tensor, k: Tensor, v: Tensor, prefix: Prefix, spec: Spec, gradient: bool
) -> tuple[PageKernel, Iterator[list[Page]]] | None:
    """Our page kernel and the prefix's pages, where codes can be read as they are; None: block by block as values.

    Where a fast kernel takes the values, codes are read as they are for few queries and without a gradient alone.
    """
    faster = spec.kernel is not None and (gradient or q.shape[0] * q.shape[2] > FEW)
    pages = prefix.pages(gradient) if spec.softcap is None and spec.window is None and not faster else None
    kernel = None if pages is None else choose_pages(q, k, v)
    return None if kernel is None or pages is None else (kernel, pages)


class PrefixAttention(torch.autograd.Function):
    """out_BHTE of a chunk's q over the prefix and the chunk's own k, v; see the module's head for the mathematics."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, prefix: Prefix, spec: Spec) -> Tensor:
        """The merged output; see the class."""
        ctx.prefix, ctx.spec = prefix, spec
        ctx.joined = prefix.joined(k, v) if spec.joins() else None
        known = prefix.recall()
        if known is None:
            known = PrefixAttention._attend(q, k, v, prefix, spec, ctx.joined)
            prefix.keep(*known)
        ctx.save_for_backward(q, k, v, *known)
        return known[0]

    @staticmethod
    def _attend(
        q: Tensor, k: Tensor, v: Tensor, prefix: Prefix, spec: Spec, joined: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        if joined is not None:
            assert spec.kernel is not None
            return spec.kernel.forward(q, *joined, True, spec.scale)  # type: ignore[call-arg]
        wide = torch.promote_types(q.dtype, torch.float32)
        here = prefix.length
        own = Visibility(here, here, True, spec.window)
        out, lse = part_forward(q, k, v, own, spec)
        out = out.to(wide)
        reader = _reader(q, k, v, prefix, spec, False)
        if reader is not None:
            kernel, lists = reader
            folded = _fold(q, k)
            for pages in lists:
                part, part_lse = kernel.forward(folded, pages, spec.scale)
                out, lse = merge(out, lse, _unfold(part, q), _unfold(part_lse, q))
            return out.to(q.dtype), lse
        for start, kb, vb in prefix.blocks(first_seen(here, spec.window)):
            see = Visibility(here, start, False, spec.window)
            out, lse = merge(out, lse, *part_forward(q, kb, vb, see, spec))
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Gradients of q, k and v; the prefix's go to its cotangent."""
        q, k, v, out, lse = ctx.saved_tensors
        prefix, spec = ctx.prefix, ctx.spec
        here, dout = prefix.length, dout.contiguous()
        if ctx.joined is not None and here + q.shape[2] <= BLOCK:
            dq, dk, dv = spec.kernel.backward(dout, q, *ctx.joined, out, lse, True, spec.scale)
            first = prefix.gradient_start()
            if first < here:
                prefix.add(first, dk[:, :, first:here], dv[:, :, first:here])
            return dq, dk[:, :, here:], dv[:, :, here:], None, None
        own = Visibility(here, here, True, spec.window)
        dq, dk, dv = part_backward(dout, q, k, v, out, lse, own, spec)
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = dq.to(wide)
        reader = _reader(q, k, v, prefix, spec, True)
        if reader is not None:
            kernel, lists = reader
            dout_m, q_m, out_m, lse_m = (_fold(x, k) for x in (dout, q, out, lse))
            for pages in lists:
                dq += _unfold(kernel.backward(dout_m, q_m, pages, out_m, lse_m, spec.scale), q)
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None
        for start, kb, vb in prefix.blocks(first_seen(here, spec.window)):
            see = Visibility(here, start, False, spec.window)
            dq_part, dk_part, dv_part = part_backward(dout, q, kb, vb, out, lse, see, spec)
            dq += dq_part
            if start >= prefix.gradient_start():  # a block never straddles it
                prefix.add(start, dk_part, dv_part)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def first_seen(here: int, window: int | None) -> int:
    """The first position that a query at `here` sees."""
    return 0 if window is None else max(0, here - window + 1)


class AttentionState(Protocol):
    """The cache of the run in progress, as `attention` sees it."""

    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
        """Return out_BHTE of the module's layer."""
        ...


#: The state of the run in progress; set by `replay.run_chunk`.
ACTIVE: ContextVar[AttentionState | None] = ContextVar("longstraw_active_state", default=None)


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function that transformers models call (their attention-interface registry).

    query [B, H, T, D], key and value [B, K, T, D] of the chunk alone. Returns [B, T, H, E] and None (no weights).
    Raises ModelError where the call asks for what is not computed here: a mask, dropout, attention sinks, a position bias.
    """
    state = ACTIVE.get()
    if state is None:
        raise ModelError(
            f"attention implementation {IMPLEMENTATION!r} was called outside of a capture or replay; "
            "use model.set_attn_implementation('sdpa') to run the model by itself"
        )
    picks: Tensor | None = kwargs.get("indices")  # an indexer's selection; such layers insist on a mask and are given `NO_MASK`
    if picks is not None and attention_mask is NO_MASK:
        attention_mask = None
    if attention_mask is not None or dropout != 0.0:
        raise ModelError(
            f"layer {type(module).__name__} passed {'a mask' if attention_mask is not None else f'dropout {dropout}'} to "
            "its attention; chunks are causal without padding and without dropout: call model.eval()"
        )
    for name in ("s_aux", "position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise ModelError(f"layer {type(module).__name__} uses {name}, which has no exact replay here")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    spec = Spec(scale, sliding_window, softcap, None if picks is not None else choose(query, key, value), picks)
    return state.attend(module, query, key, value, spec).transpose(1, 2), None


def _mask(*args: Any, allow_is_causal_skip: bool = True, **kwargs: Any) -> Tensor | None:
    """The mask function that transformers calls: none is built. Callers that insist on one get a stand-in."""
    return None if allow_is_causal_skip else NO_MASK


#: Stands for "causal, nothing else" where a model insists on a mask tensor.
NO_MASK = torch.empty(1, 1, 0, 0)

ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)
