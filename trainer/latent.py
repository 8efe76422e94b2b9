"""The state of latent attention: a compressed latent and a shared rotary key for each token, up-projected when read.

Idea: DeepSeek's multi-head latent attention caches, per token, a latent c of rank R (after its norm) and one rotary key r for all
heads; keys and values are c's up-projection, with r appended to every key (DeepSeek-V2, 2024, section 2.1). What later tokens
read is c and r, so the cotangent is theirs. A chunk reads its prefix block by block: a block is up-projected by the model's
own layer, used, and dropped; in the backward pass it is up-projected again under autograd, and its dK and dV become
cotangents of c and r and gradients of the up-projection. In detached mode c and r are cut, not the up-projection.

Shapes: S positions of a block, R rank of the latent, D size of the rotary key, K heads, E value size. c_11SR, r_11SD.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer.attention import PrefixAttention, Spec
from longstraw_agents.trainer.state import AttentionState, Run

#: Positions that are up-projected at once.
BLOCK = 8192


def require_latent(module: nn.Module) -> None:
    """Raise ModelError unless the attention layer up-projects latents in the way known here."""
    missing = [name for name in ("expand_kv", "kv_b_proj", "qk_nope_head_dim", "kv_lora_rank") if not hasattr(module, name)]
    if missing:
        raise ModelError(
            f"{type(module).__name__} is said to be latent attention but has no {', '.join(missing)}; no exact replay is known"
        )


class LatentState(AttentionState):
    """Latents and rotary keys of one layer: `keys` holds c, `values` holds r."""

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
        """Attention over latents, up-projected when read."""
        require_latent(module)
        prefix = LatentPrefix(self, self.run, module)
        return PrefixAttention.apply(q, k, v, prefix, spec)  # type: ignore[no-untyped-call,no-any-return]


class LatentPrefix:
    """`attention.Prefix` over a LatentState, for one run of one layer."""

    def __init__(self, state: LatentState, run: Run, module: Any) -> None:
        self._state, self._cut, self._module = state, run.cut, module
        self.length = run.start

    def joined(self, k_1KTD: Tensor, v_1KTE: Tensor) -> None:
        """Keys and values of the prefix lie nowhere: they are made when read."""

    def pages(self, gradient: bool) -> None:
        """Nor do they in pages."""

    def blocks(self, first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Up-projected blocks, parted at the cut."""
        borders = {*range(first, self.length, BLOCK), self.length} | ({self._cut} if first < self._cut < self.length else set())
        ordered = sorted(borders)
        for start, stop in zip(ordered, ordered[1:], strict=False):
            with torch.no_grad():
                k, v = self._module.expand_kv(self._state.keys.read(start, stop), self._state.values.read(start, stop))
            yield start, k, v

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """See `Prefix`."""
        return self._state.recall()

    def keep(self, out_BHTE: Tensor, lse_BHT: Tensor) -> None:
        """See `Prefix`."""
        self._state.keep(out_BHTE, lse_BHT)

    def gradient_start(self) -> int:
        """0 where the up-projection trains: what a chunk reads depends on it even where the state itself is cut."""
        return 0 if any(p.requires_grad for p in self._module.kv_b_proj.parameters()) else self._cut

    def add(self, start: int, dk_1KSD: Tensor, dv_1KSE: Tensor) -> None:
        """Back-propagate a block's dK and dV through its up-projection into the cotangents of c and r."""
        stop = start + dk_1KSD.shape[2]
        stacks = (self._state.keys, self._state.values)
        with torch.enable_grad():
            leaves = [stack.read(start, stop).detach().requires_grad_(start >= self._cut) for stack in stacks]
            outputs = self._module.expand_kv(*leaves)
        pairs = [(o, g.to(o.dtype)) for o, g in zip(outputs, (dk_1KSD, dv_1KSE), strict=True) if o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        for stack, leaf in zip(stacks, leaves, strict=True):
            if leaf.grad is not None:
                stack.add(start, leaf.grad, self._cut)
