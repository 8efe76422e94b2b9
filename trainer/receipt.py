"""The receipt of one update: what ran, on what, how long, how much memory, and which evidence holds.

Evidence, from weakest to strongest: E1 every event of the update finished and all numbers are finite; E2 replayed
log-probabilities equal the model's own full-sequence ones; E3 sharded gradients reduce to the unsharded ones; E4 the whole
gradient equals conventional training's. An update shows E1 by itself; E2 to E4 are cited from `longstraw verify`.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any


@dataclass(frozen=True)
class Step:
    """One optimizer step: gradient norm before clipping, learning rate, and the loss's metrics."""

    version: int
    loss: float
    gradient_norm: float
    learning_rate: float
    metrics: dict[str, float]


@dataclass
class Receipt:
    """See the module's head. Seconds and MiB by phase; inputs and seconds by kind of run; groups and why some were left out.

    log_ratio: by trajectory, for each loss position, the log-probability under the weights that the last step began with, minus
    the behaviour's (`credit.packed`).
    flips: decisions that recomputed chunks would have made otherwise: "routing" (tokens times layers; the recorded ones were
    used) and "selection" (queries times index layers; the recomputed ones were used). ranks: per process its peak MiB, bytes
    of state, bytes sent by kind of exchange, and seconds in exchanges and idle. journal: where there is one, inputs by kind of
    run that earlier processes did and that this one did, checkpoints written, their bytes and seconds, and how many failed.
    """

    first_version: int
    last_version: int
    gradient: str
    groups: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[tuple[str, str, str]] = field(default_factory=list)
    masked: list[tuple[str, str, str]] = field(default_factory=list)
    credit: dict[str, list[tuple[int, int, float]]] = field(default_factory=dict)  # by trajectory: `credit.spans`
    log_ratio: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    inputs: Counter[str] = field(default_factory=Counter)
    flips: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    tokens: dict[str, int] = field(default_factory=dict)
    recapture: dict[str, Any] = field(default_factory=dict)
    bounded: dict[str, Any] = field(default_factory=dict)
    journal: dict[str, Any] = field(default_factory=dict)
    borders: list[list[tuple[int, int]]] = field(default_factory=list)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    state_bytes: dict[str, int] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    setting: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON and the store."""
        return asdict(self) | {"inputs": dict(self.inputs), "seconds": dict(self.seconds), "flips": dict(self.flips)}


def versions(packages: Sequence[str] = ("longstraw-agents", "torch", "transformers", "peft")) -> dict[str, str]:
    """Installed versions of what the numbers depend on; a package that is not installed is left out."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
