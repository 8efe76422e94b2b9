"""An environment of one's own, from definition to a trained adapter.

    python examples/own_environment.py [UPDATES]

The task: a tool knows which of three boxes holds the ball; the agent asks and answers. Two updates by default, to see all parts.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import gymnasium
import numpy as np

from longstraw_agents.collection import CollectConfig
from longstraw_agents.envs import Episode, Grade, RewardPart, ToolEnv, tool
from longstraw_agents.evaluation import EvaluateSettings
from longstraw_agents.loop import Loop, RunConfig, RunSettings, TaskSettings
from longstraw_agents.terminal import Terminal

BOXES = ("red", "green", "blue")


class Boxes(ToolEnv):
    """Where is the ball?"""

    instructions = "Ask the tool where the ball is, then answer with the colour of the box."
    max_turns = 2
    reward_parts = (RewardPart("success"), RewardPart("asked", weight=0.2))

    def new_task(self, rng: np.random.Generator, split: str) -> str:
        """One task from the random numbers of its seed."""
        self.box = str(rng.choice(BOXES))
        return "Which box holds the ball?"

    @tool
    def find(self, thing: str) -> str:
        """Say which box holds a thing.

        Args:
            thing: what to look for
        """
        return f"The {thing} is in the {self.box} box."

    def grade(self, episode: Episode) -> Grade:
        """The outcome and the parts of the reward, at the end."""
        asked = any(call.error is None for calls in episode.calls for call in calls)
        right = asked and self.box in (episode.answer or "").lower()
        return Grade(right, {"success": float(right), "asked": float(asked)})

    def solver(self) -> Generator[str, str, None]:
        """Actions that earn everything."""
        seen = yield '<tool_call>{"name": "find", "arguments": {"thing": "ball"}}</tool_call>'
        yield f"<answer>{next(box for box in BOXES if box in seen)}</answer>"


gymnasium.register("examples/Boxes-v0", Boxes)

if __name__ == "__main__":
    updates = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    config = RunConfig(
        run=RunSettings(name="boxes", folder=Path("runs/boxes"), updates=updates),
        tasks=TaskSettings(env="examples/Boxes-v0", groups=2, samples=4),
        collect=CollectConfig(max_action_tokens=40, max_trajectory_tokens=1024),
        evaluate=EvaluateSettings(tasks=4, samples=2),
    )
    with Loop(config, Terminal()) as loop:
        loop.run()
        print(loop.summary())
