"""Rewards become one advantage per action token; what cannot be compared is left out before anything is computed.

    left out        a trajectory without a valid reward, without a sampled token, or whose task failed: its siblings stay, and it
                    moves neither their baseline nor their loss
    masked          a trajectory that counts in the baseline but carries no loss (truncated ones, where that is asked for); it
                    adds a zero to the group's mean
    skipped         a whole group: fewer than two episodes remain, or their rewards are equal within the tolerance. Its KL term
                    goes with it

An episode that became several trajectories counts once: each of them weighs its share of the episode.

Advantage of trajectory i: (R_i - mean R) / deviation of R, over the group, the deviation with n - 1 (arXiv:2402.03300); without
the division for Dr. GRPO (arXiv:2503.20783). It stands at each of the
trajectory's action tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from longstraw_agents.errors import ConfigError, NonFiniteError
from longstraw_agents.types import FAILED, Group, StopReason, Trajectory

Advantages = npt.NDArray[np.float64]

#: Stop reasons where the policy was cut short rather than done.
TRUNCATED: frozenset[StopReason] = frozenset({StopReason.TOKEN_LIMIT, StopReason.ACTION_CUT})


class Reason(StrEnum):
    """Why a group was skipped, or a trajectory left out or masked."""

    NO_REWARD = "no valid reward"
    NO_ACTION = "no sampled token"
    NO_WEIGHT = "its weight is not above 0"
    TRUNCATED = "truncated, and truncated trajectories are masked"
    ONE_EPISODE = "fewer than two episodes to compare"
    EQUAL_REWARDS = "equal rewards"
    ALL_MASKED = "every trajectory is masked"


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards are compared.

    divide_by_deviation: False for Dr. GRPO. tolerance: rewards whose range is at most this, relative to the largest (or to 1
    where all are smaller), count as equal. mask_truncated: trajectories that a length limit cut carry no loss.
    """

    divide_by_deviation: bool = True
    tolerance: float = 1e-6
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tolerance) and self.tolerance >= 0):
            raise ConfigError(f"advantage tolerance must be a finite number of at least 0, got {self.tolerance!r}")


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


def prepare(groups: Sequence[Group], config: AdvantageConfig = AdvantageConfig()) -> Prepared:
    """Filters the groups and gives each remaining action token its advantage.

    Raises NonFiniteError, naming group and trajectory, for a reward or weight that is NaN or infinite.
    """
    prepared = Prepared([], [], [], [])
    for group in groups:
        _check_finite(group)
        rest = _without_dropped(group, prepared)
        reason = _reason_to_skip(rest, config)
        if reason is None:
            advantages = _trajectory_advantages(rest, config)
            rest = _masked(rest, group, prepared) if config.mask_truncated else rest
            if not any(t.action_mask.any() for t in rest):
                reason = Reason.ALL_MASKED
        if reason is not None:
            prepared.skipped.append((group.group_id, reason))
            continue
        spread = [np.full(int(t.action_mask.sum()), a) for t, a in zip(rest, advantages, strict=True)]
        prepared.kept.append((replace(group, trajectories=tuple(rest)), spread))
    return prepared


def episode_baseline(values: npt.ArrayLike, weights: npt.ArrayLike) -> tuple[float, float]:
    """Mean and sample deviation (n - 1) of values [M] over n episodes, where a trajectory is `weights` [M] of an episode.

    n is the sum of the weights, taken as 2 where fewer are left of episodes that lost a part.
    """
    values, weights = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    mean = float(np.average(values, weights=weights))
    episodes = max(float(weights.sum()), 2.0)
    return mean, math.sqrt(float(np.average((values - mean) ** 2, weights=weights)) * episodes / (episodes - 1.0))


def equal_within(values: npt.ArrayLike, tolerance: float) -> bool:
    """Whether the range of values is at most `tolerance` of the largest magnitude, or of 1 where that is smaller."""
    values = np.asarray(values, dtype=np.float64)
    return bool(np.ptp(values) <= tolerance * max(1.0, float(np.abs(values).max())))


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


def _reason_to_skip(rest: list[Trajectory], config: AdvantageConfig) -> Reason | None:
    """Why a group has no gradient, or None."""
    if len(rest) < 2:
        return Reason.ONE_EPISODE
    return Reason.EQUAL_REWARDS if equal_within([_reward(t) for t in rest], config.tolerance) else None


def _trajectory_advantages(rest: list[Trajectory], config: AdvantageConfig) -> list[float]:
    """One advantage per trajectory."""
    rewards = [_reward(t) for t in rest]
    mean, deviation = episode_baseline(rewards, [t.weight for t in rest])
    return [(reward - mean) / (deviation if config.divide_by_deviation else 1.0) for reward in rewards]


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


def _reward(trajectory: Trajectory) -> float:
    """A reward that `_without_dropped` has seen to be there."""
    assert trajectory.reward is not None
    return trajectory.reward
