"""Time and peak memory of a run's phases: collect, segment, train, commit, evaluate.

Idea: Linux keeps a process's peak resident memory and lets it be reset (/proc/self/clear_refs), so each phase has a peak of its
own. Elsewhere the peak is the one since the process began: larger, never smaller. Where torch is loaded and has a GPU, its
allocator's peak is kept beside it. An engine that samples in a process of its own is seen by what the child processes hold, and
by what is taken on the GPU by all processes: so it can be seen asleep while the trainer works.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 2**20


@dataclass
class Phase:
    """What one phase took in all: seconds, and in MiB the highest peak of resident memory, that of GPU memory, and at the phase's
    end the resident memory of child processes and the memory taken on the GPU by all processes (0 without child or GPU)."""

    seconds: float = 0.0
    peak_mib: float = 0.0
    gpu_peak_mib: float = 0.0
    children_mib: float = 0.0
    device_mib: float = 0.0

    def add(self, other: Phase) -> None:
        """Count another run of the phase in."""
        self.seconds += other.seconds
        for name in ("peak_mib", "gpu_peak_mib", "children_mib", "device_mib"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    def as_dict(self) -> dict[str, float]:
        """For JSON; what there is none of is left out."""
        return {name: round(value, 3) for name, value in vars(self).items() if value or name in ("seconds", "peak_mib")}


class Phases:
    """Phases by name, in the order in which they first ran; a phase that runs again adds its seconds."""

    def __init__(self) -> None:
        self.by_name: dict[str, Phase] = {}
        self._recent: dict[str, Phase] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[Phase]:
        """Measure what runs inside; an error inside is measured too and passed on."""
        run = Phase()
        phase, recent = self.by_name.setdefault(name, Phase()), self._recent.setdefault(name, Phase())
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
                free, total = torch.cuda.mem_get_info()
                run.gpu_peak_mib, run.device_mib = torch.cuda.max_memory_allocated() / MIB, (total - free) / MIB
            run.seconds, run.peak_mib, run.children_mib = time.perf_counter() - started, peak_mib(), children_mib()
            phase.add(run)
            recent.add(run)

    def as_dict(self) -> dict[str, dict[str, float]]:
        """For JSON and the receipts."""
        return {name: phase.as_dict() for name, phase in self.by_name.items()}

    def take(self) -> dict[str, dict[str, float]]:
        """What ran since the last call, in the same form."""
        taken, self._recent = self._recent, {}
        return {name: phase.as_dict() for name, phase in taken.items()}


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


def children_mib() -> float:
    """Resident memory of all processes below this one, in MiB; what they share is counted for each. 0 where it can't be read."""
    pages, waiting = 0, [os.getpid()]
    while waiting:
        process = Path("/proc") / str(waiting.pop())
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            below = [int(pid) for task in (process / "task").iterdir() for pid in (task / "children").read_text().split()]
            waiting += below
            pages += sum(int((Path("/proc") / str(pid) / "statm").read_text().split()[1]) for pid in below)
    return pages * resource.getpagesize() / MIB


def _torch_with_gpu() -> Any:
    """The module, or None; naming its type would import it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None
