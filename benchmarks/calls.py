"""longstraw-bench/Calls-v0: questions, each to be answered by the right tool call. The task of `learning.py`.

With one question it is what any trainer collects alike: a prompt, a completion, a reward. With more, all reward comes at the end,
so that credit is what is learned by.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np

from longstraw_agents.envs.lookup import HELDOUT_ITEMS, TRAIN_ITEMS, LookupEnv
from longstraw_agents.envs.rewards import Episode, Grade, RewardPart
from longstraw_agents.envs.tools import tool

ENV_ID = "longstraw-bench/Calls-v0"


def call_of(item: str) -> str:
    """The text of a call."""
    return f'stock("{item}")'


class CallsEnv(LookupEnv):
    """At the end 0.3 times the share of actions that were calls, and the share of questions that were answered by the right one.
    """

    option_defaults: ClassVar[Mapping[str, Any]] = {"tool_results": "real", "questions": 1}
    reward_parts: ClassVar[tuple[RewardPart, ...]] = (RewardPart("call", weight=0.3), RewardPart("item", weight=1.0))

    def new_task(self, rng: np.random.Generator, split: str) -> str:
        """One task from the random numbers of its seed."""
        question = super().new_task(rng, split)
        known = TRAIN_ITEMS if split == "train" else HELDOUT_ITEMS
        drawn, self.items = self.item, [str(item) for item in rng.choice(known, size=self.options["questions"])]
        self.options = {**self.options, "max_turns": self.options["questions"]}
        self.right, self.item = 0, self.items[0]
        return question.replace(drawn, self.item)

    @tool
    def stock(self, item: str) -> str:
        """How many pieces of an item are in stock.

        Args:
            item: the item's name
        """
        self.right += item == self.item
        asked = len(self.episode.actions)
        if asked >= len(self.items):
            return "done"
        self.item = self.items[asked]
        return f'Repeat this, but replace egg with {self.item}:\nstock("egg")'

    def solver(self) -> Generator[str, str, None]:
        """Actions that earn everything."""
        for item in self.items:
            yield call_of(item)

    def grade_turn(self, episode: Episode) -> Mapping[str, float]:
        """Parts of the reward that a turn earned."""
        return {}

    def grade(self, episode: Episode) -> Grade:
        """The outcome and the parts of the reward, at the end."""
        calls = sum(any(call.name == "stock" for call in of_turn) for of_turn in episode.calls)
        parts = {"call": calls / len(self.items), "item": min(self.right, len(self.items)) / len(self.items)}
        return Grade(self.right >= len(self.items), parts)


if ENV_ID not in gymnasium.registry:
    gymnasium.register(ENV_ID, entry_point=CallsEnv, disable_env_checker=True)
