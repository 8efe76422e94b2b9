"""One tensor kind of one layer's state along the current path, with its cotangent.

Idea: positions along a root-to-leaf path are contiguous, so a child's span is written after its parent's and the next sibling
overwrites it. Tensors are position-major: what belongs to a span of positions is one run of bytes.

Shapes: P positions, K key heads, S positions read, T positions written, D head size, M picked positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from longstraw_agents.errors import StaleStateError

#: The most positions of a prefix whose dK and dV exist at once: a backward pass over more goes block by block.
BLOCK = 2**18


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of cotangents and merges: float32, or the compute type where that is wider."""
    return torch.promote_types(dtype, torch.float32)


class Stack:
    """One tensor kind of one layer along the path, position-major so that positions are contiguous: [P, K, D].

    page: positions to read at once where reading makes a copy; None where it does not.
    """

    page: int | None = None

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.values_PKD: Tensor | None = None
        self.cotangent_PKD: Tensor | None = None
        self._base = 0  # the position of the cotangent's first row: in detached mode nothing before a node's start has one

    @property
    def staged_on(self) -> torch.device | None:
        """The device that pages are copied to when read, from memory of another kind; None where they lie on it."""
        return None

    def write(self, start: int, new_1KTD: Tensor, device: torch.device | None = None) -> None:
        """Copy a run's [1, K, T, D] to the positions from `start` on. `device`: where the stack is to lie, if it is new."""
        _, K, T, D = new_1KTD.shape
        self._refuse_overflow(start, new_1KTD)
        if self.values_PKD is None:
            # One allocation for the whole path: its bytes are exactly what the planner counts.
            self.values_PKD = torch.empty(self.capacity, K, D, dtype=new_1KTD.dtype, device=device or new_1KTD.device)
        self.values_PKD[start : start + T].copy_(new_1KTD[0].transpose(0, 1))

    def write_at(self, positions_M: Tensor, new_1KMD: Tensor) -> None:
        """Copy [1, K, M, D] to single positions that were written before."""
        assert self.values_PKD is not None
        self.values_PKD[positions_M] = new_1KMD[0].transpose(0, 1).to(self.values_PKD)

    def _refuse_overflow(self, start: int, new_1KTD: Tensor) -> None:
        if start + new_1KTD.shape[2] > self.capacity:
            raise StaleStateError(
                f"a run writes positions {start} to {start + new_1KTD.shape[2]} into a state made for {self.capacity}; "
                "make the state for the longest path"
            )

    def pick(self, positions: Tensor, stop: int) -> Tensor:
        """The values at `positions` [...] below `stop` of a stack with one key head, [..., D]."""
        if self.values_PKD is None:
            raise StaleStateError(f"positions 0 to {stop} were read before anything was captured")
        return self.values_PKD[positions, 0]

    def release(self) -> None:
        """Let go of copies that `pick` and `add_at` hold on the device; a stack on the device holds none."""
        return None

    def read(self, start: int, stop: int) -> Tensor:
        """The values of [start, stop) as [1, K, S, D], without a copy."""
        if self.values_PKD is None:
            raise StaleStateError(f"positions {start} to {stop} were read before anything was captured")
        return self.values_PKD[start:stop].transpose(0, 1)[None]

    def add(self, start: int, grad_1KSD: Tensor, cut: int) -> None:
        """Add to the cotangent of the positions from `start` on; none is kept for positions before the run's `cut`."""
        cotangent = self._cotangent(cut)
        first = start - self._base
        cotangent[first : first + grad_1KSD.shape[2]] += grad_1KSD[0].transpose(0, 1)

    def add_at(self, positions_M: Tensor, grad_MD: Tensor, cut: int) -> None:
        """Add to the cotangent at positions (none before `cut`, each any number of times) of a stack with one key head."""
        cotangent = self._cotangent(cut)
        cotangent[:, 0].index_add_(0, positions_M - self._base, grad_MD.to(cotangent.dtype))

    def _cotangent(self, cut: int) -> Tensor:
        assert self.values_PKD is not None
        if self.cotangent_PKD is None or cut < self._base:
            # A lower cut than before means another node in detached mode; what lay above was taken, so nothing is lost.
            self._base = cut
            self.cotangent_PKD = torch.zeros_like(self.values_PKD[cut:], dtype=wide(self.values_PKD.dtype))
        return self.cotangent_PKD

    def cotangent(self, start: int, stop: int, cut: int) -> Tensor | None:
        """The cotangent of [start, stop) as [1, K, S, D], to be added to in place; None where values are read elsewhere."""
        return self._cotangent(cut)[start - self._base : stop - self._base].transpose(0, 1)[None]

    def take(self, start: int, stop: int) -> Tensor | None:
        """The cotangent of [start, stop) as [1, K, S, D], cleared from the stack; None where there is none."""
        if self.cotangent_PKD is None or start < self._base:
            return None
        part = self.cotangent_PKD[start - self._base : stop - self._base]
        taken = part.transpose(0, 1)[None].clone()
        part.zero_()
        return taken

    def seen_cotangent(self, start: int, stop: int) -> Tensor | None:
        """The cotangent of [start, stop) as [1, K, S, D], left as it is; None where there is none. For the journal."""
        if self.cotangent_PKD is None or start < self._base:
            return None
        return self.cotangent_PKD[start - self._base : stop - self._base].transpose(0, 1)[None]

    def restore_cotangent(self, start: int, grad_1KSD: Tensor) -> None:
        """Put back what `seen_cotangent` gave, after `restore_outline`."""
        assert self.cotangent_PKD is not None
        first = start - self._base
        self.cotangent_PKD[first : first + grad_1KSD.shape[2]].copy_(grad_1KSD[0].transpose(0, 1))

    def outline(self) -> dict[str, Tensor]:
        """Shape and type of the values, and the first position that has a cotangent, where there are any: for the journal."""
        if self.values_PKD is None:
            return {}
        base = {} if self.cotangent_PKD is None else {"base": torch.tensor(self._base)}
        return {"like": self.values_PKD[:0].transpose(0, 1)[None]} | base

    def restore_outline(self, outline: Mapping[str, Tensor], device: torch.device | None) -> None:
        """Make room for values and cotangents as `outline` found it; `device` as for `write`."""
        if "like" in outline:
            self.write(0, outline["like"], device)
        if "base" in outline:
            self._cotangent(int(outline["base"]))

    def nbytes(self) -> dict[str, int]:
        """Bytes held: {"state": ..., "cotangent": ...}."""
        size = lambda tensor: 0 if tensor is None else tensor.nbytes
        return {"state": size(self.values_PKD), "cotangent": size(self.cotangent_PKD)}
