"""The folders of a run's steps: written whole or not at all, and checked before they are used.

Idea: a step's files are written into a hidden folder, synced, and moved into place; only then does the store commit the step,
with the digest of every file. So a crash leaves either a folder that no step names (it is replaced later) or a step whose
folder is whole.

Vocabulary
    step folder   STEPS/000012: the adapter in PEFT's format, the optimizer's state, receipt.json
    files         relative name -> SHA-256 of its bytes, in hexadecimal: what the store keeps of a step
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from longstraw_agents.errors import CorruptionError


def step_folder(steps: Path, step: int) -> Path:
    """Where the files of a step lie."""
    return steps / f"{step:06d}"


def write_step(steps: Path, step: int, save: Callable[[Path], object]) -> dict[str, str]:
    """Let `save` write into a hidden folder, sync it, move it into place, and return its files with their digests.

    A folder of the same step that a crash left behind is replaced.
    """
    steps.mkdir(parents=True, exist_ok=True)
    hidden = steps / f".writing-{step:06d}"
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir()
    save(hidden)
    files = {}
    for path in sorted(hidden.rglob("*")):
        if path.is_file():
            files[path.relative_to(hidden).as_posix()] = digest(path)
        sync(path)
    sync(hidden)
    target = step_folder(steps, step)
    if target.exists():
        shutil.rmtree(target)
    os.rename(hidden, target)
    sync(steps)
    return files


@contextmanager
def alone(steps: Path) -> Iterator[None]:
    """Within the block no other process on these step folders is within it: to write a step and commit it."""
    steps.mkdir(parents=True, exist_ok=True)
    folder = os.open(steps, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks; what the store has committed is asked there all the same
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def check_step(steps: Path, step: int, files: Mapping[str, str]) -> Path:
    """The folder of a step, after every file was found with the digest that its step names; else `CorruptionError`."""
    folder = step_folder(steps, step)
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise CorruptionError(f"{path} is missing, though the store has it for step {step}; restore it from a copy")
        if digest(path) != expected:
            raise CorruptionError(f"{path} is not what was written (its SHA-256 differs); restore it from a copy")
    return folder


def prune(steps: Path, keep: Collection[int]) -> None:
    """Remove the folders of all steps but those in `keep`, and what crashes left half written."""
    for path in steps.iterdir():
        if path.name.startswith(".writing-") or (path.name.isdigit() and int(path.name) not in keep):
            shutil.rmtree(path)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have a file, or a folder's entries, on the disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
