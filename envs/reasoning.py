"""longstraw/Reasoning-v0: the procedural tasks of the `reasoning-gym` package, one question and one answer each.

The option `dataset` names the generator (`reasoning_gym.factory.DATASETS`); its own scorer, between 0 and 1, is the reward.
Install the package with `pip install reasoning-gym`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, ClassVar

import numpy as np

from longstraw_agents.envs.rewards import Episode, Grade, RewardPart
from longstraw_agents.envs.tool_env import ToolEnv, in_split
from longstraw_agents.errors import ConfigError


class ReasoningEnv(ToolEnv):
    """One generated question; success is the full score."""

    option_defaults: ClassVar[Mapping[str, Any]] = {"dataset": "chain_sum"}
    reward_parts: ClassVar[tuple[RewardPart, ...]] = (RewardPart("score"),)
    max_turns: ClassVar[int] = 4

    def system_message(self) -> str:
        """What the policy is told first."""
        return "Solve the task. Give the answer as <answer>...</answer>."

    def new_task(self, rng: np.random.Generator, split: str) -> str:
        """One task from the random numbers of its seed."""
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError("this environment needs a package: pip install reasoning-gym") from error
        name = self.options["dataset"]
        if name not in DATASETS:
            raise ConfigError(f"reasoning-gym has no dataset {name!r}; it has {', '.join(sorted(DATASETS)[:8])} and more")
        while True:
            self._dataset = reasoning_gym.create_dataset(name, size=1, seed=int(rng.integers(2**31)))
            self._entry = self._dataset[0]
            if in_split(self._entry["question"], split):
                return str(self._entry["question"])

    def grade(self, episode: Episode) -> Grade:
        """The outcome and the parts of the reward, at the end."""
        if episode.answer is None:
            return Grade(False, {"score": 0.0})
        score = float(self._dataset.score_answer(answer=episode.answer, entry=self._entry))
        return Grade(score >= 1.0, {"score": score})

    def solver(self) -> Generator[str, str, None]:
        """Actions that earn everything."""
        yield f"<answer>{self._entry['answer']}</answer>"
