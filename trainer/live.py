"""Live bytes of a computation, counted tensor by tensor as torch makes and drops them.

Idea: a tensor's memory is its storage's. Every operator passes a dispatch mode, which sees the storages of what it returns; each
is counted once, rounded up as the allocator of a GPU does, until nothing refers to it any more: not the program, not the graph of
a backward pass. On torch's meta device, where tensors have shapes and no data, a forward and backward pass of any size takes as
long as its operators take to be called, and what it *would* hold is exact but for what kernels hold while they run.

The same walk adds up what the passes would do: operations of matrix products, and bytes that all other operators read and write.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Bytes to whose multiples a GPU's allocator rounds up.
GRAIN = 512
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"})


class LiveBytes(TorchDispatchMode):
    """Within the block, counts `now` and `peak` (bytes), `operations` (of matrix products) and `traffic` (bytes of the rest)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.operations = self.traffic = 0
        self.attention = 0  # operations that a stand-in kernel reports
        self._held: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.hold(made)
        self._add_work(func, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)], made)
        return result

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors that were made outside of the block too."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._held:
                self._held[key] = -(-storage.nbytes() // GRAIN) * GRAIN
                self.now += self._held[key]
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._drop, key)

    def move(self, tensors: Iterable[Tensor]) -> None:
        """These lie elsewhere: count them no more."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            self.now -= self._held.get(key, 0)
            self._held[key] = 0

    def begin(self) -> None:
        """Let the peak and the work begin anew."""
        self.peak = self.now
        self.operations = self.traffic = self.attention = 0

    def _drop(self, key: int) -> None:
        self.now -= self._held.pop(key, 0)

    def _add_work(self, func: Any, given: list[Tensor], made: list[Tensor]) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in _PRODUCTS and made and len(given) > 1:
            left, right = given[-2:] if name in ("addmm", "baddbmm") else given[:2]
            inner = left.shape[-1]
            self.operations += 2 * made[0].numel() * inner if left.shape[-1] in right.shape else 0
        elif not func.is_view:
            inputs = {x.untyped_storage()._cdata: x.nbytes for x in given}
            self.traffic += sum(inputs.values()) + sum(x.nbytes for x in made)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of tensors, each counted once."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def without_data(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor on the meta device."""
    return torch.empty(*shape, dtype=dtype, device="meta")
