"""Where an episode is forked, so that a group's members part late and share what lies before.

Idea: some members, the trunks, are sampled whole. Each other member is a branch: it takes over a trunk's turns up to a chosen
one, by their rows in the store and the policy's state, and samples from there with seeds of its own.

Vocabulary
    trunk    a member sampled from the beginning
    branch   a member that begins with the first turns of a trunk
    chooser  names the turn before whose action a branch leaves: from the trunk's turns and the branch's number on it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from longstraw_agents.errors import ConfigError
from longstraw_agents.types import Turn

Chooser = Callable[[Sequence[Turn], int], int]


@dataclass(frozen=True)
class TreeConfig:
    """trunks: members sampled whole. by: "entropy" forks at the turns whose actions were the least certain, "budget" at the
    earliest turn from which the trunk sampled at most `budget` tokens more, so that a branch costs about that much."""

    trunks: int = 1
    by: Literal["entropy", "budget"] = "entropy"
    budget: int = 256

    def __post_init__(self) -> None:
        if self.trunks < 1 or self.budget < 1:
            raise ConfigError(f"trunks and budget must be at least 1, got {self.trunks} and {self.budget}")
        if self.by not in ("entropy", "budget"):
            raise ConfigError(f'by must be "entropy" or "budget", got {self.by!r}; pass a function of your own as `fork`')

    def chooser(self) -> Chooser:
        """The function that `by` names."""
        return least_certain if self.by == "entropy" else lambda turns, number: within_budget(turns, self.budget)


def least_certain(turns: Sequence[Turn], number: int) -> int:
    """The turn with the highest mean surprisal of its sampled tokens (an estimate of the entropy there); branch `number` takes
    the next in that order, beginning again at its end."""
    surprisal = [-float(np.mean(turn.behaviour)) for turn in turns]
    return int(np.argsort(surprisal, kind="stable")[::-1][number % len(turns)])


def within_budget(turns: Sequence[Turn], budget: int) -> int:
    """The earliest turn from which on at most `budget` tokens were sampled; the last turn where even it has more."""
    left = np.cumsum([len(turn.action) for turn in turns][::-1])[::-1]
    fitting = np.flatnonzero(left <= budget)
    return int(fitting[0]) if len(fitting) else len(turns) - 1
