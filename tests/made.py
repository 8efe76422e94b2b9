"""Trajectories and groups for tests, made from the few things that matter to the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from longstraw_agents.types import Group, StopReason, Task, Trajectory


def make_trajectory(
    tokens: Sequence[int],
    mask: Sequence[bool] | None = None,
    *,
    name: str = "t",
    reward: float | None = 1.0,
    turn_ends: Sequence[int] | None = None,
    turn_rewards: Sequence[float] | None = None,
    behaviour: float = -1.0,
    stop_reason: StopReason = StopReason.ANSWERED,
    weight: float = 1.0,
) -> Trajectory:
    """Without a mask every token but the first was sampled; without turn ends there is one turn."""
    ids = np.asarray(tokens, dtype=np.int32)
    sampled = np.arange(len(ids)) > 0 if mask is None else np.asarray(mask, dtype=bool)
    ends = (len(ids),) if turn_ends is None else tuple(turn_ends)
    return Trajectory(
        trajectory_id=name,
        tokens=ids,
        action_mask=sampled,
        behaviour=np.where(sampled, behaviour, np.nan).astype(np.float32),
        policy_version=np.where(sampled, 0, -1).astype(np.int32),
        turn_ends=ends,
        turn_rewards=(0.0,) * len(ends) if turn_rewards is None else tuple(turn_rewards),
        reward=reward,
        stop_reason=stop_reason,
        weight=weight,
    )


def make_group(trajectories: Sequence[Trajectory], name: str = "g") -> Group:
    return Group(group_id=name, task=Task("longstraw/Lookup-v0", seed=0), trajectories=tuple(trajectories))


def flat_group(rewards: Sequence[float | None], lengths: Sequence[int] | None = None, name: str = "g", **settings: Any) -> Group:
    """One trajectory per reward: a prompt of two tokens, then `lengths[i]` sampled ones that differ from the others'."""
    lengths = [2] * len(rewards) if lengths is None else lengths
    return make_group(
        [
            make_trajectory(
                [7, 8, *range(10 * i + 10, 10 * i + 10 + n)],
                [False] * 2 + [True] * n,
                name=f"{name}/{i}",
                reward=reward,
                **settings,
            )
            for i, (reward, n) in enumerate(zip(rewards, lengths, strict=True))
        ],
        name,
    )
