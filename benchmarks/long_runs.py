"""Updates of `long_context.py`: set up, timed, and, where they are long, watched.

A watched update says how far it is and stops at a chunk's border when its time is up. Every run of the engine (a chunk, or
branches packed together) is a border: what came before is done and the device has been waited for. A line is printed every few
seconds, and `save` is given the report so far, so that a killed process leaves it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.long_shapes import DEVICE
from longstraw_agents.trainer.journal import JournalConfig
from longstraw_agents.trainer.loss import LossConfig
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.receipt import Receipt
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.trainer.update import Trainer, TrainerConfig

STARTED = time.perf_counter()


def say(text: str) -> None:
    """Print with the seconds since the process began its work."""
    print(f"[{time.perf_counter() - STARTED:7.1f} s] {text}", flush=True)


def trainer(
    model: nn.Module, gradient: str, chunk: int, pack: int, *, score: bool = True, placement: Placement | None = None,
    journal: JournalConfig | None = None,
) -> Trainer:  # fmt: skip
    """Ours. `score` keeps a scoring pass (a weight for the sampler mismatch needs one); exact updates keep attention outputs."""
    config = TrainerConfig(
        replay=ReplayConfig(
            gradient, chunk=chunk, pack=pack, logit_piece=1024, placement=placement or Placement(outputs=gradient == "exact")
        ),
        loss=LossConfig(mismatch_cap=2.0 if score else None), optimizer=OptimizerConfig(learning_rate=1e-9), journal=journal,
    )  # fmt: skip
    return Trainer(model, config)


def clear() -> None:
    """Give back what nothing refers to any more, and let the peak begin anew."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Run `work`; seconds and peak memory (GiB) of the device. A receipt's phases begin the peak anew, so theirs count too."""
    clear()
    started = time.perf_counter()
    result = work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
    if isinstance(result, Receipt):
        peak = max([peak, *(phase.get("gpu_peak_mib", 0.0) / 1024 for phase in result.phases.values())])
    return result, {"seconds": round(seconds, 3), "peak_gib": round(peak, 4)}


def timed_once(work: Callable[[], Any]) -> float:
    """Seconds of one call, the device's work included."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


class OutOfTimeError(Exception):
    """The deadline passed; `report` says how far the update came."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(f"stopped at its deadline: {report}")
        self.report = report


class Progress:
    """Watches the runs of one engine. inputs, seconds: done so far, by kind of run."""

    def __init__(
        self, engine: Engine, total: int, deadline: float | None, save: Callable[[dict[str, Any]], None], every: float = 10.0
    ) -> None:
        """total: inputs of a whole pass over the prefix. deadline: seconds since the process began its work."""
        self.total, self.deadline, self.every = total, deadline, every
        self.inputs: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self._engine, self._decode, self._save = engine, engine.decode, save
        self._running: tuple[str, int] | None = None
        self._begun = self._said = time.perf_counter()
        self._peak = 0  # a trainer's phases begin the device's own peak anew
        engine.decode = self._watched  # type: ignore[method-assign]

    def _watched(self, ids_BT: np.ndarray, run: Any, state: Any, entry: Any = None) -> Tensor:
        kind = "capture" if run.writes else "forward" if not run.gradient else "backward"
        self.border(kind, run.start)
        self._running = (kind, run.length * run.rows)
        return self._decode(ids_BT, run, state, entry)

    def border(self, kind: str, position: int) -> None:
        """The run before is done; raises OutOfTimeError past the deadline."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._running is not None:
            before, inputs = self._running
            self.inputs[before] = self.inputs.get(before, 0) + inputs
            self.seconds[before] = self.seconds.get(before, 0.0) + now - self._begun
            self._running = None
        if torch.cuda.is_available():
            self._peak = max(self._peak, torch.cuda.max_memory_allocated())
        self._begun = now
        if now - self._said >= self.every:
            self._said = now
            report = self.report()
            say(f"{kind} at position {position:,} of {self.total:,}; {report}")
            self._save(report)
        if self.deadline is not None and now - STARTED > self.deadline:
            raise OutOfTimeError(self.report() | {"stopped_in": kind, "stopped_at": position})

    def report(self) -> dict[str, Any]:
        """Inputs, seconds and rate by kind of run, and the peak of the device's memory so far."""
        rates = {kind: round(count / max(self.seconds[kind], 1e-9)) for kind, count in self.inputs.items()}
        seconds = {kind: round(value, 2) for kind, value in self.seconds.items()}
        peak = round(self._peak / 2**30, 3)
        return {"inputs": dict(self.inputs), "seconds": seconds, "inputs_per_second": rates, "peak_gib": peak}

    def close(self) -> None:
        """Take in the last run and let the engine go."""
        self.deadline = None
        self.border("end", self.total)
        self._engine.decode = self._decode  # type: ignore[method-assign]
