"""Stand-ins for compiled kernels on the meta device: they make the tensors that the kernels make, and compute nothing.

What each allocates is read off its source: FlashAttention-4 (flash_attn.cute.interface, 4.0.0b36) and flash-linear-attention's
chunked gated delta rule (fla.ops.gated_delta_rule, 0.6.0).

Shapes: B rows, H query heads, K key heads, T queries, S keys, D head size, E value size; of the delta rule: H heads, N chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longstraw_agents.trainer.live import LiveBytes

#: Tokens of a chunk of the delta rule.
CHUNK = 64


class FlashLike:
    """An attention kernel (`kernels.Kernel`) with FlashAttention's memory; operations are added to `live.attention`.

    workspace: what FlashAttention-4's backward holds besides its results: dQ in float32, and where key heads are shared dK and
    dV in float32 too. Torch's kernel for CPUs holds none.
    """

    name = "stand-in"

    def __init__(self, live: LiveBytes, workspace: bool) -> None:
        self._live, self._workspace = live, workspace
        self.bottom_right = workspace

    def supports(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor) -> bool:
        """Anything without data; as torch's kernel for CPUs, equal head sizes alone."""
        return q_BHTD.device.type == "meta" and (self._workspace or q_BHTD.shape[-1] == v_BKSE.shape[-1])

    def forward(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """The output, laid out as [B, T, H, E], and the log-sum-exp."""
        (B, H, T, _), E = q_BHTD.shape, v_BKSE.shape[-1]
        self._live.attention += self._operations(q_BHTD, k_BKSD, v_BKSE, causal)
        out = q_BHTD.new_empty(B, T, H, E).transpose(1, 2)
        return out, q_BHTD.new_empty(B, H, T, dtype=torch.float32)

    def backward(
        self, dout_BHTE: Tensor, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor,
        out_BHTE: Tensor, lse_BHT: Tensor, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """dq, dk, dv."""
        self._live.attention += int(2.5 * self._operations(q_BHTD, k_BKSD, v_BKSE, causal))
        results = tuple(torch.empty_like(x) for x in (q_BHTD, k_BKSD, v_BKSE))
        if self._workspace:
            shared = q_BHTD.shape[1] > k_BKSD.shape[1]
            wide = [torch.empty_like(x, dtype=torch.float32) for x in (q_BHTD, *((k_BKSD, v_BKSE) if shared else ()))]
            wide += [torch.empty_like(lse_BHT), torch.empty_like(lse_BHT)]
        return results  # type: ignore[return-value]

    def _operations(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> int:
        (B, H, T, D), S, E = q.shape, k.shape[2], v.shape[-1]
        seen = T * S - T * T // 2 if causal else T * S
        return 2 * B * H * seen * (D + E)


class DeltaLike(torch.autograd.Function):
    """The gated delta rule with flash-linear-attention's memory."""

    @staticmethod
    def rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
        output_final_state: bool = False, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Takes the place of the models' `torch_chunk_gated_delta_rule`."""
        out, final = DeltaLike.apply(query, key, value, g, beta, initial_state)  # type: ignore[no-untyped-call]
        return out, final if output_final_state else None

    @staticmethod
    def forward(
        ctx: Any, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (x.contiguous() for x in (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH))
        B, T, H, V = v.shape
        q, k = torch.empty_like(q), torch.empty_like(k)  # normalized
        scales = [x.new_empty(x.shape[:3], dtype=torch.float32) for x in (q, k)]
        g = torch.empty_like(g, dtype=torch.float32)
        A = k.new_empty(B, T, H, CHUNK)
        states, final = _states(k, v)
        held = [states, _of_keys(k, v), torch.empty_like(v), torch.empty_like(v)]  # and w, u, new values
        ctx.save_for_backward(q, k, v, *scales, g, beta, A, *([] if initial is None else [initial]))
        ctx.starts = initial is not None
        out = torch.empty_like(v)
        del held
        return out, final

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _, g, beta, _, *initial = ctx.saved_tensors
        held = [_of_keys(k, v), torch.empty_like(v), torch.empty_like(v), _states(k, v)[0]]  # w, u, new values, states again
        dstates, dinitial = _states(k, v)
        held += [dstates, torch.empty_like(v), _of_keys(k, v), torch.empty_like(k)]  # and dv, dw, the second part of dk
        results = [torch.empty_like(x) for x in (q, k, v)]
        dg, dbeta = (torch.empty_like(x, dtype=torch.float32) for x in (g, beta))
        held += [torch.empty_like(dg)]
        del held
        return *results, dg, dbeta.to(beta.dtype), dinitial if ctx.starts else None


def _of_keys(k_BTHK: Tensor, v_BTHV: Tensor) -> Tensor:
    """One key for each value head."""
    return k_BTHK.new_empty(*v_BTHV.shape[:3], k_BTHK.shape[-1])


def _states(k_BTHK: Tensor, v_BTHV: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix at each chunk's start [B, N, H, K, V] in the compute type, and one in float32."""
    (B, T, H, V), K = v_BTHV.shape, k_BTHK.shape[-1]
    return k_BTHK.new_empty(B, -(-T // CHUNK), H, K, V), k_BTHK.new_empty(B, H, K, V, dtype=torch.float32)
