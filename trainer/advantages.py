"""Rewards become one advantage per action token; what cannot be compared is left out before anything is computed.

    left out        a trajectory without a valid reward, without a sampled token, or whose task failed: its siblings stay, and it
                    moves neither their baseline nor their loss
    masked          a trajectory that counts in the baseline but carries no loss (truncated ones, where that is asked for); it
                    adds a zero to the group's mean
    skipped         a whole group: fewer than two episodes remain, or their rewards are equal within the tolerance (its KL
                    term goes with it), or all that is left of it is masked

An episode that became several trajectories counts once: each of them weighs its share of the episode.

`credit.py` says how the rewards of those that are left become advantages. A group all of whose advantages are zero is one of
equal rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from longstraw_agents.errors import NonFiniteError
from longstraw_agents.trainer.credit import CREDITS, AdvantageConfig, Advantages, spread
from longstraw_agents.types import FAILED, Group, StopReason, Trajectory

__all__ = ["AdvantageConfig", "Advantages", "Prepared", "Reason", "prepare"]

#: Stop reasons where the policy was cut short rather than done.
TRUNCATED: frozenset[StopReason] = frozenset({StopReason.TOKEN_LIMIT, StopReason.ACTION_CUT})

_BY_TRAJECTORY = AdvantageConfig()


class Reason(StrEnum):
    """Why a group was skipped, or a trajectory left out or masked."""

    NO_REWARD = "no valid reward"
    NO_ACTION = "no sampled token"
    NO_WEIGHT = "its weight is not above 0"
    TRUNCATED = "truncated, and truncated trajectories are masked"
    ONE_EPISODE = "fewer than two episodes to compare"
    EQUAL_REWARDS = "equal rewards"
    ALL_MASKED = "every trajectory is masked"
    LOW_REWARD = "its reward is below the one that is imitated"
    NOTHING_TO_IMITATE = "no trajectory good enough to imitate"


@dataclass(frozen=True, eq=False)
class Prepared:
    """What is left to train on, and what is not.

    kept: (group without what was left out, per trajectory its advantages over its loss positions, float64). skipped: (group id,
    reason). dropped and masked: (group id, trajectory id, reason).
    """

    kept: list[tuple[Group, list[Advantages]]]
    skipped: list[tuple[str, Reason]]
    dropped: list[tuple[str, str, Reason]]
    masked: list[tuple[str, str, Reason]]


def prepare(groups: Sequence[Group], config: AdvantageConfig = _BY_TRAJECTORY) -> Prepared:
    """Filters the groups and gives each remaining action token its advantage.

    Raises NonFiniteError, naming group and trajectory, for a reward or weight that is NaN or infinite.
    """
    prepared = Prepared([], [], [], [])
    for group in groups:
        _check_finite(group)
        rest = _without_dropped(group, prepared)
        if len(rest) < (1 if config.credit == "chain" else 2):
            prepared.skipped.append((group.group_id, Reason.ONE_EPISODE))
            continue
        by_turn = CREDITS[config.credit](rest, config)
        rest = _masked(rest, group, prepared) if config.mask_truncated else rest
        advantages = [spread(trajectory, of_turns) for trajectory, of_turns in zip(rest, by_turn, strict=True)]
        if not any(of_turns.any() for of_turns in by_turn):
            prepared.skipped.append((group.group_id, Reason.EQUAL_REWARDS))
        elif not any(map(len, advantages)):
            prepared.skipped.append((group.group_id, Reason.ALL_MASKED))
        else:
            prepared.kept.append((replace(group, trajectories=tuple(rest)), advantages))
    return prepared


def _check_finite(group: Group) -> None:
    """The boundary refuses such rewards already; a store from elsewhere may still hold one."""
    for trajectory in group.trajectories:
        for what, value in (("reward", trajectory.reward), ("weight", trajectory.weight)):
            if value is not None and not math.isfinite(value):
                raise NonFiniteError(
                    f"the {what} of group {group.group_id}, trajectory {trajectory.trajectory_id} is {value}; "
                    "record an episode without a valid reward as None"
                )


def _without_dropped(group: Group, prepared: Prepared) -> list[Trajectory]:
    """The trajectories that can be compared; the others are recorded with their reason."""
    rest = []
    for trajectory in group.trajectories:
        reason = None
        if trajectory.reward is None or trajectory.stop_reason in FAILED:
            reason = Reason.NO_REWARD
        elif not trajectory.action_mask.any():
            reason = Reason.NO_ACTION
        elif trajectory.weight <= 0:
            reason = Reason.NO_WEIGHT
        if reason is None:
            rest.append(trajectory)
        else:
            prepared.dropped.append((group.group_id, trajectory.trajectory_id, reason))
    return rest


def _masked(rest: list[Trajectory], group: Group, prepared: Prepared) -> list[Trajectory]:
    """The same trajectories, truncated ones without their action mask; these are recorded."""
    for trajectory in rest:
        if trajectory.stop_reason in TRUNCATED:
            prepared.masked.append((group.group_id, trajectory.trajectory_id, Reason.TRUNCATED))
    return [_without_loss(t) if t.stop_reason in TRUNCATED else t for t in rest]


def _without_loss(trajectory: Trajectory) -> Trajectory:
    """The trajectory as if its environment had written every token."""
    nothing = np.zeros_like(trajectory.action_mask)
    return replace(
        trajectory,
        action_mask=nothing,
        behaviour=np.full_like(trajectory.behaviour, np.nan),
        policy_version=np.full_like(trajectory.policy_version, -1),
    )
