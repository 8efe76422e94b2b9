"""The table of bounds and the file of measurements."""

from __future__ import annotations

import json
import math
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from longstraw_agents import figures
from longstraw_agents.errors import ConfigError, NonFiniteError


def test_an_entry_holds_or_not_by_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    good = figures.record("main.cli_help_seconds", 0.3, "s", command="x", path=path)
    bad = figures.record("main.demo_gain_points", 59.0, "points", command="x", trials=[59.0, 80.0, 90.0], path=path)
    assert good["holds"] and not bad["holds"]
    assert [entry["figure"] for entry in figures.read(path)] == ["main.cli_help_seconds", "main.demo_gain_points"]
    assert figures.read(path)[1]["trials"] == [59.0, 80.0, 90.0]
    assert "fall short" in figures.table(figures.read(path))


def test_a_later_measurement_replaces_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    figures.record("main.cli_help_seconds", 0.7, path=path)
    figures.record("main.cli_help_seconds", 0.4, path=path)
    assert [entry["value"] for entry in figures.read(path)] == [0.4]


def test_patterns_take_any_item_but_not_none(tmp_path: Path) -> None:
    assert figures.bound_of("exact.float64_lifted.llama") == "<= 1e-10"
    for wrong in ("exact.float64_lifted.", "exact.float64_lifted.*", "exact.float64_lifted", "main.demo_gain_point"):
        with pytest.raises(ConfigError):
            figures.bound_of(wrong)
    entries = [figures.record("exact.float64_lifted.llama", 1e-12, path=tmp_path / "figures.json")]
    assert "exact.float64_lifted.*" not in figures.never_measured(entries)
    assert "exact.float32_global.*" in figures.never_measured(entries)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(NonFiniteError):
        figures.record("main.cli_help_seconds", value, path=tmp_path / "figures.json")
    assert not (tmp_path / "figures.json").exists()


def _record_one(argument: tuple[str, int]) -> None:
    path, item = argument
    figures.record(f"exact.float32_global.item{item}", 1e-6, command="x", path=Path(path))


def test_processes_that_record_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_record_one, [(str(path), item) for item in range(16)]))
    assert len(figures.read(path)) == 16


def test_the_recorded_file_is_what_the_module_writes() -> None:
    """docs/figures.json itself: every entry is claimed, sorted, and its verdict follows from its value and today's bound."""
    if not figures.FILE.exists():
        pytest.skip("nothing recorded yet")
    entries = json.loads(figures.FILE.read_text())
    assert [entry["figure"] for entry in entries] == sorted(entry["figure"] for entry in entries)
    for entry in entries:
        assert entry["bound"] == figures.bound_of(entry["figure"])
        assert entry["holds"] == figures.meets(entry["value"], entry["bound"])
        assert {"unit", "command", "machine", "commit", "date", "trials"} <= set(entry)
