"""Keys and values in 8 bits: half of bfloat16's memory, at a rounding that `longstraw verify --kv-bits 8` measures.

Idea: a position's vector of each head is stored as int8 codes with one float32 scale, its largest magnitude over 127. Our own
kernel reads them as they are where that is faster (`paged`). For all others `read` gives a page in the compute type, so every
kernel works on it, and a page is all that ever exists at full width. The gradient is that of the values as read; rounding itself
passes it on unchanged (the straight-through rule of Bengio, Leonard and Courville, 2013). So an update over such a state is not
exact, and what insists on exact states refuses it.

Shapes: K key heads, S positions read, T positions written, D head size, M picked positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw_agents.errors import StaleStateError
from longstraw_agents.trainer.stack import Stack

#: The largest code; the smallest is its negative, so that zero is in the middle.
LIMIT = 127


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """(codes int8 of the same shape, scales float32 [..., 1]); a vector of zeros has scale 0."""
    scale = values.abs().amax(-1, keepdim=True).float() / LIMIT
    codes = torch.where(scale > 0, values.float() / scale, 0.0).round_()
    return codes.to(torch.int8), scale


class ByteStack(Stack):
    """A stack whose values lie in two others: codes and scales. The cotangent lies with the codes, in float32."""

    def __init__(self, codes: Stack, scales: Stack, page: int) -> None:
        super().__init__(codes.capacity)
        self.codes, self.scales, self.page = codes, scales, page
        self._dtype = torch.float32

    @property
    def staged_on(self) -> torch.device | None:
        """The device that codes and scales are copied to when read."""
        return self.codes.staged_on

    def write(self, start: int, new_1KTD: Tensor, device: torch.device | None = None) -> None:
        """Round and keep a run's values."""
        self._dtype = new_1KTD.dtype
        codes, scales = quantize(new_1KTD)
        self.codes.write(start, codes, device)
        self.scales.write(start, scales, device)

    def write_at(self, positions_M: Tensor, new_1KMD: Tensor) -> None:
        """Round and keep values at single positions."""
        codes, scales = quantize(new_1KMD)
        self.codes.write_at(positions_M, codes)
        self.scales.write_at(positions_M, scales)

    def pick(self, positions: Tensor, stop: int) -> Tensor:
        """Refused: what picks single positions has chosen them by exact keys."""
        raise StaleStateError("a state in 8 bits is read by pages, not by single positions; leave `bits` off for this model")

    def read(self, start: int, stop: int) -> Tensor:
        """The values of [start, stop) as [1, K, S, D] in the type that was written: a copy."""
        return (self.codes.read(start, stop) * self.scales.read(start, stop)).to(self._dtype)

    def add(self, start: int, grad_1KSD: Tensor, cut: int) -> None:
        """Add to the cotangent of the positions from `start` on."""
        self.codes.add(start, grad_1KSD, cut)

    def cotangent(self, start: int, stop: int, cut: int) -> Tensor | None:
        """See `Stack`."""
        return self.codes.cotangent(start, stop, cut)

    def take(self, start: int, stop: int) -> Tensor | None:
        """The cotangent of [start, stop), cleared."""
        return self.codes.take(start, stop)

    def nbytes(self) -> dict[str, int]:
        """Bytes of codes, scales and cotangent."""
        codes, scales = self.codes.nbytes(), self.scales.nbytes()
        return {kind: codes[kind] + scales[kind] for kind in codes}
