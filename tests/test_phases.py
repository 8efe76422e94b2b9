"""Peaks belong to their phase; times add up; errors pass."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from longstraw_agents.phases import Phases


@pytest.mark.skipif(sys.platform != "linux", reason="peaks can be reset on Linux only")
def test_each_phase_has_its_own_peak() -> None:
    phases = Phases()
    with phases("large"):
        block = np.ones(200 * 2**20, np.uint8)
        del block
    with phases("small"):
        np.ones(2**20, np.uint8)
    large, small = phases.by_name["large"], phases.by_name["small"]
    assert large.peak_mib - small.peak_mib > 150


def test_a_phase_that_runs_again_adds_its_seconds_also_after_an_error() -> None:
    phases = Phases()
    with phases("train"):
        sum(range(100_000))
    once = phases.by_name["train"].seconds
    with pytest.raises(ZeroDivisionError), phases("train"):
        raise ZeroDivisionError
    assert phases.by_name["train"].seconds > once > 0
    assert list(phases.as_dict()) == ["train"] and set(phases.as_dict()["train"]) == {"seconds", "peak_mib"}
