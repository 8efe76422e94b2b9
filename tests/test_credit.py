"""Credit by hand-computed numbers; on a flat group every kind is plain GRPO."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import make_group, make_trajectory

from longstraw_agents.errors import TokenError
from longstraw_agents.trainer.advantages import AdvantageConfig, Reason, prepare
from longstraw_agents.trainer.credit import CREDITS, per_token, spans


def episode(actions, rewards=None, *, reward=None, **settings):
    """A prompt token, then turns of one observation token 9 (none at first) and one action token."""
    tokens, mask, ends = [7], [False], []
    for turn, action in enumerate(actions):
        tokens += ([9] if turn else []) + [action]
        mask += ([False] if turn else []) + [True]
        ends.append(len(tokens))
    rewards = [0.0] * len(actions) if rewards is None else rewards
    total = sum(rewards) if reward is None else reward
    return make_trajectory(tokens, mask, turn_ends=ends, turn_rewards=rewards, reward=total, **settings)


def by_turn(episodes, **settings):
    """The advantage of each turn's single action token, per trajectory."""
    (group, advantages), = prepare([make_group(episodes)], AdvantageConfig(**settings)).kept
    assert len(group.trajectories) == len(episodes)
    return [a.tolist() for a in advantages]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.lists(st.integers(1, 5), min_size=2, max_size=6), st.sampled_from(sorted(CREDITS)), st.booleans())
def test_a_flat_group_is_plain_grpo(data, turns, credit, divide):
    """Nothing shared but the prompt, one reward at the end, no discount."""
    rewards = data.draw(st.lists(st.floats(-5, 5), min_size=len(turns), max_size=len(turns)))
    if max(rewards) - min(rewards) < 1e-3:
        return
    actions = [[10 * i + 20 + turn for turn in range(n)] for i, n in enumerate(turns)]
    episodes = [episode(taken, reward=reward) for taken, reward in zip(actions, rewards, strict=True)]
    values = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) if divide else 1)
    found = by_turn(episodes, credit=credit, divide_by_deviation=divide)
    assert all(np.allclose(of_turns, np.full(n, a)) for of_turns, n, a in zip(found, turns, values, strict=True))


def test_turns_are_compared_by_the_returns_from_them_on():
    """Both episodes total 1: equal by trajectory, but the second earned it at its second turn."""
    episodes = [episode([1, 2], [1.0, 0.0]), episode([3, 4], [0.0, 1.0])]
    assert prepare([make_group(episodes)]).skipped == [("g", Reason.EQUAL_REWARDS)]
    assert np.allclose(by_turn(episodes, credit="turn"), [[0, -math.sqrt(0.5)], [0, math.sqrt(0.5)]])
    discounted = by_turn(episodes, credit="turn", discount=0.5, divide_by_deviation=False)
    assert np.allclose(discounted, [[0.25, -0.5], [-0.25, 0.5]])


def test_an_ended_episode_is_compared_by_its_last_turn():
    episodes = [episode([1], [3.0]), episode([2, 3], [1.0, 1.0])]
    assert by_turn(episodes, credit="turn", divide_by_deviation=False) == [[0.5], [-0.5, -1.0]]


def test_what_the_total_has_beyond_its_turns_counts_with_the_last():
    episodes = [episode([1, 2], [1.0, 0.0], reward=5.0), episode([3, 4], [0.0, 0.0], reward=0.0)]
    assert by_turn(episodes, credit="turn", divide_by_deviation=False) == [[2.5, 2.0], [-2.5, -2.0]]


def test_an_action_right_behind_another_belongs_to_its_own_turn():
    """No observation between them: position 2 is the second turn's."""
    one = make_trajectory([7, 1, 2], turn_ends=(2, 3), turn_rewards=(1.0, 0.0), reward=1.0)
    two = make_trajectory([7, 3, 4], turn_ends=(2, 3), turn_rewards=(0.0, 3.0), reward=3.0)
    assert by_turn([one, two], credit="turn", divide_by_deviation=False) == [[-1.0, -1.5], [1.0, 1.5]]


def test_siblings_are_compared_at_the_fork_above_them():
    """Two first actions; the first of them forks again. Values: root 1/3, first action 1/2, second 0."""
    episodes = [episode([1, 2], reward=1.0), episode([1, 3], reward=0.0), episode([4, 5], reward=0.0)]
    found = by_turn(episodes, credit="node", divide_by_deviation=False)
    assert np.allclose(found, [[1 / 6, 1 / 2], [1 / 6, -1 / 2], [-1 / 3, -1 / 3]])
    divided = by_turn(episodes, credit="node")
    assert np.allclose(np.array(divided) * np.std([1, 0, 0], ddof=1), found)


def test_turns_without_a_fork_keep_the_value_of_their_branch():
    episodes = [episode([1, 2, 3, 4], reward=1.0), episode([1, 2, 5, 6], reward=0.0)]
    assert by_turn(episodes, credit="node", divide_by_deviation=False) == [[0, 0, 0.5, 0.5], [0, 0, -0.5, -0.5]]


def test_equal_tokens_are_one_node_only_where_turns_end_alike():
    """Same ids, but the first episode's turn ends earlier: no common turn, so no fork below the root."""
    one = make_trajectory([7, 1, 2, 3], turn_ends=(2, 4), turn_rewards=(0.0, 0.0), reward=1.0)
    two = make_trajectory([7, 1, 2, 4], turn_ends=(3, 4), turn_rewards=(0.0, 0.0), reward=0.0)
    assert by_turn([one, two], credit="node", divide_by_deviation=False) == [[0.5] * 3, [-0.5] * 3]


def test_a_chain_has_a_running_baseline():
    """Rewards 0, 1, 0, 1: returns 2, 2, 1, 1; means before each turn -, 0, 1/2, 1/3, over 3, 2 and 1 turns left."""
    chain = [episode([1, 2, 3, 4], [0.0, 1.0, 0.0, 1.0])]
    assert np.allclose(by_turn(chain, credit="chain", divide_by_deviation=False), [[0, 2, 0, 2 / 3]])
    scale = math.sqrt((4 + 0 + 4 / 9) / 3)
    assert np.allclose(by_turn(chain, credit="chain"), [[0, 2 / scale, 0, 2 / 3 / scale]])
    halved = by_turn(chain, credit="chain", discount=0.5, divide_by_deviation=False)
    assert np.allclose(halved, [[0, 1.25 - 0, 0.5 - 0.5 * 1.5, 1 - 1 / 3]])


def test_the_baseline_of_a_chain_knows_nothing_of_later_rewards():
    """A turn's advantage moves with a later reward exactly as its return does."""
    plain, later = (episode([1, 2, 3, 4], rewards) for rewards in ([1.0, 0.0, 2.0, 0.0], [1.0, 0.0, 2.0, 7.0]))
    first = by_turn([plain], credit="chain", divide_by_deviation=False)
    second = by_turn([later], credit="chain", divide_by_deviation=False)
    assert np.allclose(np.subtract(second, first), [[0, 7, 7, 7]])


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0, 0.0], [1.0]])
def test_a_chain_of_equal_rewards_is_skipped(rewards):
    chain = [episode(range(1, len(rewards) + 1), rewards)]
    assert prepare([make_group(chain)], AdvantageConfig(credit="chain")).skipped == [("g", Reason.EQUAL_REWARDS)]


def test_a_group_of_one_trains_only_as_a_chain():
    chain = make_group([episode([1, 2, 3], [0.0, 1.0, 0.0])])
    assert len(prepare([chain], AdvantageConfig(credit="chain")).kept) == 1
    for credit in ("trajectory", "turn", "node"):
        assert prepare([chain], AdvantageConfig(credit=credit)).skipped == [("g", Reason.ONE_EPISODE)]


def test_turn_rewards_that_do_not_fit_are_refused_by_name():
    broken = episode([1, 2], [1.0, 0.0], name="broken")
    object.__setattr__(broken, "turn_rewards", (1.0,))
    with pytest.raises(TokenError, match="broken"):
        prepare([make_group([broken, episode([3, 4])])], AdvantageConfig(credit="turn"))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 12))
def test_recorded_spans_give_each_token_its_advantage(data, length):
    mask = np.array([False, *data.draw(st.lists(st.booleans(), min_size=length, max_size=length))])
    trajectory = make_trajectory(range(length + 1), mask)
    count = int(mask.sum())
    advantages = np.array(data.draw(st.lists(st.sampled_from([0.5, -0.5]), min_size=count, max_size=count)), dtype=float)
    recorded = spans(trajectory, advantages)
    found = per_token(recorded, length + 1)
    assert np.array_equal(np.isnan(found), ~mask) and np.array_equal(found[mask], advantages)
    for (_, stop, left), (start, _, right) in zip(recorded, recorded[1:], strict=False):
        assert stop <= start and (stop < start or left != right)
