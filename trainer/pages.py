"""States in host memory or on disk: the same stacks, read by the device page by page.

Idea: a state that the device cannot hold lies in pinned host memory, cotangents beside it. A layer's prefix is staged one page at
a time: while the device computes on a page, a side stream copies the next one, in the order in which attention reads them. All
traffic goes through the device's own queue of copies, so the host never touches the bytes while a copy is under way, and what
the device reads is what it wrote before. Without a GPU the same code runs on plain memory: the numbers are the same.

On disk the same bytes lie in mapped files that have no name, so that nothing is left of them when the process ends; the system
decides which of them stay in memory. What must outlive a process is kept by the shelf (`trainer/shelf.py`), or by an update's
journal (`trainer/journal.py`).
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longstraw_agents.errors import ConfigError
from longstraw_agents.trainer.quantized import ByteStack
from longstraw_agents.trainer.stack import Stack, wide

PLACES = ("device", "host", "disk")


@dataclass(frozen=True)
class Placement:
    """Where states lie ("device", "host" or "disk"), and how many positions a staged page has.

    outputs: keep attention's outputs of captured chunks as well, so that the reverse pass does not compute them again. It costs
    as many bytes a position as the queries have, and saves a forward's attention: about a quarter of a long exact update.
    bits: 8 keeps keys and values as 8-bit codes, which is not exact; None as they are.
    directory: where files lie for "disk"; a folder on a fast disk with room for state and cotangents.
    """

    place: str = "device"
    page: int = 65536
    outputs: bool = False
    bits: int | None = None
    directory: Path | None = None

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise ConfigError(f"place is {self.place!r}; choose one of {', '.join(PLACES)}")
        if self.page < 1:
            raise ConfigError(f"page is {self.page}; it counts positions and must be at least 1")
        if self.bits not in (None, 8):
            raise ConfigError(f"bits is {self.bits}; keys and values are kept in 8 bits, or as they are without `bits`")
        if (self.place == "disk") != (self.directory is not None):
            raise ConfigError(f'place is {self.place!r} and directory is {self.directory}; "disk" needs one, other places none')

    def stack(self, capacity: int) -> Stack:
        """A new stack of exact values in this place."""
        if self.place == "host":
            return HostStack(capacity, self.page)
        return Stack(capacity) if self.directory is None else DiskStack(capacity, self.page, self.directory)

    def state(self, capacity: int) -> Stack:
        """A new stack for keys or values in this place, rounded to `bits` where that is asked for."""
        if self.bits is None:
            return self.stack(capacity)
        return ByteStack(self.stack(capacity), self.stack(capacity), self.page)


class HostStack(Stack):
    """A stack in pinned host memory. `read` gives a copy on the device; cotangents are added to on the device and put back."""

    page: int

    def __init__(self, capacity: int, page: int) -> None:
        super().__init__(capacity)
        self.page = page
        self._device = torch.device("cpu")
        self._picked_PD: Tensor | None = None  # staged by `pick`
        self._added_PD: Tensor | None = None  # the cotangent as `add_at` staged it

    @property
    def staged_on(self) -> torch.device | None:
        """The device that reads and writes."""
        return self._device

    def write(self, start: int, new_1KTD: Tensor, device: torch.device | None = None) -> None:
        """Copy to host memory; see `Stack`."""
        self._device = new_1KTD.device if device is None else device
        if self.values_PKD is None:
            _, K, _, D = new_1KTD.shape
            self.values_PKD = self._memory(self.capacity, K, D, dtype=new_1KTD.dtype)
        self._refuse_overflow(start, new_1KTD)
        self._picked_PD = None
        self.values_PKD[start : start + new_1KTD.shape[2]].copy_(new_1KTD[0].transpose(0, 1).contiguous(), non_blocking=True)

    def write_at(self, positions_M: Tensor, new_1KMD: Tensor) -> None:
        """As `Stack`'s, by way of the device."""
        values = self.read(0, int(positions_M.max()) + 1).clone()
        values[:, :, positions_M.to(values.device)] = new_1KMD.to(values)
        self.write(0, values, self._device)

    def read(self, start: int, stop: int) -> Tensor:
        """A copy on the device."""
        page = super().read(start, stop)[0].transpose(0, 1)
        return page.to(self._device, non_blocking=True, copy=True).transpose(0, 1)[None]

    def pick(self, positions: Tensor, stop: int) -> Tensor:
        """Stages all positions below `stop` until the next write or `release`."""
        if self._picked_PD is None or len(self._picked_PD) < stop:
            self._picked_PD = self.read(0, stop)[0, 0]
        return self._picked_PD[positions]

    def release(self) -> None:
        """Let go of what is staged; a staged cotangent is put back."""
        self._picked_PD = None
        if self._added_PD is not None:
            assert self.cotangent_PKD is not None
            self.cotangent_PKD[:, 0].copy_(self._added_PD, non_blocking=True)
            self._added_PD = None

    def add(self, start: int, grad_1KSD: Tensor, cut: int) -> None:
        """Add on the device, page by page."""
        self.release()
        cotangent = self._cotangent(cut)
        for first in range(0, grad_1KSD.shape[2], self.page):
            piece = grad_1KSD[0, :, first : first + self.page].transpose(0, 1)
            begin = start - self._base + first
            held = cotangent[begin : begin + len(piece)]
            held.copy_(held.to(self._device, non_blocking=True) + piece, non_blocking=True)

    def cotangent(self, start: int, stop: int, cut: int) -> None:
        """None: it lies in host memory."""

    def add_at(self, positions_M: Tensor, grad_MD: Tensor, cut: int) -> None:
        """Stages the cotangent until `release`."""
        cotangent = self._cotangent(cut)
        if self._added_PD is None:
            self._added_PD = cotangent[:, 0].to(self._device, non_blocking=True, copy=True)
        self._added_PD.index_add_(0, positions_M - self._base, grad_MD.to(self._added_PD.dtype))

    def take(self, start: int, stop: int) -> Tensor | None:
        """A copy on the device, cleared here."""
        self.release()
        if self.cotangent_PKD is None or start < self._base:
            return None
        part = self.cotangent_PKD[start - self._base : stop - self._base]
        taken = part.to(self._device, non_blocking=True, copy=True)
        part.copy_(torch.zeros_like(taken), non_blocking=True)  # through the same queue, so after the copy above
        return taken.transpose(0, 1)[None]

    def _cotangent(self, cut: int) -> Tensor:
        assert self.values_PKD is not None
        if self.cotangent_PKD is None or cut < self._base:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # copies into the old cotangent may be under way
            self._base, self._added_PD = cut, None
            _, K, D = self.values_PKD.shape
            self.cotangent_PKD = self._memory(self.capacity - cut, K, D, dtype=wide(self.values_PKD.dtype))
        return self.cotangent_PKD

    def _memory(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros in pinned memory; of a model that is only planned with, nothing but their shape."""
        device = "meta" if self._device.type == "meta" else "cpu"
        return torch.zeros(*shape, dtype=dtype, device=device, pin_memory=self._device.type == "cuda")


class DiskStack(HostStack):
    """A host stack whose memory is mapped from nameless files in a folder."""

    def __init__(self, capacity: int, page: int, directory: Path) -> None:
        super().__init__(capacity, page)
        self._directory = directory

    def _memory(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros in a mapped file; a file's unwritten parts read as zeros and take no room."""
        count = torch.Size(shape).numel()
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix="longstraw-state-") as file:
            file.truncate(count * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=count, dtype=dtype).reshape(shape)


def staged(stacks: Sequence[Stack], borders: Sequence[int]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield (start, one [1, K, S, D] of each stack) for each span between neighbouring borders, the next one on its way.

    Stacks on the device give views of what they hold.
    """
    spans = list(zip(borders, borders[1:], strict=False))
    device = next((stack.staged_on for stack in stacks if stack.staged_on is not None), None)
    if device is None or device.type != "cuda":
        for start, stop in spans:
            yield start, tuple(stack.read(start, stop) for stack in stacks)
        return
    main = torch.cuda.current_stream(device)
    side = side_stream(device)

    def load(start: int, stop: int) -> tuple[tuple[Tensor, ...], torch.cuda.Event]:
        side.wait_stream(main)  # what was written last is in host memory before it is read
        with torch.cuda.stream(side):
            page = tuple(stack.read(start, stop) for stack in stacks)
        return page, side.record_event()

    ahead = load(*spans[0]) if spans else None
    for index, (start, _) in enumerate(spans):
        assert ahead is not None
        page, ready = ahead
        ahead = load(*spans[index + 1]) if index + 1 < len(spans) else None
        main.wait_event(ready)
        for tensor in page:
            tensor.record_stream(main)  # its memory is reused only after the computation that reads it
        yield start, page


def page_borders(first: int, stop: int, cut: int, page: int | None) -> list[int]:
    """Borders of the blocks in [first, stop): at the cut, where gradients begin, and every `page` positions."""
    borders = {first, stop} | ({cut} if first < cut < stop else set())
    if page is not None:
        borders |= set(range(first, stop, page))
    return sorted(borders)


@functools.cache
def side_stream(device: torch.device, what: str = "pages") -> torch.cuda.Stream:
    """The device's stream for copies of `what`: each kind has its own, so that none waits behind another's."""
    return torch.cuda.Stream(device)
