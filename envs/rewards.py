"""Rewards in named parts, checked where they enter.

Idea: a reward is a weighted sum of parts, each a number within stated bounds. Whatever is not finite or not within its bounds
is refused here, so that no broken scorer reaches a baseline or a loss.

Vocabulary
    part     one named component: weight, bounds, and, where it is not the environment's own, a function of the episode
    episode  what has happened so far: the task, the environment's messages, the actions, their calls, the answer
    grade    an environment's verdict at the end: success, and the raw values of its parts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from longstraw_agents.errors import ConfigError, EnvironmentFault
from longstraw_agents.types import Message, StopReason, Task, ToolCall


@dataclass
class Episode:
    """What has happened so far. `calls` holds one tuple per action; `messages` are the environment's only."""

    task: Task
    messages: list[Message] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    calls: list[tuple[ToolCall, ...]] = field(default_factory=list)
    answer: str | None = None
    stop_reason: StopReason | None = None


@dataclass(frozen=True)
class Grade:
    """Success and the raw (unweighted) values of the parts that are given at the end."""

    success: bool
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardPart:
    """One named component of the reward: `weight` times a value within [low, high].

    With a `function`, the value is what it returns for the episode, after every turn or at the end (`when`).
    """

    name: str
    weight: float = 1.0
    low: float = 0.0
    high: float = 1.0
    when: Literal["turn", "end"] = "end"
    function: Callable[[Episode], float] | None = None

    def __post_init__(self) -> None:
        if not all(math.isfinite(number) for number in (self.weight, self.low, self.high)) or self.low > self.high:
            raise ConfigError(f"reward part {self.name}: weight {self.weight}, bounds [{self.low}, {self.high}] must be finite")
        if not all(math.isfinite(self.weight * bound) for bound in (self.low, self.high)):
            raise ConfigError(f"reward part {self.name}: weight {self.weight} times a bound is not finite; take smaller numbers")
        if self.when not in ("turn", "end"):
            raise ConfigError(f"reward part {self.name}: when is {self.when!r}; choose turn or end")


def weigh(declared: Iterable[RewardPart], values: Mapping[str, float]) -> dict[str, float]:
    """Each part's contribution, weight times value. Raises EnvironmentFault for an undeclared, non-finite or unbounded part."""
    parts = {part.name: part for part in declared}
    weighed: dict[str, float] = {}
    for name, value in values.items():
        if name not in parts:
            raise EnvironmentFault(f"reward part {name!r} was not declared; declared are {', '.join(parts) or 'none'}")
        part = parts[name]
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or not part.low <= number <= part.high:
            shown = repr(value)[:80]
            raise EnvironmentFault(
                f"reward part {name!r} is {shown}, which is not a finite number within [{part.low}, {part.high}]"
            )
        weighed[name] = part.weight * number
    return weighed
