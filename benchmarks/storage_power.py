"""Power cuts from a log of writes and syncs (benchmarks/disk_shim.c): what the disk may hold when the power goes.

A file's writes since its last sync may each have reached the disk or not, whole or in part (by sectors of 512 bytes), in any
combination. A new file is there once it or its folder was synced; a deleted one may come back until its folder was.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SECTOR = 512


class Operation(NamedTuple):
    """One record of the log; path relative to the watched folder, "" for the folder itself."""

    kind: str
    path: str
    offset: int
    data: bytes


@dataclass
class File:
    """A file's synced content, and the writes since."""

    content: bytearray = field(default_factory=bytearray)
    pending: list[Operation] = field(default_factory=list)
    entry: bool = False  # its name is on the disk


def read_log(path: Path, folder: Path) -> list[Operation]:
    """The log's records, in order."""
    data, at, operations = path.read_bytes(), 0, []
    while at < len(data):
        kind, name, offset, size = struct.unpack_from("=4Q", data, at)
        at += 32
        file = data[at : at + name].decode()
        at += name
        relative = file[len(str(folder)) :].lstrip("/")
        operations.append(Operation(chr(kind), relative, offset, data[at : at + size]))
        at += size
    return operations


def cut(operations: list[Operation], image: Path, dice: random.Random) -> list[str]:
    """Makes in `image` what the disk may hold if the power goes at a random moment; returns what was acknowledged by then."""
    end = dice.randrange(1, len(operations) + 1)
    keep = dice.choice([0.0, 0.5, 1.0])  # how much of what was not synced reached the disk
    files: dict[str, File] = {}
    ghosts: dict[str, File] = {}  # deleted, but not for sure
    acknowledged = bytearray()
    for operation in operations[:end]:
        if operation.path == "acknowledged":  # a person has read it
            acknowledged += operation.data
        elif not operation.path.endswith("-shm"):
            _follow(operation, files, ghosts)
    image.mkdir()
    for name, file in ghosts.items():
        if name not in files and dice.random() < 0.5:
            files[name] = file
    for name, file in files.items():
        if not file.entry and dice.random() >= keep:
            continue
        content = bytearray(file.content)
        for write in file.pending:
            if dice.random() < keep:
                _apply(content, _torn(write, dice))
        (image / name).write_bytes(content)
    return acknowledged.decode().split("\n")[:-1]


def _follow(operation: Operation, files: dict[str, File], ghosts: dict[str, File]) -> None:
    if operation.kind == "S" and operation.path not in files:  # the folder: names and deletions are on the disk
        ghosts.clear()
        for file in files.values():
            file.entry = True
        return
    if operation.kind == "U":
        removed = files.pop(operation.path, None)
        if removed is not None and removed.entry:
            ghosts[operation.path] = removed
        return
    file = files.setdefault(operation.path, File())
    if operation.kind == "S":
        for write in file.pending:
            _apply(file.content, write)
        file.pending, file.entry = [], True
        ghosts.pop(operation.path, None)
    elif operation.kind in "WT":
        file.pending.append(operation)


def _torn(write: Operation, dice: random.Random) -> Operation:
    """The write, or the sectors of it that were on the disk in time."""
    if write.kind != "W" or len(write.data) <= SECTOR or dice.random() < 0.7:
        return write
    return write._replace(data=write.data[: SECTOR * dice.randrange(1, len(write.data) // SECTOR + 1)])


def _apply(content: bytearray, write: Operation) -> None:
    if write.kind == "T":
        del content[write.offset :]
        content.extend(bytes(max(0, write.offset - len(content))))
        return
    content.extend(bytes(max(0, write.offset - len(content))))
    content[write.offset : write.offset + len(write.data)] = write.data
