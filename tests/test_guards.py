"""Degenerate behaviour is counted, and guards stop what they are set for."""

from __future__ import annotations

import numpy as np
import pytest
from made import make_group, make_trajectory

from longstraw_agents.errors import ConfigError
from longstraw_agents.guards import Guards, behaviour_report, best, breaches, loops, out_of_patience
from longstraw_agents.types import StopReason


def two_turns(first, second, **settings):
    """A prompt token 7, an action, an observation token 9, an action."""
    tokens = [7, *first, 9, *second]
    mask = [False] + [True] * len(first) + [False] + [True] * len(second)
    return make_trajectory(tokens, mask, turn_ends=(1 + len(first), len(tokens)), **settings)


def test_degenerate_shares():
    long_loop = [4, 5] * 12
    group = make_group(
        [
            two_turns([1, 2], [3, 2], behaviour=-0.5),
            two_turns([1, 2], [3, 2], behaviour=-0.5),
            two_turns([2], long_loop, behaviour=-0.5, stop_reason=StopReason.ACTION_CUT),
            two_turns([5, 6], [5, 6], behaviour=-0.5, stop_reason=StopReason.TOKEN_LIMIT),
        ]
    )
    report = behaviour_report([group])
    assert report["entropy"] == pytest.approx(0.5)
    assert report["degenerate"] == {"empty": 1 / 8, "looping": 1 / 8, "echoed": 1 / 8, "truncated": 0.5, "duplicate": 0.25}


@pytest.mark.parametrize(
    "action, looping",
    [([1, 2, 3] * 10, True), (range(40), False), ([1] * 15, False), ([1] * 16, True), ([*range(20), *range(20)], False)],
)
def test_loops(action, looping):
    assert loops(np.array(action, dtype=np.int32)) == looping


def test_nothing_sampled_is_nothing_wrong():
    report = behaviour_report([])
    assert report["entropy"] == 0.0 and set(report["degenerate"].values()) == {0.0}


RECEIPT = {
    "steps": [{"metrics": {"kl_old": 0.2, "mismatch_kl": 0.03}}],
    "collected": {"entropy": 0.4, "degenerate": {"empty": 0.1, "truncated": 0.6}},
}


@pytest.mark.parametrize(
    "guards, words",
    [
        (Guards(max_kl=0.1), "kl_old is 0.2"),
        (Guards(max_mismatch=0.01), "mismatch_kl is 0.03"),
        (Guards(min_entropy=0.5), "entropy is 0.4"),
        (Guards(max_degenerate=0.5), "60% is truncated"),
    ],
)
def test_each_guard_names_its_breach(guards, words):
    assert len(breaches(RECEIPT, guards)) == 1 and words in breaches(RECEIPT, guards)[0]


def test_what_is_within_its_guard_goes_on():
    assert breaches(RECEIPT, Guards()) == []
    assert breaches(RECEIPT, Guards(max_kl=0.3, max_mismatch=0.1, min_entropy=0.1, max_degenerate=0.7)) == []
    assert breaches(RECEIPT | {"steps": []}, Guards(max_kl=0.1)) == []


def test_kl_to_the_reference_goes_before_kl_within_the_update():
    receipt = RECEIPT | {"steps": [{"metrics": {"kl_old": 0.0, "kl_reference": 0.5}}]}
    assert "kl_reference" in breaches(receipt, Guards(max_kl=0.1))[0]


def test_patience_counts_evaluations_since_the_best():
    assert best([0.1, 0.5, 0.5, 0.2]) == 1
    assert not out_of_patience([0.1, 0.5, 0.4], Guards(patience=2))
    assert out_of_patience([0.1, 0.5, 0.4, 0.5], Guards(patience=2))
    assert not out_of_patience([0.5, 0.1, 0.1, 0.1], Guards())


@pytest.mark.parametrize("settings", [{"max_kl": -1.0}, {"min_entropy": float("nan")}, {"patience": -1}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Guards(**settings)
