"""Lookup-v0 and the life of an episode, through gymnasium's interface."""

import re

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import longstraw_agents.envs  # noqa: F401  (registers)
from longstraw_agents.envs.lookup import HELDOUT_ITEMS, TRAIN_ITEMS
from longstraw_agents.errors import ConfigError, EnvironmentFault
from longstraw_agents.types import Message, StopReason


def play(env, actions, **reset):
    """Outcomes of the actions, and the summed reward."""
    observation, info = env.reset(**reset)
    outcomes = []
    for action in actions:
        outcomes.append(env.step(action))
        if outcomes[-1][2] or outcomes[-1][3]:
            break
    return outcomes, sum(outcome[1] for outcome in outcomes)


def solve(env, **reset):
    observation, info = env.reset(**reset)
    solver = env.unwrapped.solver()
    action, total = next(solver), 0.0
    for _ in range(100):
        observation, reward, terminated, truncated, info = env.step(action)
        total += reward
        if terminated or truncated:
            return total, info
        action = solver.send(observation)
    raise AssertionError("the solver did not end the episode")


@pytest.fixture
def env():
    return gymnasium.make("longstraw/Lookup-v0")


def test_gymnasium_accepts_it(env):
    check_env(env.unwrapped)


def test_the_solver_takes_two_steps_and_earns_everything(env):
    for seed in range(50):
        for split in ("train", "heldout"):
            total, info = solve(env, seed=seed, options={"split": split})
            assert info["success"] and info["stop_reason"] is StopReason.ANSWERED
            assert total == pytest.approx(1.4)
            assert len(env.unwrapped.episode.actions) == 2


def test_random_results_defeat_the_solver(env):
    wins = sum(solve(env, seed=seed, options={"tool_results": "random"})[1]["success"] for seed in range(300))
    assert wins <= 15  # chance is 1 in 90; five percent of 300


def test_a_guess_is_not_a_success_even_when_it_is_right(env):
    env.reset(seed=3)
    *_, info = env.step(str(env.unwrapped.count))
    assert info["success"] is False and info["reward_parts"]["answer"] == 0


def test_an_answer_beside_a_call_does_not_count(env):
    env.reset(seed=3)
    item, count = env.unwrapped.item, env.unwrapped.count
    observation, reward, terminated, truncated, info = env.step(f'stock("{item}")\n<answer>{count}</answer>')
    assert not terminated and reward == pytest.approx(0.4)
    assert "not taken" in observation


def test_splits_share_no_item(env):
    assert not set(TRAIN_ITEMS) & set(HELDOUT_ITEMS)
    seen = {"train": set(), "heldout": set()}
    for split, items in seen.items():
        for seed in range(200):
            observation, _ = env.reset(seed=seed, options={"split": split})
            items.add(re.search(r"egg with (\w+)", observation)[1])
    assert len(seen["train"]) > 30 and len(seen["heldout"]) > 20 and not seen["train"] & seen["heldout"]


def test_the_same_seed_is_the_same_task(env):
    first, info = env.reset(seed=11)
    count = env.unwrapped.count
    again, info_again = gymnasium.make("longstraw/Lookup-v0").reset(seed=11)
    assert first == again and info["task"] == info_again["task"]
    env.reset(seed=12)
    env.reset(seed=11)
    assert env.unwrapped.count == count


def test_messages_are_structured_and_the_observation_joins_them(env):
    observation, info = env.reset(seed=1)
    assert [message.role for message in info["messages"]] == ["system", "user"]
    assert observation == "\n".join(message.content for message in info["messages"])
    observation, *_, info = env.step(f'stock("{env.unwrapped.item}")')
    assert info["messages"] == [Message("tool", observation)] and observation == f"Repeat this:\n{env.unwrapped.count}"
    assert info["tool_calls"][0].result == observation


def test_shaping_is_paid_once(env):
    env.reset(seed=5)
    call = f'stock("{env.unwrapped.item}")'
    assert env.step('stock("nothing")')[1] == pytest.approx(0.1)
    assert env.step(call)[1] == pytest.approx(0.3)
    assert env.step(call)[1] == pytest.approx(0.0)


def test_turns_run_out(env):
    outcomes, _ = play(env, ['stock("nothing")'] * 9, seed=1)
    assert len(outcomes) == 3
    observation, _, terminated, truncated, info = outcomes[-1]
    assert truncated and not terminated and info["stop_reason"] is StopReason.TURN_LIMIT and "no item" in observation


def test_tokens_run_out_and_no_tool_runs_then():
    env = gymnasium.make("longstraw/Lookup-v0", max_tokens=400)
    env.reset(seed=1)
    _, reward, terminated, truncated, info = env.step(f'stock("{env.unwrapped.item}")' + " " * 400)
    assert truncated and reward == 0 and info["stop_reason"] is StopReason.TOKEN_LIMIT and info["tool_calls"] == []


def test_after_the_end_a_step_is_refused(env):
    play(env, ["42"], seed=1)
    with pytest.raises(EnvironmentFault, match="call reset"):
        env.step("42")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"splitt": "train"}, "did you mean 'split'"),
        ({"split": "test"}, "train or heldout"),
        ({"max_turns": 0}, "at least 1"),
        ({"tool_results": "shuffled"}, "real or random"),
    ],
)
def test_options_are_checked(env, options, message):
    with pytest.raises(ConfigError, match=message):
        env.reset(seed=1, options=options)
