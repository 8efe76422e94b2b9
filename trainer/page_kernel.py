"""Attention over pages of keys and values where they lie: in Triton, 8-bit codes or plain values, any number of pages at once.

Idea: a table holds each page's length and addresses, so one launch walks pages that lie anywhere. Codes become values, a tile at
a time, in registers: nothing is ever as long as the prefix but the codes, and the values are those that `ByteStack.read` gives.
Every query sees every key: there is no mask but at a page's end. The backward pass is that of Dao et al. (FlashAttention, 2022,
appendix B.2) with P = exp(S - L) of the merged log-sum-exp L: one program per block of queries walks the keys for dQ, one per
block of keys walks the queries for dK and dV and adds them, alone, to float32 where its page says. Gradients are those of the
values as read, not of codes or scales. Where few queries would leave most of the GPU idle, pages are cut into pieces, each piece
has programs of its own, and their results are merged.

Shapes: K key heads, M queries that read one key head (rows, grouped heads and tokens folded), D head size, E value head size;
m, n: rows of a block of queries, of keys; BM, BN their numbers, BD, BE the sizes padded to a power of two; R pieces, 1 where
nothing is cut. Programs are numbered by block, key head, and page or piece. This module needs Triton; `paged` decides about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer.paged import Page

#: Entries of a page's row in the table: length, then addresses of k, v, their scales, dk and dv (0: there is none).
_ROW = tl.constexpr(7)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(base, r, limit, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows r of a contiguous matrix of width SIZE, as [rows, WIDTH]; zeros from row `limit` and column SIZE on."""
    column = tl.arange(0, WIDTH)
    return tl.load(base + r[:, None] * SIZE + column[None, :], mask=(r < limit)[:, None] & (column < SIZE)[None, :], other=0)


@triton.jit
def _values(
    at, scale_at, first, n, limit, step, scale_step,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, CODED: tl.constexpr, DOT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Values of the positions first + n of one head, [n, WIDTH] in type DOT; zeros from position `limit` and column SIZE on."""
    column = tl.arange(0, WIDTH)
    places = at + first * step + n[:, None] * step + column[None, :]
    if ALIGNED:  # an address read from the table says nothing of this by itself, and loads would be one element wide
        places = tl.multiple_of(places, [16, 16])
    values = tl.load(places, mask=(first + n < limit)[:, None] & (column < SIZE)[None, :], other=0)
    if CODED:
        scale = tl.load(scale_at + first * scale_step + n * scale_step, mask=first + n < limit, other=0)
        values = values.to(tl.float32) * scale[:, None]
    return values.to(DOT)


@triton.jit
def _page(row, head, k_head, v_head, scale_head, TYPE: tl.constexpr):
    """A page's length, and the addresses of one head's keys, values and their scales."""
    k = tl.load(row + 1).to(tl.pointer_type(TYPE)) + head * k_head
    v = tl.load(row + 2).to(tl.pointer_type(TYPE)) + head * v_head
    k_scale = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + head * scale_head
    v_scale = tl.load(row + 4).to(tl.pointer_type(tl.float32)) + head * scale_head
    return tl.load(row), k, v, k_scale, v_scale


@triton.jit(do_not_specialize=["pages", "M"])
def _forward(
    q_KMD, out_RKME, lse_RKM, table, pages, M, scale, k_step, k_head, v_step, v_head, scale_step, scale_head,
    TYPE: tl.constexpr, CODED: tl.constexpr, DOT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Output and natural log-sum-exp of a block of queries over its `pages` pages; inside, exponents have base 2."""
    piece = tl.program_id(2).to(tl.int64)
    head, start = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    at = head * M + start
    q = _rows(q_KMD + at * D, m, M - start, D, BD).to(DOT)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, BE], tl.float32)
    for page in range(pages):
        length, k_at, v_at, ks_at, vs_at = _page(table + (piece * pages + page) * _ROW, head, k_head, v_head, scale_head, TYPE)
        for first in range(0, length, BN):
            k = _values(k_at, ks_at, first, n, length, k_step, scale_step, D, BD, CODED, DOT, ALIGNED)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * _LOG2E)
            s += tl.where(first + n < length, 0.0, float("-inf"))[None, :]
            new = tl.maximum(top, tl.max(s, 1))
            shrink = tl.exp2(top - new)
            p = tl.exp2(s - new[:, None])
            total = total * shrink + tl.sum(p, 1)
            v = _values(v_at, vs_at, first, n, length, v_step, scale_step, E, BE, CODED, DOT, ALIGNED)
            out = tl.dot(p.to(DOT), v, out * shrink[:, None], input_precision="ieee")
            top = new
    e = tl.arange(0, BE)
    kept = (m < M - start)[:, None] & (e < E)[None, :]
    out = (out / total[:, None]).to(out_RKME.dtype.element_ty)
    at += piece * tl.num_programs(1) * M
    tl.store(out_RKME + at * E + m[:, None] * E + e[None, :], out, mask=kept)
    tl.store(lse_RKM + at + m, (top + tl.log2(total)) / _LOG2E, mask=m < M - start)


@triton.jit(do_not_specialize=["pages", "M"])
def _query_gradient(
    q_KMD, dout_KME, out_KME, lse_KM, delta_KM, dq_RKMD, table, pages, M, scale,
    k_step, k_head, v_step, v_head, scale_step, scale_head,
    TYPE: tl.constexpr, CODED: tl.constexpr, DOT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dQ of a block of queries, summed over its `pages` pages; leaves delta = sum(dO * O) for `_page_gradient`."""
    piece = tl.program_id(2).to(tl.int64)
    head, start = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    at = head * M + start
    dout = _rows(dout_KME + at * E, m, M - start, E, BE)
    delta = tl.sum(dout.to(tl.float32) * _rows(out_KME + at * E, m, M - start, E, BE).to(tl.float32), 1)
    tl.store(delta_KM + at + m, delta, mask=(m < M - start) & (piece == 0))
    dout = dout.to(DOT)
    q = _rows(q_KMD + at * D, m, M - start, D, BD).to(DOT)
    lse = tl.load(lse_KM + at + m, mask=m < M - start, other=float("inf")) * _LOG2E
    dq = tl.zeros([BM, BD], tl.float32)
    for page in range(pages):
        length, k_at, v_at, ks_at, vs_at = _page(table + (piece * pages + page) * _ROW, head, k_head, v_head, scale_head, TYPE)
        for first in range(0, length, BN):
            k = _values(k_at, ks_at, first, n, length, k_step, scale_step, D, BD, CODED, DOT, ALIGNED)
            v = _values(v_at, vs_at, first, n, length, v_step, scale_step, E, BE, CODED, DOT, ALIGNED)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * _LOG2E)
            s += tl.where(first + n < length, 0.0, float("-inf"))[None, :]
            ds = tl.dot(dout, tl.trans(v), input_precision="ieee")
            ds = tl.exp2(s - lse[:, None]) * (ds - delta[:, None])
            dq = tl.dot(ds.to(DOT), k, dq, input_precision="ieee")
    d = tl.arange(0, BD)
    kept = (m < M - start)[:, None] & (d < D)[None, :]
    dq_at = dq_RKMD + (at + piece * tl.num_programs(1) * M) * D
    tl.store(dq_at + m[:, None] * D + d[None, :], (dq * scale).to(dq_RKMD.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["M"])
def _page_gradient(
    q_KMD, dout_KME, lse_KM, delta_KM, table, M, scale,
    dk_step, dk_head, dv_step, dv_head, k_step, k_head, v_step, v_head, scale_step, scale_head,
    TYPE: tl.constexpr, CODED: tl.constexpr, DOT: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds dK and dV of a block of one page's keys to where the page wants them."""
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * BN
    row = table + tl.program_id(2) * _ROW
    length, k_at, v_at, ks_at, vs_at = _page(row, head, k_head, v_head, scale_head, TYPE)
    if first < length:
        m, n = tl.arange(0, BM), tl.arange(0, BN)
        k = _values(k_at, ks_at, first, n, length, k_step, scale_step, D, BD, CODED, DOT, ALIGNED)
        v = _values(v_at, vs_at, first, n, length, v_step, scale_step, E, BE, CODED, DOT, ALIGNED)
        dk = tl.zeros([BN, BD], tl.float32)
        dv = tl.zeros([BN, BE], tl.float32)
        for start in range(0, M, BM):
            at = head * M + start
            q = _rows(q_KMD + at * D, m, M - start, D, BD).to(DOT)
            dout = _rows(dout_KME + at * E, m, M - start, E, BE).to(DOT)
            lse = tl.load(lse_KM + at + m, mask=m < M - start, other=float("inf")) * _LOG2E
            delta = tl.load(delta_KM + at + m, mask=m < M - start, other=0)
            s = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * _LOG2E)
            p = tl.exp2(s - lse[None, :])
            dv = tl.dot(p.to(DOT), dout, dv, input_precision="ieee")
            ds = p * (tl.dot(v, tl.trans(dout), input_precision="ieee") - delta[None, :])
            dk = tl.dot(ds.to(DOT), q, dk, input_precision="ieee")
        dk_at = tl.load(row + 5).to(tl.pointer_type(tl.float32)) + head * dk_head + first * dk_step
        dv_at = tl.load(row + 6).to(tl.pointer_type(tl.float32)) + head * dv_head + first * dv_step
        _add(dk_at, n, length - first, dk_step, dk * scale, D, BD, ALIGNED)
        _add(dv_at, n, length - first, dv_step, dv, E, BE, ALIGNED)


@triton.jit
def _add(at, n, limit, step, values, SIZE: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Add [n, WIDTH] to rows of width SIZE, `step` apart, that no other program touches."""
    column = tl.arange(0, WIDTH)
    places = at + n[:, None] * step + column[None, :]
    if ALIGNED:
        places = tl.multiple_of(places, [16, 16])
    kept = (n < limit)[:, None] & (column < SIZE)[None, :]
    tl.store(places, tl.load(places, mask=kept, other=0) + values, mask=kept)


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: queries and keys of a block, warps of a program, loads under way at once."""

    queries: int
    keys: int
    warps: int
    stages: int

    def smaller(self) -> Tiles | None:
        """The next that needs less shared memory; None below 16 by 16, the smallest product of matrices."""
        if self.stages > 1:
            return Tiles(self.queries, self.keys, self.warps, self.stages - 1)
        if max(self.queries, self.keys) == 16:
            return None
        if self.queries > self.keys:
            return Tiles(self.queries // 2, self.keys, self.warps, 1)
        return Tiles(self.queries, self.keys // 2, self.warps, 1)


#: By kernel and width (64, 128, 256; 16-bit types); float32 takes `_WIDE`. Chosen for 227 KiB of shared memory.
TILES = {
    ("_forward", 64): Tiles(128, 128, 8, 3),
    ("_forward", 128): Tiles(128, 64, 8, 3),
    ("_forward", 256): Tiles(128, 64, 8, 2),
    ("_query_gradient", 64): Tiles(128, 64, 8, 3),
    ("_query_gradient", 128): Tiles(128, 64, 8, 2),
    ("_query_gradient", 256): Tiles(128, 32, 8, 2),
    ("_page_gradient", 64): Tiles(64, 128, 8, 3),
    ("_page_gradient", 128): Tiles(64, 128, 8, 2),
    ("_page_gradient", 256): Tiles(32, 64, 8, 2),
}
_WIDE = {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)}
#: The fewest positions that are worth programs of their own.
PIECE = 1024
_FITTING: dict[Any, Tiles] = {}


class TritonPages:
    """`paged.PageKernel` by the kernels above: a GPU, or the CPU under Triton's interpreter."""

    name = "longstraw-pages"

    def supports(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor) -> bool:
        """Head sizes to 256; bfloat16, float16, float32."""
        place = "cpu" if triton.knobs.runtime.interpret else "cuda"
        narrow = q_BHTD.dtype in (torch.bfloat16, torch.float16, torch.float32)
        return q_BHTD.device.type == place and narrow and max(q_BHTD.shape[-1], v_BKSE.shape[-1]) <= 256

    def forward(self, q_1KMD: Tensor, pages: list[Page], scale: float) -> tuple[Tensor, Tensor]:
        """See `PageKernel`."""
        walk = _Walk(q_1KMD, pages)
        R, K, M, E = walk.pieces, *q_1KMD.shape[1:3], pages[0].v.shape[-1]
        out = torch.empty(R, K, M, E, dtype=torch.float32 if R > 1 else q_1KMD.dtype, device=q_1KMD.device)
        lse = torch.empty(R, K, M, dtype=torch.float32, device=q_1KMD.device)
        grid = lambda tiles: (triton.cdiv(M, tiles.queries), K, R)
        walk.run(_forward, grid, q_1KMD.contiguous(), out, lse, walk.table, walk.each, M, scale)
        if R == 1:
            return out, lse
        total = lse.logsumexp(0, keepdim=True)
        out *= torch.exp(lse - total)[..., None]
        return out.sum(0, keepdim=True).to(q_1KMD.dtype), total

    def backward(
        self, dout_1KME: Tensor, q_1KMD: Tensor, pages: list[Page], out_1KME: Tensor, lse_1KM: Tensor, scale: float
    ) -> Tensor:
        """See `PageKernel`."""
        q, dout, out = (x.contiguous() for x in (q_1KMD, dout_1KME, out_1KME))
        lse = lse_1KM.float().contiguous()
        delta = torch.empty_like(lse)
        walk = _Walk(q, pages)
        R, K, M, D = walk.pieces, *q.shape[1:]
        dq = torch.empty(R, K, M, D, dtype=torch.float32 if R > 1 else q.dtype, device=q.device)
        grid = lambda tiles: (triton.cdiv(M, tiles.queries), K, R)
        walk.run(_query_gradient, grid, q, dout, out, lse, delta, dq, walk.table, walk.each, M, scale)
        wanted = [page for page in pages if page.dk is not None]
        if wanted:
            walk = _Walk(q, wanted, gradient=True)
            longest = max(page.k.shape[2] for page in wanted)
            blocks = lambda tiles: (triton.cdiv(longest, tiles.keys), K, len(wanted))
            steps = (*walk.steps("dk"), *walk.steps("dv"))
            walk.run(_page_gradient, blocks, q, dout, lse, delta, walk.table, M, scale, *steps)
        return dq if R == 1 else dq.sum(0, keepdim=True).to(q.dtype)


def _pieces(q_1KMD: Tensor, pages: list[Page]) -> list[Page]:
    """The pages, cut so that a few queries occupy the device; as they are where there are queries enough."""
    on_gpu = q_1KMD.device.type == "cuda"
    enough = 2 * torch.cuda.get_device_properties(q_1KMD.device).multi_processor_count if on_gpu else 8
    total = sum(page.k.shape[2] for page in pages)
    programs = q_1KMD.shape[1] * triton.cdiv(q_1KMD.shape[2], 128)
    wanted = min(enough // programs, total // PIECE)
    if wanted <= 1:
        return pages
    size = triton.cdiv(triton.cdiv(total, wanted), 128) * 128
    return [page.piece(start, start + size) for page in pages for start in range(0, page.k.shape[2], size)]


class _Walk:
    """Pages as the kernels take them: one table, and the strides and types that all of them share."""

    def __init__(self, q_1KMD: Tensor, pages: list[Page], gradient: bool = False) -> None:
        self._first, self._q = pages[0], q_1KMD
        kinds = {page.kind(gradient) for page in pages}
        if len(kinds) > 1:
            raise ModelError(f"pages of one launch have different types or strides: {kinds}; give pages of one kind")
        cut = pages if gradient else _pieces(q_1KMD, pages)
        self.pieces, self.each = (1, len(pages)) if cut is pages else (len(cut), 1)
        address = lambda tensor: 0 if tensor is None else tensor.data_ptr()
        rows = [[page.k.shape[2], *(address(tensor) for tensor in page.tensors())] for page in cut]
        self._aligned = all(_aligned(tensor) for page in pages for tensor in (page.k, page.v, page.dk, page.dv))
        self.table = torch.tensor(rows, dtype=torch.int64).to(q_1KMD.device)
        self.coded = self._first.k_scale is not None

    def steps(self, name: str) -> tuple[int, int]:
        """Elements from one position of a page to the next, and from one head to the next."""
        tensor = getattr(self._first, name)
        return (0, 0) if tensor is None else (tensor.stride(2), tensor.stride(1))

    def run(self, kernel: Any, grid: Any, *given: Any) -> None:
        """Launch with the kernel's tiles, or smaller ones where the GPU has too little shared memory for them."""
        k, v = self._first.k, self._first.v
        D, E, dtype = k.shape[-1], v.shape[-1], self._q.dtype
        BD, BE = (max(16, triton.next_power_of_2(size)) for size in (D, E))
        steps = (*self.steps("k"), *self.steps("v"), *self.steps("k_scale"))
        dot = torch.float32 if triton.knobs.runtime.interpret else dtype  # the interpreter's product of bfloat16 is wrong
        key = (kernel.__name__, max(64, BD, BE), dtype)
        tiles = _FITTING.get(key) or (_WIDE[key[1]] if dtype == torch.float32 else TILES[key[:2]])
        while True:
            try:
                with torch.cuda.device_of(self._q):
                    kernel[grid(tiles)](
                        *given, *steps, TYPE=_TYPES[k.dtype], CODED=self.coded, DOT=_TYPES[dot], ALIGNED=self._aligned,
                        D=D, E=E, BD=BD, BE=BE, BM=tiles.queries, BN=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
                    )  # fmt: skip
            except OutOfResources:
                smaller = tiles.smaller()
                if smaller is None:
                    raise
                tiles = smaller
            else:
                _FITTING[key] = tiles
                return


def _aligned(tensor: Tensor | None) -> bool:
    """Whether every position's vector of every head begins at a multiple of 16 bytes."""
    if tensor is None:
        return True
    return tensor.data_ptr() % 16 == 0 and all(step * tensor.itemsize % 16 == 0 for step in tensor.stride()[1:3])


_TYPES = {torch.int8: tl.int8, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
