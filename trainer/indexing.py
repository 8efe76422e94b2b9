"""Scores of a sparse index, from the factors that the model's own indexer multiplies, without its intermediate tensors.

Idea: an indexer of DeepSeek Sparse Attention scores a key by sum over heads of w_h * relu(scale * q_h . k). The models' own code
writes [queries x heads x keys] four times on the way. Here its factors q and w are caught as it hands them to its two products,
for all of a run's queries at once, and each block of keys takes one product that ends in its relu, and one sum over heads.
That the formula is the indexer's is not believed but checked: at the first use of each indexer's class its own scores of a few
queries must come out, else its code goes on being called.

Shapes: B rows, S queries, H index heads, I index size, P keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longstraw_agents.errors import ModelError

_LOG = logging.getLogger(__name__)

#: Devices on which indexers are taken apart; elsewhere their own code is called for every block.
DEVICES = {"cuda"}
_AGREES: dict[type, bool] = {}


@dataclass(frozen=True)
class Factors:
    """What an indexer multiplies: q_BSHI and w_BSH in the type that it scores in (float32), and the scale of q . k."""

    q_BSHI: Tensor
    w_BSH: Tensor
    scale: float

    def scores(self, queries: slice, k_BPI: Tensor) -> Tensor:
        """Scores [B, S, P] of some queries."""
        q, w = self.q_BSHI[:, queries], self.w_BSH[:, queries]
        (B, S, H, size), P = q.shape, k_BPI.shape[1]
        zero = q.new_zeros(P)
        out = q.new_empty(B, S, P)
        for row in range(B):
            k_IP = k_BPI[row % len(k_BPI)].to(q.dtype).T
            # relu(zero + scale * q k): a product whose last step is the relu
            s = torch._addmm_activation(zero, q[row].reshape(S * H, size), k_IP, alpha=self.scale)
            torch.bmm(w[row][:, None], s.view(S, H, P), out=out[row][:, None])
        return out


class Watching(TorchFunctionMode):
    """Catches the scores that an indexer hands to its top-k, sparing the top-k, and what goes into its products."""

    def __init__(self, indexer: Any) -> None:
        super().__init__()
        self._indexer = indexer
        self.scores: Tensor | None = None
        self._products: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.topk, torch.topk):
            self.scores = args[0]
            return torch.return_types.topk((args[0][..., :1], torch.zeros_like(args[0][..., :1], dtype=torch.int64)))
        if func in (torch.matmul, torch.Tensor.matmul):
            self._products.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))

    def found(self) -> Tensor:
        """The scores; raises ModelError where there were none."""
        if self.scores is None:
            raise ModelError(f"{type(self._indexer).__name__} selects without a top-k of its scores; no exact replay is known")
        return self.scores

    def factors(self) -> Factors | None:
        """The factors of what was seen, where it has the form known here."""
        scale = getattr(self._indexer, "softmax_scale", None)
        if scale is None or len(self._products) != 2:
            return None
        (q, _), (w, _) = self._products
        if q.ndim != 4 or w.ndim != 4 or w.shape[:2] != q.shape[:2] or w.shape[2:] != (1, q.shape[2]):
            return None
        return Factors(q, w[:, :, 0], float(scale))


def agrees(indexer: Any, factors: Factors, k_BPI: Tensor, own: Callable[[], Tensor]) -> bool:
    """Whether the factors give the indexer's `own()` scores [B, S, P] of its first queries over k; asked once per class."""
    kind = type(indexer)
    if kind not in _AGREES:
        wanted = own()
        found = factors.scores(slice(0, wanted.shape[1]), k_BPI)
        error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
        _AGREES[kind] = error < 2e-3  # TF32's rounding
        if not _AGREES[kind]:
            _LOG.warning("%s is not taken apart: its scores would differ by %.1e", kind.__name__, error)
    return _AGREES[kind]
