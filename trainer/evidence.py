"""Stored verifications, for receipts to cite: one JSON file per model shape, type, device and versions.

Idea: a verification holds for what it was made on. Its file is named by a digest of all that its outcome depends on: the model's
configuration, its type and device, which parameter classes train, and the versions of the packages that compute. A receipt asks
by the same digest; another transformers version, or another adapter, finds nothing and says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from longstraw_agents.cache import cache_folder
from longstraw_agents.trainer.architectures import unwrap
from longstraw_agents.trainer.receipt import versions
from longstraw_agents.trainer.verification import Verification, describe

#: Settings of a configuration that say nothing about its mathematics.
_NAMES = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")


def fingerprint(model: nn.Module) -> str:
    """The digest that a model's verifications are stored under."""
    base: Any = unwrap(model)
    settings = base.config.get_text_config().to_dict()
    shape = {key: value for key, value in settings.items() if key not in _NAMES}
    whole = {"config": shape, "model": describe(model), "versions": versions(("torch", "transformers", "peft"))}
    return hashlib.blake2b(json.dumps(whole, sort_keys=True, default=str).encode(), digest_size=10).hexdigest()


def _path(key: str) -> Path:
    return cache_folder() / "verifications" / f"{key}.json"


def store(model: nn.Module, verification: Verification) -> Path:
    """Write a verification, passed or failed, in one step; it replaces an older one of the same fingerprint."""
    path = _path(fingerprint(model))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".verification-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps(verification.to_dict(), indent=1, default=str) + "\n")
    os.replace(name, path)
    return path


def cite(model: nn.Module) -> dict[str, Any]:
    """What a receipt says of E2 to E4: the stored checks with their date and length, or that there are none."""
    path = _path(fingerprint(model))
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {name: "not verified for this model, type and versions: run `longstraw verify`" for name in ("E2", "E4")}
    about = {"verified": path.stem, "date": stored["date"], "length": stored["setting"]["length"]}
    return {name: stored["checks"][name] | about for name in ("E2", "E3", "E4", "control") if name in stored["checks"]}
