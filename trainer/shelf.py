"""Tensors kept under keys and stamps, in places of limited size: the shelf on which states outlive an update.

Idea: what lies under a key is read only by who asks with the stamps it was kept under; anything else is stale and is refused. An
item lies in memory, on the accelerator or the host; the least recently used moves down when its place is full, and goes when no
place is left. With a directory every item is also written to disk when it is kept, in one file that is whole or absent, so a
process that is killed finds again what it had finished. A file is checked against its digest before anything of it is used.
Several processes may use one directory: a file that another removed is captured again.

Vocabulary
    item     named tensors that were kept together, with their stamps and a note of what they are
    stamps   digests of the weights and settings under which they were computed (`stamps.Stamps`)
    place    "device" (where the tensors were), "host", "disk"
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from longstraw_agents.errors import ConfigError, CorruptionError, StaleStateError
from longstraw_agents.trainer import wholefile
from longstraw_agents.trainer.stamps import require_fresh

_LOG = logging.getLogger(__name__)

Stamp = tuple[str, ...]
_SUFFIX = ".state.safetensors"


@dataclass(frozen=True)
class ShelfConfig:
    """Bytes per place. device_bytes counts tensors on an accelerator; disk_bytes needs a directory."""

    device_bytes: int = 0
    host_bytes: int = 4 * 2**30
    disk_bytes: int = 0
    directory: str | None = None

    def __post_init__(self) -> None:
        for name in ("device_bytes", "host_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it counts bytes and must be at least 0")
        if (self.disk_bytes > 0) != (self.directory is not None):
            raise ConfigError("states are kept on disk with both disk_bytes above 0 and a directory; got only one of them")


@dataclass(frozen=True)
class _Item:
    stamps: Stamp
    note: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class _File:
    stamps: Stamp
    note: dict[str, Any]
    nbytes: int


class Shelf:
    """See the module's head. `evicted` counts items that left a place, by place; it is the caller's to read and clear."""

    def __init__(self, config: ShelfConfig = ShelfConfig()) -> None:
        self.config = config
        self.evicted: Counter[str] = Counter()
        self._memory: dict[str, OrderedDict[str, _Item]] = {"device": OrderedDict(), "host": OrderedDict()}
        self._limit = {"device": config.device_bytes, "host": config.host_bytes}
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._directory = None if config.directory is None else Path(config.directory)
        self._lock = threading.RLock()
        if self._directory is not None:
            self._find(self._directory)

    def put(self, key: str, stamps: Stamp, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
        """Keep copies of `tensors` under `key`; what lay there is gone. `note` is JSON that `notes` gives back."""
        with self._lock:
            self.drop(key)
            item = _Item(stamps, dict(note), {name: tensor.detach() for name, tensor in tensors.items()})
            on_device = any(tensor.device.type != "cpu" for tensor in item.tensors.values())
            self._insert("device" if on_device else "host", key, item, copy=True)
            if self._directory is not None:
                self._write(self._directory, key, item)

    def stamps(self, key: str) -> Stamp | None:
        """The stamps under which `key` was kept, or None where nothing is."""
        with self._lock:
            item = self._held(key) or self._files.get(key)
            return None if item is None else item.stamps

    def get(self, key: str, stamps: Stamp) -> dict[str, Tensor]:
        """The tensors under `key`, where they were kept under exactly these stamps; they are not to be changed.

        Raises StaleStateError where nothing is kept or under others, CorruptionError where a file is not what was written (it
        is dropped: capture again).
        """
        with self._lock:
            found = self.stamps(key)
            if found is None:
                raise StaleStateError(f"nothing is kept under {key}; capture it first")
            require_fresh(found, stamps, f"the kept state {key}")
            if key in self._files:
                self._files.move_to_end(key)
            for place in self._memory.values():
                if key in place:
                    place.move_to_end(key)
                    return dict(place[key].tensors)
            assert self._directory is not None
            item = self._read(self._directory, key)
            self._insert("host", key, item, copy=False)
            return dict(item.tensors)

    def drop(self, key: str) -> None:
        """Let go of what lies under `key`, if anything does."""
        with self._lock:
            for place in self._memory.values():
                place.pop(key, None)
            if self._files.pop(key, None) is not None and self._directory is not None:
                (self._directory / (key + _SUFFIX)).unlink(missing_ok=True)

    def notes(self) -> dict[str, dict[str, Any]]:
        """The notes of everything kept, by key."""
        with self._lock:
            kept = {key: file.note for key, file in self._files.items()}
            return kept | {key: item.note for place in self._memory.values() for key, item in place.items()}

    def nbytes(self) -> dict[str, int]:
        """Bytes by place."""
        with self._lock:
            memory = {name: sum(item.nbytes for item in place.values()) for name, place in self._memory.items()}
            return memory | {"disk": sum(file.nbytes for file in self._files.values())}

    # -- memory ---------------------------------------------------------------------------------------------------------

    def _held(self, key: str) -> _Item | None:
        return next((place[key] for place in self._memory.values() if key in place), None)

    def _insert(self, place: str, key: str, item: _Item, *, copy: bool) -> None:
        """Put an item into a place as its most recently used, and move down what no longer fits."""
        if item.nbytes > self._limit[place]:
            if place == "device":
                self._insert("host", key, item, copy=copy)
            else:
                self.evicted["host"] += key not in self._files
            return
        if place == "host":
            moved = {name: tensor.to("cpu", copy=copy and tensor.device.type == "cpu") for name, tensor in item.tensors.items()}
            item = _Item(item.stamps, item.note, moved)
        elif copy:
            item = _Item(item.stamps, item.note, {name: tensor.clone() for name, tensor in item.tensors.items()})
        held = self._memory[place]
        held[key] = item
        while sum(other.nbytes for other in held.values()) > self._limit[place]:
            oldest, gone = held.popitem(last=False)
            self.evicted[place] += 1
            if place == "device":
                self._insert("host", oldest, gone, copy=False)

    # -- disk -----------------------------------------------------------------------------------------------------------

    def _find(self, directory: Path) -> None:
        """Take in what an earlier process finished; half-written files are removed, unreadable ones too."""
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(f"{wholefile.HIDDEN}*{_SUFFIX}"):
            if not _another_lives(int(path.name.split("-")[1])):
                path.unlink()
        for path in sorted(directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns):
            try:
                about = wholefile.read_about(path)
                found = _File(tuple(about["stamps"]), about["note"], about["nbytes"])
            except (CorruptionError, KeyError):
                path.unlink()
                continue
            self._files[path.name.removesuffix(_SUFFIX)] = found

    def _write(self, directory: Path, key: str, item: _Item) -> None:
        if item.nbytes > self.config.disk_bytes:
            self.evicted["disk"] += 1
            return
        about = {"key": key, "stamps": item.stamps, "note": item.note, "nbytes": item.nbytes}
        try:
            wholefile.write(directory / (key + _SUFFIX), about, item.tensors)
        except OSError as error:  # a full disk costs the next process time, this one nothing
            _LOG.warning("a state was not kept on disk: %s", error)
            self.evicted["disk"] += 1
            return
        self._files[key] = _File(item.stamps, item.note, item.nbytes)
        while sum(file.nbytes for file in self._files.values()) > self.config.disk_bytes:
            oldest, _ = self._files.popitem(last=False)
            (directory / (oldest + _SUFFIX)).unlink(missing_ok=True)
            self.evicted["disk"] += 1

    def _read(self, directory: Path, key: str) -> _Item:
        path = directory / (key + _SUFFIX)
        try:
            about, tensors = wholefile.read(path)
            whole = about.get("key") == key and tuple(about["stamps"]) == self._files[key].stamps
        except CorruptionError:
            whole = False
        if not whole:
            self._files.pop(key, None)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise CorruptionError(f"{path} is not what was written; it was removed: capture its tokens again")
        return _Item(self._files[key].stamps, about["note"], tensors)


def _another_lives(process: int) -> bool:
    """Whether a process that is not this one has this id: it may still be writing."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
