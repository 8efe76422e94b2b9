"""longstraw/Lookup-v0: ask a tool for a number, then answer with it. Two steps at best; small enough for a demo on a CPU.

Each task names one item. Its number is drawn anew for every task, so it can only be had from the tool, and only by asking for
the right item. Items of the held-out split never occur in training. With the option `tool_results="random"` the tool returns
a number that has nothing to do with the task: a control, under which success falls to chance (1 in 90).

The wording is made for a model of 135M parameters that was never trained to call tools: short calls, `stock("fish")`; three
worked examples; a question that asks to adapt one of them. An action without a call is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

import numpy as np

from longstraw_agents.envs.parsing import ParserConfig
from longstraw_agents.envs.rewards import Episode, Grade, RewardPart
from longstraw_agents.envs.tool_env import ToolEnv
from longstraw_agents.envs.tools import tool
from longstraw_agents.errors import ConfigError, ToolFault

TRAIN_ITEMS = (
    "apple", "bread", "sugar", "salt", "rice", "bean", "milk", "shirt", "coat", "hat", "chair", "table", "paper", "brush",
    "bed", "plate", "fish", "meat", "oil", "water", "wood", "iron", "glass", "stone", "wire", "pipe", "wheel", "box", "bag",
    "book", "ball", "card", "coin", "lock", "door", "window", "flower", "seed", "phone", "radio", "light", "engine", "boot",
    "mask", "soup", "map", "bell", "cup",
)
HELDOUT_ITEMS = (
    "melon", "corn", "belt", "clock", "orange", "sock", "wine", "gold", "sand", "tube", "nail", "chain", "pen", "ring", "key",
    "grass", "camera", "fan", "motor", "seat", "tie", "cap", "coal", "flag", "horn", "pot", "dish", "jar", "rug", "pin",
)

LOWEST, HIGHEST = 10, 99

RESULT = "Repeat this:\n{}"  # the number alone a small model answers with the same call again, always


class LookupEnv(ToolEnv):
    """One question, one tool, one number."""

    option_defaults: ClassVar[Mapping[str, Any]] = {"tool_results": "real"}
    parser: ClassVar[ParserConfig] = ParserConfig(formats=("python", "tags"), answer="text")
    max_turns: ClassVar[int] = 3
    reward_parts: ClassVar[tuple[RewardPart, ...]] = (
        RewardPart("call", weight=0.1),  # once: a well-formed call, whatever it asks for
        RewardPart("item", weight=0.3),  # once: a call for the right item
        RewardPart("answer", weight=1.0),
    )

    def new_task(self, rng: np.random.Generator, split: str) -> str:
        """One task from the random numbers of its seed."""
        if self.options["tool_results"] not in ("real", "random"):
            raise ConfigError(f"tool_results is {self.options['tool_results']!r}; choose real or random")
        self.item = str(rng.choice(TRAIN_ITEMS if split == "train" else HELDOUT_ITEMS))
        self.count = int(rng.integers(LOWEST, HIGHEST + 1))
        self._noise = np.random.default_rng(rng.integers(2**63))
        return f'Repeat this, but replace egg with {self.item}:\nstock("egg")'

    def system_message(self) -> str:
        """What the policy is told first."""
        return (
            'For egg, you write stock("egg"). For tea, you write stock("tea"). For car, you write stock("car"). '
            "Then you repeat the number."
        )

    @tool
    def stock(self, item: str) -> str:
        """How many pieces of an item are in stock.

        Args:
            item: the item's name
        """
        if item != self.item:
            raise ToolFault(f"no item {item[:32]!r}")
        if self.options["tool_results"] == "random":
            return RESULT.format(self._noise.integers(LOWEST, HIGHEST + 1))
        return RESULT.format(self.count)

    def grade_turn(self, episode: Episode) -> Mapping[str, float]:
        """Parts of the reward that a turn earned."""
        formed = [any("item" in call.arguments for call in calls) for calls in episode.calls]
        found = [any(call.name == "stock" and call.error is None for call in calls) for calls in episode.calls]
        return {name: float(now[-1] and not any(now[:-1])) for name, now in (("call", formed), ("item", found))}

    def grade(self, episode: Episode) -> Grade:
        """The outcome and the parts of the reward, at the end."""
        looked_up = any(call.error is None for calls in episode.calls for call in calls)
        right = looked_up and re.findall(r"\d+", episode.answer or "") == [str(self.count)]
        return Grade(right, {"answer": float(right)})

    def solver(self) -> Generator[str, str, None]:
        """Actions that earn everything."""
        seen = yield f'stock("{self.item}")'
        yield seen.rpartition("\n")[2]
