"""Success and mean return of a set of tasks, with intervals that know that samples of one task are not independent.

Idea: the task is the unit. Samples of a task are averaged first; intervals come from resampling tasks (percentile bootstrap,
Efron 1979, with a fixed seed), so eight samples of one task never look like eight tasks. Where all tasks agree the bootstrap has
no width; success then takes the Wilson interval (1927) with each task counted once.

Vocabulary
    outcome   of one episode: success or not, and the return; the return is None where the episode failed for reasons
              that are not the policy's: it is counted as failed and left out
    score     of one set of tasks in one mode (greedy or sampled)
    gain      the difference of two scores on the same tasks, paired by task
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from longstraw_agents.errors import GroupError

Interval = tuple[float, float]
RESAMPLES = 4000


@dataclass(frozen=True)
class Outcome:
    """The end of one episode. `reward` is None where none is valid."""

    success: bool
    reward: float | None


@dataclass(frozen=True)
class Score:
    """Success (a fraction) and mean return over tasks, each with its 95 % interval."""

    mode: str
    tasks: int
    episodes: int
    failed: int
    success: float
    success_interval: Interval
    mean_return: float
    return_interval: Interval

    def as_dict(self) -> dict[str, Any]:
        """For JSON and the store."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Score:
        """What `as_dict` gave, also after JSON made lists of its intervals."""
        intervals = {name: tuple(values[name]) for name in ("success_interval", "return_interval")}
        return cls(**{**values, **intervals})

    def __str__(self) -> str:
        low, high = self.success_interval
        return (
            f"{self.mode:<8} success {self.success:6.1%} [{low:.1%}, {high:.1%}]   return {self.mean_return:.3f} "
            f"[{self.return_interval[0]:.3f}, {self.return_interval[1]:.3f}]   {self.episodes} episodes of {self.tasks} tasks"
            + (f", {self.failed} failed" if self.failed else "")
        )


def score(mode: str, outcomes: Sequence[Sequence[Outcome]]) -> Score:
    """The score of one set of tasks; `outcomes` has one sequence of episodes per task.

    Raises `GroupError` where not one episode is valid.
    """
    valid = [[episode for episode in task if episode.reward is not None] for task in outcomes]
    failed = sum(len(task) for task in outcomes) - sum(len(task) for task in valid)
    valid = [task for task in valid if task]
    if not valid:
        raise GroupError(f"none of the {failed} evaluation episodes has a valid reward; look at their stop reasons")
    success = np.array([np.mean([episode.success for episode in task]) for task in valid])
    returns = np.array([np.mean([float(episode.reward or 0.0) for episode in task]) for task in valid])
    agree = success.min() == success.max()
    return Score(
        mode=mode,
        tasks=len(valid),
        episodes=sum(len(task) for task in valid),
        failed=failed,
        success=float(success.mean()),
        success_interval=wilson(float(success.mean()), len(valid)) if agree else bootstrap(success),
        mean_return=float(returns.mean()),
        return_interval=bootstrap(returns),
    )


def gain_points(before: Sequence[Sequence[Outcome]], after: Sequence[Sequence[Outcome]]) -> tuple[float, Interval]:
    """Success after minus before in percentage points, paired by task, with its 95 % interval."""
    if len(before) != len(after):
        raise GroupError(f"{len(before)} tasks before and {len(after)} after: a gain is taken on the same tasks")
    pairs = [
        100.0 * (np.mean([e.success for e in last]) - np.mean([e.success for e in first]))
        for first, last in zip(before, after, strict=True)
        if first and last
    ]
    differences = np.array(pairs)
    return float(differences.mean()), bootstrap(differences)


def bootstrap(values: npt.NDArray[np.float64], seed: int = 0) -> Interval:
    """The 95 % percentile interval of the mean of `values` [N], resampled with a fixed seed."""
    rng = np.random.default_rng(seed)
    means = rng.choice(values, size=(RESAMPLES, len(values))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def wilson(fraction: float, count: int, z: float = 1.96) -> Interval:
    """Wilson's score interval of a fraction seen in `count` trials."""
    centre = (fraction + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(fraction * (1 - fraction) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)
