"""A run's numbers for the tools that people watch: TensorBoard, Weights & Biases, trackio, and Prometheus as text.

Idea: the store and the receipts hold everything; these are copies of the same numbers, flat, under names such as train/reward.
A tool that is missing is an error when the run begins, never in its middle; one that fails later is named once and left out,
because a run must not die of its dashboard.

Vocabulary
    writer   one tool, given (step, names to numbers)
    text     FOLDER/metrics.prom: the newest numbers in Prometheus's text format, for a textfile collector or any file server
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw_agents.errors import ConfigError

log = logging.getLogger(__name__)

Writer = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True)
class MetricsSettings:
    """to: any of "tensorboard", "wandb", "trackio", "prometheus". project: the name that wandb and trackio file the run under."""

    to: tuple[str, ...] = ()
    project: str = "longstraw"

    def __post_init__(self) -> None:
        unknown = [name for name in self.to if name not in WRITERS]
        if unknown:
            raise ConfigError(f"metrics.to has {unknown[0]!r}; choose from {', '.join(WRITERS)}")


class Metrics:
    """All writers of one run. `close` ends them."""

    def __init__(self, settings: MetricsSettings, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        """Raises ConfigError for a tool that is not installed."""
        self.closers: list[Callable[[], object]] = []
        self.writers = {name: WRITERS[name](self, settings, folder, run, config) for name in settings.to}

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Give the finite numbers of a nested mapping to every writer."""
        flat = {name: number for name, number in flatten(values) if math.isfinite(number)}
        for name, write in list(self.writers.items()):
            try:
                write(step, flat)
            except Exception as error:  # a tool's own trouble, whatever it is
                log.warning("%s failed (%s: %s); it gets no more numbers of this run", name, type(error).__name__, error)
                del self.writers[name]

    def close(self) -> None:
        """End all tools."""
        for close in self.closers:
            close()
        self.closers.clear()


def flatten(values: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, float]]:
    """("train/reward", 0.5), ... of a nested mapping; what is no number is left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{where}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{where}{name}", float(value)


def prometheus_text(values: Mapping[str, float], run: str) -> str:
    """Numbers in Prometheus's text format, one gauge each: longstraw_train_reward{run="lookup"} 0.5."""
    label = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = []
    for name, value in sorted(values.items()):
        metric = "longstraw_" + re.sub(r"[^a-zA-Z0-9_]+", "_", name)
        lines += [f"# TYPE {metric} gauge", f'{metric}{{run="{label}"}} {value!r}']
    return "\n".join(lines) + "\n"


def _needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"metrics.to names {package}, which is not installed: pip install {package}") from error


def _tensorboard(metrics: Metrics, settings: MetricsSettings, folder: Path, run: str, config: Mapping[str, Any]) -> Writer:
    writer = _needed("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder / "tensorboard"))
    metrics.closers.append(writer.close)

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def _tracker(package: str) -> Callable[..., Writer]:
    """wandb, and trackio, which speaks its language."""

    def begin(metrics: Metrics, settings: MetricsSettings, folder: Path, run: str, config: Mapping[str, Any]) -> Writer:
        tracker = _needed(package, package)
        tracker.init(project=settings.project, name=run, config=dict(config))
        metrics.closers.append(tracker.finish)
        return lambda step, values: tracker.log(dict(values), step=step)

    return begin


def _prometheus(metrics: Metrics, settings: MetricsSettings, folder: Path, run: str, config: Mapping[str, Any]) -> Writer:
    latest: dict[str, float] = {}

    def write(step: int, values: Mapping[str, float]) -> None:
        latest.update(values, step=float(step))
        hidden = folder / ".metrics.prom"
        hidden.write_text(prometheus_text(latest, run), encoding="utf-8")
        os.replace(hidden, folder / "metrics.prom")

    return write


WRITERS: dict[str, Callable[..., Writer]] = {
    "tensorboard": _tensorboard,
    "wandb": _tracker("wandb"),
    "trackio": _tracker("trackio"),
    "prometheus": _prometheus,
}
