"""NaN and infinities anywhere in an update are refused by name and change nothing; the cases are the benchmark's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("nonfinite", Path(__file__).parents[1] / "benchmarks" / "nonfinite.py")
assert _spec is not None and _spec.loader is not None
nonfinite = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(nonfinite)

CASES = [(value, index) for value in nonfinite.VALUES for index in range(6)]


@pytest.mark.parametrize(("value", "index"), CASES)
def test_nothing_is_applied(value: float, index: int) -> None:
    _, make, group = list(nonfinite.cases(value))[index]
    assert nonfinite.fault_of(make, group) == ""


def test_a_clean_group_is_applied_so_the_trial_can_fail() -> None:
    assert "no error" in nonfinite.fault_of(nonfinite.Trainer, nonfinite.make_group())
