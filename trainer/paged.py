"""Pages of keys and values that a kernel reads where they lie, and whether ours may.

Idea: the kernels of `kernels` read one block of plain values. A state in 8 bits is codes and scales, and a prefix can lie in
several pages; our own kernel (`page_kernel`, which needs Triton) reads such pages as they are, all in one launch. It is taken
where Triton is installed, it takes the shape, it passes a check against the reference, and no other way is faster (`attention`
decides that by the number of queries); else codes become values page by page.

Shapes: K key heads, M queries of one key head (rows, grouped heads and tokens folded), S positions, D head size, E value size.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer.quantized import quantize

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Page:
    """k [1, K, S, D] and v [1, K, S, E] of a span: plain values, or int8 codes with float32 scales [1, K, S, 1].

    dk, dv: float32 of k's and v's shapes, where the gradients of the values are added; None where nobody wants them.
    Views will do if the last dimension is contiguous. Raises ModelError where the tensors do not belong together.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None

    def __post_init__(self) -> None:
        short = (1, *self.k.shape[1:3])
        shapes = (self.k.shape, (*short, self.v.shape[-1]), (*short, 1), (*short, 1), self.k.shape, self.v.shape)
        for field, tensor, shape in zip(fields(self), self.tensors(), shapes, strict=True):
            if tensor is not None and (tensor.shape != shape or (tensor.stride(-1) != 1 and shape[-1] != 1)):
                raise ModelError(f"{field.name} is {list(tensor.shape)}, strides {tensor.stride()}; a page needs {list(shape)}")
        coded = self.k.dtype == torch.int8
        if self.v.dtype != self.k.dtype or any((scale is not None) != coded for scale in (self.k_scale, self.v_scale)):
            raise ModelError(f"a page of {self.k.dtype} keys and {self.v.dtype} values: both are int8 with scales, or neither")
        if any(tensor is not None and tensor.dtype != torch.float32 for tensor in self.tensors()[2:]):
            raise ModelError("a page's scales and gradients are float32")
        if (self.dk is None) != (self.dv is None):
            raise ModelError("a page wants the gradients of keys and values, or of neither")

    def tensors(self) -> tuple[Tensor | None, ...]:
        """k, v, k_scale, v_scale, dk, dv."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def piece(self, start: int, stop: int) -> Page:
        """The positions [start, stop) of the page, wanting no gradient."""
        return Page(*(None if tensor is None else tensor[:, :, start:stop] for tensor in self.tensors()[:4]))  # type: ignore[arg-type]

    def kind(self, gradient: bool) -> tuple[Any, ...]:
        """What pages of one launch share: types, and strides of heads and positions; of dk and dv only for `gradient`."""
        kept = self.tensors() if gradient else self.tensors()[:4]
        return tuple(None if tensor is None else (tensor.dtype, *tensor.stride()[1:3]) for tensor in kept)


class PageKernel(Protocol):
    """A raw attention kernel over pages that all queries see."""

    name: str

    def supports(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor) -> bool:
        """Whether it takes states of these tensors' device, type and head sizes."""
        ...

    def forward(self, q_1KMD: Tensor, pages: list[Page], scale: float) -> tuple[Tensor, Tensor]:
        """Return out_1KME in q's type and the natural log-sum-exp lse_1KM in float32, over all positions of all pages."""
        ...

    def backward(
        self, dout_1KME: Tensor, q_1KMD: Tensor, pages: list[Page], out_1KME: Tensor, lse_1KM: Tensor, scale: float
    ) -> Tensor:
        """Return dq, summed over pages, given the merged output and log-sum-exp; add dK and dV where pages want them."""
        ...


def coded_pages(
    k_1KPD: Tensor, v_1KPE: Tensor, spans: Sequence[tuple[int, int]], gradient: bool = True
) -> tuple[list[Page], list[Tensor]]:
    """Pages in 8 bits over spans of the positions, laid out as a state's stacks, their gradients zero; and the values that they
    stand for, in float64, [1, K, all spans' positions, D] and E."""
    parts: list[list[Tensor]] = []
    values = []
    for x in (k_1KPD, v_1KPE):
        codes, scale = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in quantize(x))
        parts += [[t[:, :, start:stop] for start, stop in spans] for t in (codes, scale)]
        values.append(torch.cat([codes[:, :, a:b].double() * scale[:, :, a:b].double() for a, b in spans], 2))
    k, k_scale, v, v_scale = parts
    zeros = lambda like: [torch.zeros_like(part, dtype=torch.float32) if gradient else None for part in like]
    tensors = zip(k, v, k_scale, v_scale, zeros(k), zeros(v), strict=True)
    return [Page(*each) for each in tensors], values


_CHOICES: dict[Any, PageKernel | None] = {}


def choose_pages(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor) -> PageKernel | None:
    """Our kernel for states in 8 bits, if it takes these tensors and passed its check; None: codes become values first.

    Decided once for each device, dtype, number of heads and head sizes.
    """
    if q_BHTD.device.type == "meta" or importlib.util.find_spec("triton") is None:
        return None
    key = (q_BHTD.device, q_BHTD.dtype, q_BHTD.shape[1], k_BKSD.shape[1], q_BHTD.shape[-1], v_BKSE.shape[-1])
    if key not in _CHOICES:
        kernel = _load()
        usable = kernel is not None and kernel.supports(q_BHTD, k_BKSD, v_BKSE) and passes_check(kernel, *key)
        _CHOICES[key] = kernel if usable else None
    return _CHOICES[key]


def _load() -> PageKernel | None:
    try:
        from longstraw_agents.trainer.page_kernel import TritonPages
    except Exception as error:  # an installation of Triton that is not whole
        _LOG.warning("attention kernel for pages is left out: %s: %s", type(error).__name__, error)
        return None
    return TritonPages()


def chosen() -> list[str]:
    """Names of the page kernels chosen so far in this process."""
    return sorted({kernel.name for kernel in _CHOICES.values() if kernel is not None})


def passes_check(
    kernel: PageKernel, device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, size: int, value_size: int
) -> bool:
    """Compare a page kernel with the float64 reference on random numbers: 8-bit pages with a gap, merged with plain keys.

    Output, log-sum-exp and all three gradients; tolerances as `kernels.passes_check`. A kernel that fails, or raises, is left
    out with a warning.
    """
    from longstraw_agents.trainer.attention import Visibility, reference_backward, reference_forward
    from longstraw_agents.trainer.kernels import TOLERANCE

    last = 4096 if device.type == "cuda" else 229  # there enough for pages to be cut, where few queries meet them
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        new = lambda count, length, width: torch.randn(1, count, length, width, device=device).to(dtype)
        queries = 128 * heads // key_heads
        q, dout = new(key_heads, queries, size), new(key_heads, queries, value_size)
        k, v = new(key_heads, last + 71, size), new(key_heads, last + 71, value_size)
    spans = [(0, 70), (100, last)]
    pages, values = coded_pages(k, v, spans)
    see, scale = Visibility(0, 0, False), size**-0.5
    q64, dout64 = q.double(), dout.double()
    k64, v64 = values
    whole = [torch.cat([part, x[:, :, last:].double()], 2) for part, x in ((k64, k), (v64, v))]
    merged = reference_forward(q64, whole[0], whole[1], see, scale)
    gradients = reference_backward(dout64, q64, k64, v64, *merged, see, scale)
    wanted = [*reference_forward(q64, k64, v64, see, scale), *gradients]
    try:
        out, lse = kernel.forward(q, pages, scale)
        dq = kernel.backward(dout, q, pages, merged[0].to(dtype), merged[1].float(), scale)
        found = [out, lse, dq, *(torch.cat([getattr(page, name) for page in pages], 2) for name in ("dk", "dv"))]
        worst = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
    except Exception as error:  # whatever a compiler or a GPU raises, the kernel is not usable here
        _LOG.warning("attention kernel %s is left out: %s: %s", kernel.name, type(error).__name__, error)
        return False
    if not worst <= TOLERANCE[dtype]:
        _LOG.warning("attention kernel %s is left out: error %.2e in %s", kernel.name, worst, dtype)
    return worst <= TOLERANCE[dtype]
