"""Time and peak memory of a run's phases: collect, segment, train, commit, evaluate.

Idea: Linux keeps a process's peak resident memory and lets it be reset (/proc/self/clear_refs), so each phase has a peak of its
own. Elsewhere the peak is the one since the process began: larger, never smaller. Where torch is loaded and has a GPU, its
allocator's peak is kept beside it.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MIB = 2**20


@dataclass
class Phase:
    """What one phase took in all: seconds, the highest peak of resident memory, and of GPU memory (0 without one), in MiB."""

    seconds: float = 0.0
    peak_mib: float = 0.0
    gpu_peak_mib: float = 0.0


class Phases:
    """Phases by name, in the order in which they first ran; a phase that runs again adds its seconds."""

    def __init__(self) -> None:
        self.by_name: dict[str, Phase] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[Phase]:
        """Measure what runs inside; an error inside is measured too and passed on."""
        phase = self.by_name.setdefault(name, Phase())
        torch = _torch_with_gpu()
        reset_peak()
        if torch is not None:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        try:
            yield phase
        finally:
            if torch is not None:
                torch.cuda.synchronize()
                phase.gpu_peak_mib = max(phase.gpu_peak_mib, torch.cuda.max_memory_allocated() / MIB)
            phase.seconds += time.perf_counter() - started
            phase.peak_mib = max(phase.peak_mib, peak_mib())

    def as_dict(self) -> dict[str, dict[str, float]]:
        """For JSON and the receipts."""
        return {
            name: {key: round(value, 3) for key, value in vars(phase).items() if value or key != "gpu_peak_mib"}
            for name, phase in self.by_name.items()
        }


def reset_peak() -> None:
    """Let the peak of resident memory begin anew, where the system can."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_mib() -> float:
    """The peak of resident memory in MiB since the last reset, or since the process began."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB here
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def _torch_with_gpu() -> Any:
    """The module, or None; naming its type would import it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None
