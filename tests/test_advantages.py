"""What can be compared gets an advantage; what cannot is left out before anything is computed, with its reason."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import flat_group, make_group, make_trajectory

from longstraw_agents.errors import ConfigError, NonFiniteError
from longstraw_agents.trainer.advantages import AdvantageConfig, Reason, prepare
from longstraw_agents.types import StopReason


def advantages(groups, config=AdvantageConfig()):  # noqa: B008
    return [[a.tolist() for a in of_group] for _, of_group in prepare(groups, config).kept]


def test_mean_and_sample_deviation_over_the_group():
    """Rewards 1, 0, 0, 1: mean 0.5, deviation sqrt(1/3)."""
    a = 0.5 / math.sqrt(1 / 3)
    assert np.allclose(advantages([flat_group([1, 0, 0, 1])])[0], [[a] * 2, [-a] * 2, [-a] * 2, [a] * 2])


def test_mean_only():
    config = AdvantageConfig(divide_by_deviation=False)
    assert np.allclose(advantages([flat_group([3, 0, 0])], config)[0], [[2] * 2, [-1] * 2, [-1] * 2])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_advantages_sum_to_zero_with_deviation_one(rewards):
    for group in advantages([flat_group(rewards)]):
        values = [a[0] for a in group]
        assert abs(sum(values)) < 1e-6 and abs(np.std(values, ddof=1) - 1) < 1e-6


def test_one_advantage_for_each_loss_position():
    two, one = make_trajectory([1, 2, 3, 4], [0, 1, 0, 1], reward=1.0), make_trajectory([1, 2, 5], [0, 0, 1], reward=0.0)
    group = make_group([two, one])
    assert [len(a) for a in advantages([group])[0]] == [2, 1]


@pytest.mark.parametrize(
    "reward, reason", [(None, StopReason.ANSWERED), (5.0, StopReason.ENVIRONMENT_ERROR), (None, StopReason.POLICY_ERROR)]
)
def test_a_missing_reward_moves_no_sibling(reward, reason):
    failed = make_trajectory([7, 8, 99], reward=reward, stop_reason=reason, name="failed")
    siblings = flat_group([1.0, 0.0]).trajectories
    found = prepare([make_group([failed, *siblings])])
    assert found.dropped == [("g", "failed", Reason.NO_REWARD)]
    (group, given_advantages), = found.kept
    assert [t.trajectory_id for t in group.trajectories] == ["g/0", "g/1"]
    assert np.allclose(np.concatenate(given_advantages), np.concatenate(prepare([flat_group([1.0, 0.0])]).kept[0][1]))


def test_an_empty_response_moves_no_sibling():
    empty = make_trajectory([7, 8], [0, 0], reward=-10.0, name="empty")
    found = prepare([make_group([empty, *flat_group([1.0, 0.0]).trajectories])])
    assert found.dropped == [("g", "empty", Reason.NO_ACTION)]
    assert np.allclose(found.kept[0][1][0], 0.5 / math.sqrt(0.5))


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [0.1 + 0.2, 0.3, 0.3], [1e6 + 0.01, 1e6], [0.3333333, 0.33333334]])
def test_equal_rewards_within_rounding_are_skipped(rewards):
    assert prepare([flat_group(rewards)]).skipped == [("g", Reason.EQUAL_REWARDS)]


def test_small_but_real_differences_are_kept():
    assert prepare([flat_group([0.5, 0.5001])]).skipped == []
    assert prepare([flat_group([0.5, 0.5001])], AdvantageConfig(tolerance=1e-3)).skipped == [("g", Reason.EQUAL_REWARDS)]


def test_a_group_of_one_is_skipped_and_the_others_go_on():
    found = prepare([flat_group([1.0], name="one"), flat_group([None, 2.0], name="left"), flat_group([1.0, 0.0], name="two"),
                     flat_group([None, None], name="none"), make_group([], "empty")])  # fmt: skip
    assert [group.group_id for group, _ in found.kept] == ["two"]
    assert found.skipped == [(name, Reason.ONE_EPISODE) for name in ("one", "left", "none", "empty")]


def test_nothing_left_is_no_error():
    found = prepare([flat_group([1.0, 1.0])])
    assert found.kept == [] and found.skipped == [("g", Reason.EQUAL_REWARDS)]


def test_truncated_trajectories_count_in_the_baseline_and_carry_no_loss():
    cut = make_trajectory([7, 8, 99, 98], reward=0.0, stop_reason=StopReason.TOKEN_LIMIT, name="cut")
    group = make_group([cut, *flat_group([1.0, 0.0]).trajectories])
    found = prepare([group], AdvantageConfig(mask_truncated=True))
    (kept, given_advantages), = found.kept
    assert found.masked == [("g", "cut", Reason.TRUNCATED)] and found.dropped == []
    assert not kept.trajectories[0].action_mask.any() and [len(a) for a in given_advantages] == [0, 2, 2]
    assert np.isnan(kept.trajectories[0].behaviour).all()
    assert np.allclose(given_advantages[1], (1 - 1 / 3) / np.std([0, 1, 0], ddof=1))
    assert len(prepare([group]).kept[0][1][0]) == 3, "they carry loss unless it is asked otherwise"


def test_a_group_of_truncated_trajectories_is_skipped():
    cut = [make_trajectory([7, 8, 9 + i], reward=i, stop_reason=StopReason.ACTION_CUT, name=str(i)) for i in range(2)]
    assert prepare([make_group(cut)], AdvantageConfig(mask_truncated=True)).skipped == [("g", Reason.ALL_MASKED)]


def test_a_split_episode_counts_once():
    """Rewards 1 (in two parts), 0, 0: as if the first were whole."""
    whole = advantages([flat_group([1.0, 0.0, 0.0])])[0]
    first, *others = flat_group([1.0, 0.0, 0.0]).trajectories
    parts = [make_trajectory(first.tokens[:3], [0, 0, 1], weight=0.25), make_trajectory(first.tokens, [0, 0, 0, 1], weight=0.75)]
    split = advantages([make_group([*parts, *others])])[0]
    assert np.allclose([split[0][0], split[1][0], split[2][0]], [whole[0][0], whole[0][0], whole[1][0]])


def test_a_weight_that_is_not_above_zero_is_left_out():
    nothing = make_trajectory([1, 2], reward=9.0, weight=0.0, name="none")
    found = prepare([make_group([nothing, *flat_group([1.0, 0.0]).trajectories])])
    assert found.dropped == [("g", "none", Reason.NO_WEIGHT)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_name(value):
    with pytest.raises(NonFiniteError, match="group bad, trajectory bad/1"):
        prepare([flat_group([1.0, 0.0]), flat_group([1.0, value], name="bad")])


@pytest.mark.parametrize(
    "values, what",
    [
        ({"tolerance": -1.0}, "tolerance"),
        ({"tolerance": math.nan}, "tolerance"),
        ({"credit": "step"}, "trajectory, turn, node, chain"),
        ({"credit": "turn", "discount": 0.0}, "discount"),
        ({"credit": "node", "discount": 0.9}, "takes no discount"),
    ],
)
def test_bad_settings_are_refused(values, what):
    with pytest.raises(ConfigError, match=what):
        AdvantageConfig(**values)
