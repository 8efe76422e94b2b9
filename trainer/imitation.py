"""Imitation in place of comparison: every trajectory that is good enough gets the same constant coefficient.

With `LossConfig("supervised")` the loss is the mean of -log p over all action tokens of the update (maximum likelihood, behaviour
cloning), so c_t = -1 / N whatever the log-probabilities are. Groups of one are as good as any, and rewards only filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from longstraw_agents.trainer.advantages import Prepared, Reason
from longstraw_agents.types import FAILED, Group


def imitate(groups: Sequence[Group], minimum_reward: float | None = None) -> Prepared:
    """Keeps each trajectory that did not fail, has an action and, where asked for, a reward of at least `minimum_reward`.

    Use it as a Trainer's `credit`. What is left out is recorded with its reason; a group of which nothing is left is skipped.
    """
    prepared = Prepared([], [], [], [])
    for group in groups:
        kept = []
        for trajectory in group.trajectories:
            reason = None
            if trajectory.stop_reason in FAILED:
                reason = Reason.NO_REWARD
            elif not trajectory.action_mask.any():
                reason = Reason.NO_ACTION
            elif minimum_reward is not None and (trajectory.reward is None or not trajectory.reward >= minimum_reward):
                reason = Reason.LOW_REWARD
            if reason is None:
                kept.append(trajectory)
            else:
                prepared.dropped.append((group.group_id, trajectory.trajectory_id, reason))
        if kept:
            ones = [np.ones(int(trajectory.action_mask.sum())) for trajectory in kept]
            prepared.kept.append((replace(group, trajectories=tuple(kept)), ones))
        else:
            prepared.skipped.append((group.group_id, Reason.NOTHING_TO_IMITATE))
    return prepared
