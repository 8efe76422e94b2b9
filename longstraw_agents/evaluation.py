"""Evaluation on held-out tasks: the same tasks each time, greedily and sampled, stored like any other episode.

Idea: which tasks are asked follows from the evaluation's own seed, never from the run's, so scores before and after, and of two
runs, are of the same tasks. Episodes are collected into the store as groups with purpose "eval", which training never uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longstraw_agents.errors import ConfigError
from longstraw_agents.scores import Outcome
from longstraw_agents.storage import Store
from longstraw_agents.types import FAILED, Task


@dataclass(frozen=True)
class EvaluateSettings:
    """tasks: held-out tasks; samples: episodes of each at the sampling settings of collection (0: none); greedy: one more at
    temperature 0. `options` are added to the tasks' own."""

    tasks: int = 32
    samples: int = 2
    greedy: bool = True
    seed: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tasks < 1 or self.samples < 0 or self.samples == 1:
            raise ConfigError(f"tasks is {self.tasks} and samples {self.samples}; give at least 1 task, and 0, 2 or more samples")
        if not self.samples and not self.greedy:
            raise ConfigError("samples is 0 and greedy is false: nothing would be evaluated; set one of them")

    def modes(self) -> dict[str, int]:
        """Episodes of each task by mode. Greedy groups have one member, so the two are told apart in the store by size."""
        return ({"sampled": self.samples} if self.samples else {}) | ({"greedy": 1} if self.greedy else {})


def task_seed(seed: int, index: int) -> int:
    """The seed of task `index` of a run or an evaluation: 31 bits, spread by numpy's SeedSequence, the same everywhere."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0] >> 1)


def heldout_tasks(settings: EvaluateSettings, env: str, options: Mapping[str, Any]) -> list[Task]:
    """The evaluation's tasks, each with another seed."""
    merged = {**options, **settings.options}
    return [Task(env, task_seed(settings.seed, index), "heldout", merged) for index in range(settings.tasks)]


def outcomes(store: Store, group_ids: Iterable[str | None]) -> list[list[Outcome]]:
    """The ends of the episodes of some groups, one list per group, as `scores.score` takes them."""
    return [[_outcome(row) for row in store.trajectories(group_id)] if group_id else [] for group_id in group_ids]


def _outcome(row: Any) -> Outcome:
    """An episode that failed, or has no reward, is no evidence about the policy."""
    valid = row.stop_reason is not None and row.stop_reason not in FAILED
    return Outcome(bool(row.success), row.reward if valid else None)
