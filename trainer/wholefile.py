"""Files of named tensors that are whole or absent, and checked before anything of them is used.

Idea: a file is written under a hidden name, synced, and moved into place, and the folder is synced; a crash leaves the old file,
the new one, or a hidden one that nobody reads. Its head carries a digest of everything in it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longstraw_agents.checkpoints import sync
from longstraw_agents.errors import CorruptionError
from longstraw_agents.trainer.stamps import tensor_digest

#: Files to write or read at once: digesting takes longer than a fast disk.
AT_ONCE = 4
#: Names of files under way begin so; the writing process's id follows.
HIDDEN = ".writing-"


def write(path: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Write tensors, wherever they lie, with `about`; returns the file's bytes. What lay at `path` before is replaced.

    Raises OSError where it can't be written (a full disk, no permission); then nothing of it is left.
    """
    here = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(about)
    head = {"about": text, "digest": _digest(text, here)}
    hidden = path.with_name(f"{HIDDEN}{os.getpid()}-{path.name}")
    try:
        save_file(here, hidden, metadata=head)
        sync(hidden)
        size = hidden.stat().st_size
        os.replace(hidden, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            hidden.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written: {error}") from error
    return size


def read_about(path: Path) -> dict[str, Any]:
    """`about` alone, unchecked. Raises CorruptionError where there is no such head."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()["about"])  # type: ignore[no-any-return]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{path} can't be read as it was written: {error}") from error


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `write` was given, tensors on the CPU. Raises CorruptionError where the file is not what was written, or is gone."""
    try:
        with safe_open(path, framework="pt") as file:
            head = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        whole = head["digest"] == _digest(head["about"], tensors)
        about = json.loads(head["about"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{path} can't be read as it was written: {error}") from error
    if not whole:
        raise CorruptionError(f"{path} is not what was written: its digest differs")
    return about, tensors


def _digest(about: str, tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.blake2b(about.encode(), digest_size=16)
    for name in sorted(tensors):
        total.update(name.encode() + tensor_digest(tensors[name]))
    return total.hexdigest()
