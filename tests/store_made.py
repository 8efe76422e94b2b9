"""What the store's tests write into it."""

from __future__ import annotations

import numpy as np

from longstraw_agents.storage import Store
from longstraw_agents.types import StopReason, Task, Turn

TASK = Task("longstraw/Lookup-v0", 7, "train", {"rows": 3})


def make_turn(seed: int, observation: int = 30, action: int = 10, **rest) -> Turn:
    random = np.random.default_rng(seed)
    ids = random.integers(0, 49152, observation + action).astype(np.int32)
    logp = -random.random(action).astype(np.float32)
    return Turn(ids[:observation], ids[observation:], logp, **{"policy_version": seed % 3, "reward": seed / 7, **rest})


def tokens_of(turns: list[Turn]) -> np.ndarray:
    return np.concatenate([part for turn in turns for part in (turn.observation, turn.action)] or [np.zeros(0, np.int32)])


def begin(store: Store, size: int = 4) -> tuple[str, str]:
    run = store.create_run("run", {"learning_rate": 3e-4})
    return run, store.add_group(run, TASK, size)


def write(store: Store, group: str, member: int, turns: list[Turn], reward: float | None = 1.0) -> str:
    trajectory = store.add_trajectory(group, member)
    for index, turn in enumerate(turns):
        store.append_turn(trajectory, index, turn)
    store.finish_trajectory(trajectory, StopReason.ANSWERED, reward, {})
    return trajectory


def assert_same_turn(left: Turn, right: Turn) -> None:
    for name in ("observation", "action", "behaviour"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
    for name in ("policy_version", "reward", "observation_source"):
        assert getattr(left, name) == getattr(right, name), name
    assert dict(left.reward_parts) == dict(right.reward_parts)
    assert list(left.tool_calls) == list(right.tool_calls)
