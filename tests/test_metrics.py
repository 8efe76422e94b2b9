"""Numbers for other tools: names, what is left out, missing and failing tools, the real TensorBoard where it is installed."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from longstraw_agents.errors import ConfigError
from longstraw_agents.metrics import Metrics, MetricsSettings, flatten, prometheus_text

TRAIN = {"reward": 0.5, "norm": None, "phases": {"replay": {"seconds": 2}}}
VALUES = {"train": TRAIN, "name": "x", "skipped": True, "nan": math.nan}


class Tracker(types.ModuleType):
    """What wandb and trackio have in common."""

    def __init__(self, name: str, broken: bool = False) -> None:
        super().__init__(name)
        self.broken, self.calls = broken, []

    def init(self, **settings: Any) -> None:
        self.calls.append(("init", settings))

    def log(self, values: dict[str, float], step: int) -> None:
        if self.broken:
            raise OSError("no network")
        self.calls.append((step, values))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_numbers_are_flat_and_nothing_else_passes() -> None:
    assert dict(flatten({**VALUES, "nan": 1})) == {"train/reward": 0.5, "train/phases/replay/seconds": 2.0, "nan": 1.0}


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_trackers_get_every_step_and_an_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str) -> None:
    tracker = Tracker(package)
    monkeypatch.setitem(sys.modules, package, tracker)
    metrics = Metrics(MetricsSettings((package,), project="p"), tmp_path, "run", {"seed": 1})
    metrics.log(3, VALUES)
    metrics.close()
    init, logged, end = tracker.calls
    assert init == ("init", {"project": "p", "name": "run", "config": {"seed": 1}})
    assert logged == (3, {"train/reward": 0.5, "train/phases/replay/seconds": 2.0}) and end[0] == "finish"


def test_a_tool_that_fails_is_left_out_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Tracker("wandb", broken=True))
    metrics = Metrics(MetricsSettings(("wandb", "prometheus")), tmp_path, "run", {})
    metrics.log(1, VALUES)
    metrics.log(2, {"train": {"reward": 0.75}})
    assert list(metrics.writers) == ["prometheus"]
    text = (tmp_path / "metrics.prom").read_text()
    assert 'longstraw_train_reward{run="run"} 0.75' in text and 'longstraw_step{run="run"} 2.0' in text
    assert "longstraw_train_phases_replay_seconds" in text


def test_prometheus_text_escapes_the_label() -> None:
    assert prometheus_text({"a/b c": 1.0}, 'x"\\\n') == '# TYPE longstraw_a_b_c gauge\nlongstraw_a_b_c{run="x\\"\\\\\\n"} 1.0\n'


def test_a_missing_tool_is_an_error_at_the_beginning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match="pip install trackio"):
        Metrics(MetricsSettings(("trackio",)), tmp_path, "run", {})
    with pytest.raises(ConfigError, match="choose from tensorboard"):
        MetricsSettings(("tensorbord",))


def test_tensorboard_itself(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(MetricsSettings(("tensorboard",)), tmp_path, "run", {})
    metrics.log(3, VALUES)
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/reward")] == [(3, 0.5)]
