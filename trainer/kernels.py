"""Raw attention kernels behind one interface, and the choice among them.

Idea: a kernel computes one block's output with its log-sum-exp, and one block's dQ, dK, dV from a *given* output and
log-sum-exp, which may be those of a merge over several blocks. What is installed, takes the shape and passes a check against
the reference at first use is taken, fastest first; the reference is a kernel's definition and the last resort.

Rates on one H200 (bfloat16, 16,384 queries on 262,144 keys, forward, TFLOP/s; heads, key heads, head size): FlashAttention-4
567 / 676 / 736 for (9, 3, 64) / (16, 8, 128) / (8, 2, 256); cuDNN 463 / 599 / 662; torch's flash attention 305 / 338 / 285.

Shapes: B rows, H query heads, K key heads, T queries, S keys, D head size, E value head size.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from longstraw_agents.trainer import paged

_LOG = logging.getLogger(__name__)


class Kernel(Protocol):
    """A raw attention kernel for blocks without sliding window and soft cap."""

    name: str
    #: Whether `causal` with more keys than queries aligns the mask at the bottom right: the last query sees all keys.
    bottom_right: bool

    def supports(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor) -> bool:
        """Whether this kernel is installed and takes these tensors' device, dtype and head sizes."""
        ...

    def forward(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return out_BHTE and the natural log-sum-exp lse_BHT (float32 or wider)."""
        ...

    def backward(
        self, dout_BHTE: Tensor, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor,
        out_BHTE: Tensor, lse_BHT: Tensor, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return dq, dk, dv given the merged output and log-sum-exp."""
        ...


class CpuFlash:
    """Torch's own flash attention for CPU: float32, float64 and bfloat16, grouped heads, equal head sizes."""

    name = "torch-cpu-flash"
    bottom_right = False

    def supports(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor) -> bool:
        """Whether it is installed and takes these tensors."""
        return q_BHTD.device.type == "cpu" and q_BHTD.shape[-1] == v_BKSE.shape[-1] and q_BHTD.dtype != torch.float16

    def forward(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = run(q_BHTD, k_BKSD, v_BKSE, 0.0, causal, attn_mask=None, scale=scale)
        return out, lse

    def backward(
        self, dout_BHTE: Tensor, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor,
        out_BHTE: Tensor, lse_BHT: Tensor, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See `Kernel`."""
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = run(
            dout_BHTE, q_BHTD, k_BKSD, v_BKSE, out_BHTE, lse_BHT, 0.0, causal, attn_mask=None, scale=scale
        )  # fmt: skip
        return dq, dk, dv


class Flash4:
    """FlashAttention-4 (package flash-attn-4, module flash_attn.cute): Hopper and newer, 16-bit types.

    Its tensors are [B, T, H, D]; ours are handed over as transposed views.
    """

    name = "flash-attention-4"
    bottom_right = True

    def supports(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor) -> bool:
        """Whether it is installed and takes these tensors."""
        return (
            _is_gpu(q_BHTD, major=9) and q_BHTD.shape[-1] in (64, 96, 128, 192, 256) and v_BKSE.shape[-1] % 8 == 0
            and importlib.util.find_spec("flash_attn") is not None
            and importlib.util.find_spec("flash_attn.cute") is not None
        )  # fmt: skip

    def forward(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        from flash_attn.cute.interface import _flash_attn_fwd

        q, k, v = (x.transpose(1, 2) for x in (q_BHTD, k_BKSD, v_BKSE))
        out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
        return out.transpose(1, 2), lse

    def backward(
        self, dout_BHTE: Tensor, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor,
        out_BHTE: Tensor, lse_BHT: Tensor, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See `Kernel`."""
        from flash_attn.cute.interface import _flash_attn_bwd

        q, k, v, out, dout = (x.transpose(1, 2) for x in (q_BHTD, k_BKSD, v_BKSE, out_BHTE, dout_BHTE))
        dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, dout, lse_BHT.contiguous(), softmax_scale=scale, causal=causal)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class CuDnn:
    """cuDNN's attention through torch's own operators: Hopper and newer, 16-bit types."""

    name = "cudnn"
    bottom_right = False

    def supports(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor) -> bool:
        """Whether it is installed and takes these tensors."""
        sizes = (q_BHTD.shape[-1], v_BKSE.shape[-1])
        return _is_gpu(q_BHTD, major=9) and all(size % 8 == 0 and size <= 256 for size in sizes)

    def forward(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        run = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = run(q_BHTD, k_BKSD, v_BKSE, None, True, 0.0, causal, False, scale=scale)
        return out, lse.reshape(out.shape[:3])

    def backward(
        self, dout_BHTE: Tensor, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor,
        out_BHTE: Tensor, lse_BHT: Tensor, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See `Kernel`."""
        run = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        unused = torch.zeros((), dtype=torch.int64, device=q_BHTD.device)
        lse = lse_BHT.float().reshape(*out_BHTE.shape[:3], 1).contiguous()
        T, S = q_BHTD.shape[2], k_BKSD.shape[2]
        dq, dk, dv = run(
            dout_BHTE, q_BHTD, k_BKSD, v_BKSE, out_BHTE, lse, unused, unused, None, None, None, T, S, 0.0, causal, scale=scale
        )  # fmt: skip
        return dq, dk, dv


class TorchFlash:
    """Torch's own flash attention (version 2): Ampere and newer, 16-bit types, equal head sizes."""

    name = "torch-flash"
    bottom_right = False

    def supports(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor) -> bool:
        """Whether it is installed and takes these tensors."""
        return _is_gpu(q_BHTD, major=8) and q_BHTD.shape[-1] == v_BKSE.shape[-1] and q_BHTD.shape[-1] <= 256

    def forward(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        q, k, v = (x.transpose(1, 2) for x in (q_BHTD, k_BKSD, v_BKSE))
        run = torch.ops.aten._flash_attention_forward
        out, lse, *_ = run(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale)
        return out.transpose(1, 2), lse

    def backward(
        self, dout_BHTE: Tensor, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor,
        out_BHTE: Tensor, lse_BHT: Tensor, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See `Kernel`."""
        q, k, v, out, dout = (x.transpose(1, 2) for x in (q_BHTD, k_BKSD, v_BKSE, out_BHTE, dout_BHTE))
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        run = torch.ops.aten._flash_attention_backward
        dq, dk, dv = run(
            dout, q, k, v, out, lse_BHT.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal, unused, unused[:1],
            scale=scale,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _is_gpu(q: Tensor, major: int) -> bool:
    return (
        q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16)
        and torch.version.cuda is not None and torch.cuda.get_device_capability(q.device)[0] >= major
    )  # fmt: skip


#: The largest relative error of a type's kernels: that of its rounding.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-5, torch.float64: 1e-12}

#: Fastest first.
KERNELS: tuple[Kernel, ...] = (Flash4(), CuDnn(), TorchFlash(), CpuFlash())

_CHOICES: dict[Any, Kernel | None] = {}
_STAND_INS: list[Kernel] = []


@contextmanager
def standing_in(kernel: Kernel) -> Iterator[None]:
    """Within the block, tensors without data (torch's meta device) are given to `kernel`; outside of one, to the reference."""
    _STAND_INS.append(kernel)
    try:
        yield
    finally:
        _STAND_INS.pop()


def choose(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor) -> Kernel | None:
    """The fastest kernel that takes these tensors and passed its check; None means the reference.

    Decided once for each device, dtype, number of heads and head sizes.
    """
    if q_BHTD.device.type == "meta":
        return _STAND_INS[-1] if _STAND_INS and _STAND_INS[-1].supports(q_BHTD, k_BKSD, v_BKSE) else None
    key = (q_BHTD.device, q_BHTD.dtype, q_BHTD.shape[1], k_BKSD.shape[1], q_BHTD.shape[-1], v_BKSE.shape[-1])
    if key not in _CHOICES:
        able = (kernel for kernel in KERNELS if kernel.supports(q_BHTD, k_BKSD, v_BKSE))
        _CHOICES[key] = next((kernel for kernel in able if passes_check(kernel, *key)), None)
    return _CHOICES[key]


def chosen() -> list[str]:
    """Names of the kernels chosen so far in this process, those for pages too; "reference" where none fits."""
    return sorted({"reference" if kernel is None else kernel.name for kernel in _CHOICES.values()} | set(paged.chosen()))


def passes_check(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, size: int, value_size: int
) -> bool:
    """Compare a kernel with the float64 reference on random numbers: two merged blocks, forward and all three gradients.

    The tolerance is that of the type's rounding: 2 % for bfloat16, 0.5 % for float16, 1e-5 for float32, 1e-12 for float64.
    A kernel that fails, or raises, is left out with a warning.
    """
    from longstraw_agents.trainer.attention import Visibility, merge, reference_backward, reference_forward

    tolerance = TOLERANCE[dtype]
    T, S, scale = 128, 192, size**-0.5
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        new = lambda count, length, width: torch.randn(1, count, length, width, dtype=torch.float32, device=device).to(dtype)
        q, dout = new(heads, T, size), new(heads, T, value_size)
        k, v = new(key_heads, S + T, size), new(key_heads, S + T, value_size)
    try:
        own = kernel.forward(q, k[:, :, S:], v[:, :, S:], True, scale)
        before = kernel.forward(q, k[:, :, :S], v[:, :, :S], False, scale)
        wide = torch.promote_types(dtype, torch.float32)
        out, lse = merge(own[0].to(wide), own[1], *before)
        out = out.to(dtype)
        left = kernel.backward(dout, q, k[:, :, :S], v[:, :, :S], out, lse, False, scale)
        right = kernel.backward(dout, q, k[:, :, S:], v[:, :, S:], out, lse, True, scale)
        found = [out, left[0].to(wide) + right[0], torch.cat([left[1], right[1]], 2), torch.cat([left[2], right[2]], 2)]
        if kernel.bottom_right:
            joint, joint_lse = kernel.forward(q, k, v, True, scale)
            found += [joint, *kernel.backward(dout, q, k, v, joint, joint_lse, True, scale)]
    except Exception as error:  # whatever a foreign kernel raises, it is not usable here
        _LOG.warning("attention kernel %s is left out: %s: %s", kernel.name, type(error).__name__, error)
        return False
    see = Visibility(S, 0, True)
    q64, k64, v64, dout64 = (x.double() for x in (q, k, v, dout))
    out64, lse64 = reference_forward(q64, k64, v64, see, scale)
    wanted = [out64, *reference_backward(dout64, q64, k64, v64, out64, lse64, see, scale)]
    worst = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted * 2, strict=False))
    if not worst <= tolerance:
        _LOG.warning("attention kernel %s is left out: error %.2e in %s is above %.0e", kernel.name, worst, dtype, tolerance)
    return worst <= tolerance
