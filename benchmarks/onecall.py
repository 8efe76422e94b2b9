"""longstraw-bench/OneCall-v0: one question, one action, which must be the right tool call. The short task of `learning.py trl`.

One turn, because that is what both trainers collect alike: a prompt, a completion, a reward.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np

from longstraw_agents.envs.lookup import TRAIN_ITEMS, LookupEnv
from longstraw_agents.envs.rewards import Episode, Grade, RewardPart

ENV_ID = "longstraw-bench/OneCall-v0"


def call_of(item: str) -> str:
    """The text of a call."""
    return f'stock("{item}")'


class OneCallEnv(LookupEnv):
    """0.3 for a call of the tool, 1 more for the right item. With the option `items` above 0 both splits ask for the first few
    items only, so that a tiny model has nothing to generalise to but the question."""

    option_defaults: ClassVar[Mapping[str, Any]] = {"tool_results": "real", "items": 0}
    reward_parts: ClassVar[tuple[RewardPart, ...]] = (RewardPart("call", weight=0.3), RewardPart("item", weight=1.0))
    max_turns: ClassVar[int] = 1

    def new_task(self, rng: np.random.Generator, split: str) -> str:
        question = super().new_task(rng, split)
        if not self.options["items"]:
            return question
        drawn, self.item = self.item, TRAIN_ITEMS[int(rng.integers(self.options["items"]))]
        return question.replace(drawn, self.item)

    def solver(self) -> Generator[str, str, None]:
        yield call_of(self.item)

    def grade_turn(self, episode: Episode) -> Mapping[str, float]:
        return {"call": float(any(call.name == "stock" for call in episode.calls[-1]))}

    def grade(self, episode: Episode) -> Grade:
        right = any(call.name == "stock" and call.error is None for calls in episode.calls for call in calls)
        return Grade(right, {"item": float(right)})


if ENV_ID not in gymnasium.registry:
    gymnasium.register(ENV_ID, entry_point=OneCallEnv, disable_env_checker=True)
