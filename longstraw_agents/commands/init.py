"""Write a commented configuration and an environment file to begin with."""

from __future__ import annotations

from pathlib import Path

import click

ENVIRONMENT = '''\
"""An environment of your own. Check it:  longstraw envs check environment.py    Play it:  longstraw play environment.py"""

import gymnasium

from longstraw_agents.envs import Episode, Grade, RewardPart, ToolEnv, tool
from longstraw_agents.envs.tool_env import in_split


class Sums(ToolEnv):
    """Add two numbers with a tool."""

    # What the policy is asked in general. The tools' schemas and the form of calls and answers are added.
    instructions = "Add the numbers with the tool, then answer with the sum."

    # The reward: named parts, each a weight times a value within [0, 1]. `grade` gives the values.
    reward_parts = (RewardPart("called", weight=0.2), RewardPart("right", weight=1.0))
    max_turns = 4

    def new_task(self, rng, split):
        """One task from the random numbers of its seed; in_split keeps training and held-out tasks apart."""
        while True:
            self.a, self.b = (int(number) for number in rng.integers(10, 1000, 2))
            if in_split(f"{self.a} {self.b}", split):
                return f"What is {self.a} + {self.b}?"

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first number
            b: the second number
        """
        return a + b

    def grade(self, episode: Episode) -> Grade:
        called = any(call.error is None for calls in episode.calls for call in calls)
        right = called and (episode.answer or "").strip() == str(self.a + self.b)
        return Grade(success=right, parts={"called": float(called), "right": float(right)})

    def solver(self):
        """Actions that earn everything: `longstraw envs check` plays them."""
        result = yield f'<tool_call>{{"name": "add", "arguments": {{"a": {self.a}, "b": {self.b}}}}}</tool_call>'
        yield f"<answer>{result}</answer>"


gymnasium.register("Sums-v0", entry_point=Sums)
'''

CONFIGURATION = '''\
# A run: longstraw run longstraw.toml     Every key that is left out keeps its default.

[run]
name = "sums"
folder = "runs/sums"        # store, adapters and receipts
updates = 50
seed = 0
evaluate_every = 10         # updates between evaluations on held-out tasks

[tasks]
env = "environment:Sums-v0" # MODULE:ID imports environment.py first, which registers the id
groups = 4                  # tasks in each update
samples = 8                 # episodes of each task: their rewards are compared

[tasks.options]             # go to the environment's reset
max_turns = 4

[model]
name = "smollm2-135m-instruct"  # or a local folder, or a name on the Hugging Face hub
dtype = "bfloat16"

[model.adapter]             # without this section all weights are trained
rank = 8
alpha = 16.0

[collect]
max_action_tokens = 64      # one action
max_trajectory_tokens = 2048

[warm_start]                # a small model that never succeeds has nothing to learn from its own episodes:
updates = 12                # the first updates imitate the environment's solver; 0 leaves that out

[trainer.optimizer]
learning_rate = 3e-4

[evaluate]
tasks = 24
samples = 2
'''


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=Path("."))
def init(folder: Path) -> None:
    """Write longstraw.toml and environment.py into FOLDER. Files that exist are left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("longstraw.toml", CONFIGURATION), ("environment.py", ENVIRONMENT)):
        path = folder / name
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(content)
        except FileExistsError:
            click.echo(f"kept    {path} (it exists)")
        else:
            click.echo(f"written {path}")
    click.echo("next:   longstraw envs check environment.py && longstraw run longstraw.toml")
