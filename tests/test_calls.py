"""The learning experiments' environment: its solver earns everything, nothing else does."""

from __future__ import annotations

import sys
from pathlib import Path

import gymnasium
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.calls import ENV_ID, call_of
from longstraw_agents.envs.lookup import HELDOUT_ITEMS, TRAIN_ITEMS


@pytest.mark.parametrize("questions", [1, 5])
def test_the_solver_answers_every_question(questions: int) -> None:
    env = gymnasium.make(ENV_ID)
    for seed in range(5):
        env.reset(seed=seed, options={"split": "train", "questions": questions})
        actions, total, ended = list(env.unwrapped.solver()), 0.0, False
        assert len(actions) == questions
        for action in actions:
            assert not ended
            _, reward, terminated, truncated, info = env.step(action)
            total, ended = total + reward, terminated or truncated
        assert ended and info["success"] and total == pytest.approx(1.3)


def test_a_wrong_item_earns_the_call_alone_and_chatter_nothing() -> None:
    env = gymnasium.make(ENV_ID)
    for action, reward in ((call_of("nothing of the kind"), 0.3), ("hello", 0.0)):
        env.reset(seed=0, options={"split": "train"})
        assert env.step(action)[1] == pytest.approx(reward)


def test_splits_share_no_item() -> None:
    env = gymnasium.make(ENV_ID)
    asked: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for split, items in asked.items():
        for seed in range(30):
            env.reset(seed=seed, options={"split": split, "questions": 2})
            items.update(env.unwrapped.items)
    assert asked["train"] <= set(TRAIN_ITEMS) and asked["heldout"] <= set(HELDOUT_ITEMS)
