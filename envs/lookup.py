"""longstraw/Lookup-v0: ask a tool for a number, then answer with it. Two steps at best; small enough for a demo on a CPU.

Each task asks for the stock of one item. The number is drawn anew for every task, so it can only be had from the tool, and
only by asking for the right item. Items of the held-out split never occur in training. With the option
`tool_results="random"` the tool returns a number that has nothing to do with the task: a control, under which success
falls to chance (1 in 90).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, ClassVar

import numpy as np

from longstraw_agents.envs.rewards import Episode, Grade, RewardPart
from longstraw_agents.envs.tool_env import ToolEnv
from longstraw_agents.envs.tools import tool
from longstraw_agents.errors import ConfigError, ToolFault

TRAIN_ITEMS = (
    "apple", "pear", "plum", "peach", "grape", "lemon", "melon", "onion", "carrot", "tomato", "potato", "pepper", "bread",
    "butter", "cheese", "sugar", "salt", "rice", "bean", "corn", "milk", "juice", "coffee", "honey", "shirt", "coat",
    "shoe", "hat", "belt", "scarf", "chair", "table", "lamp", "clock", "mirror", "candle", "pencil", "paper", "brush",
    "bottle",
)
HELDOUT_ITEMS = (
    "cherry", "orange", "banana", "garlic", "spinach", "flour", "tea", "soap", "glove", "sock", "jacket", "bed", "desk",
    "sofa", "spoon", "knife", "plate", "towel", "rope", "ladder",
)

LOWEST, HIGHEST = 10, 99


class LookupEnv(ToolEnv):
    """One question, one tool, one number."""

    option_defaults: ClassVar[Mapping[str, Any]] = {"tool_results": "real"}
    reward_parts: ClassVar[tuple[RewardPart, ...]] = (
        RewardPart("call", weight=0.3),  # once: the first well-formed call for the right item
        RewardPart("answer", weight=1.0),
    )
    max_turns: ClassVar[int] = 3

    def new_task(self, rng: np.random.Generator, split: str) -> str:
        if self.options["tool_results"] not in ("real", "random"):
            raise ConfigError(f"tool_results is {self.options['tool_results']!r}; choose real or random")
        self.item = str(rng.choice(TRAIN_ITEMS if split == "train" else HELDOUT_ITEMS))
        self.count = int(rng.integers(LOWEST, HIGHEST + 1))
        self._noise = np.random.default_rng(rng.integers(2**63))
        return f"How many of the item {self.item} are in stock?"

    def system_message(self) -> str:
        return (
            "You answer questions about stock. First call the tool, then answer with the number it returns.\n"
            'Call: <tool_call>{"name": "stock", "arguments": {"item": "egg"}}</tool_call>\n'
            "Answer: <answer>57</answer>"
        )

    @tool
    def stock(self, item: str) -> int:
        """How many pieces of an item are in stock.

        Args:
            item: the item's name, as in the question
        """
        if item.strip().lower() != self.item:
            raise ToolFault(f"no item {item[:32]!r}. Ask for the item of the question.")
        if self.options["tool_results"] == "random":
            return int(self._noise.integers(LOWEST, HIGHEST + 1))
        return self.count

    def grade_turn(self, episode: Episode) -> Mapping[str, float]:
        found = [any(call.name == "stock" and call.error is None for call in calls) for calls in episode.calls]
        return {"call": float(found[-1] and not any(found[:-1]))}

    def grade(self, episode: Episode) -> Grade:
        looked_up = any(call.error is None for calls in episode.calls for call in calls)
        right = looked_up and episode.answer == str(self.count)
        return Grade(right, {"answer": float(right)})

    def solver(self) -> Generator[str, str, None]:
        seen = yield f'<tool_call>{{"name": "stock", "arguments": {{"item": "{self.item}"}}}}</tool_call>'
        yield f"<answer>{seen.strip()}</answer>"
