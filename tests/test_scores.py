"""Intervals by hand-computed numbers and by coverage; failed episodes; pairing by task."""

from __future__ import annotations

import numpy as np
import pytest

from longstraw_agents.errors import GroupError
from longstraw_agents.scores import Outcome, bootstrap, gain_points, score, wilson


def test_wilson_by_the_published_example() -> None:
    # Newcombe (1998), table I: 81 of 263 gives 0.2553 to 0.3662; 0 of 20 gives 0 to 0.1611.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_tasks_are_the_unit_not_samples() -> None:
    """Two tasks, a hundred samples each: the interval is as wide as two tasks make it."""
    outcomes = [[Outcome(True, 1.0)] * 100, [Outcome(False, 0.0)] * 100]
    result = score("sampled", outcomes)
    assert (result.success, result.mean_return, result.tasks, result.episodes) == (0.5, 0.5, 2, 200)
    assert result.success_interval == (0.0, 1.0)


def test_all_alike_still_has_width() -> None:
    result = score("greedy", [[Outcome(True, 1.0)]] * 20)
    assert result.success == 1.0
    assert result.success_interval[0] == pytest.approx(1 - 0.1611, abs=1e-3)


def test_failed_episodes_are_counted_and_left_out() -> None:
    result = score("sampled", [[Outcome(True, 1.0), Outcome(False, None)], [Outcome(False, None)]])
    assert (result.success, result.tasks, result.episodes, result.failed) == (1.0, 1, 1, 2)
    with pytest.raises(GroupError, match="none of the 1"):
        score("sampled", [[Outcome(False, None)]])


def test_the_bootstrap_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        low, high = bootstrap(rng.normal(0.3, 1.0, size=40), seed=trial)
        hits += low <= 0.3 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_gain_is_paired_by_task() -> None:
    easy, hard = [Outcome(True, 1.0)] * 4, [Outcome(False, 0.0)] * 4
    points, (low, high) = gain_points([easy, hard, hard, hard], [easy, easy, easy, hard])
    assert points == 50.0
    assert 0.0 <= low < 50.0 < high <= 100.0
    with pytest.raises(GroupError, match="same tasks"):
        gain_points([easy], [easy, hard])
