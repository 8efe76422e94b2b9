"""The demo: SmolLM2-135M-Instruct learns to call a tool and to answer with what it returned, on a CPU, in minutes.

One prompt with one example call, two steps an episode (the call, then the answer), a LoRA adapter, and groups of eight. The
held-out items never occur in training. Controls: rewards shuffled among the trajectories of an update, and tools that return
random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from longstraw_agents.cache import SMOLLM2
from longstraw_agents.collection import CollectConfig
from longstraw_agents.evaluation import EvaluateSettings
from longstraw_agents.loop import RunConfig, RunSettings, TaskSettings
from longstraw_agents.trainer.advantages import AdvantageConfig, Prepared, prepare
from longstraw_agents.trainer.models import LoraSettings, ModelConfig
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.update import Credit, TrainerConfig
from longstraw_agents.types import Group

UPDATES = 16
CHANCE = 1 / 90  # of guessing the number


def demo_config(folder: Path, seed: int = 0, updates: int = UPDATES) -> RunConfig:
    """The demo's settings; they are written to run.toml in its folder, for `longstraw run`."""
    return RunConfig(
        run=RunSettings(name="demo", folder=folder, updates=updates, seed=seed),
        tasks=TaskSettings(env="longstraw/Lookup-v0", options={"max_turns": 2}, groups=4, samples=8),
        model=ModelConfig(name=SMOLLM2, dtype="bfloat16", adapter=LoraSettings(rank=8, alpha=16.0), seed=seed),
        collect=CollectConfig(max_action_tokens=24, max_trajectory_tokens=512),
        trainer=TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-3)),
        evaluate=EvaluateSettings(tasks=24, samples=2),
    )


def shuffled_rewards(seed: int) -> Credit:
    """Group advantages after the rewards were shuffled among all trajectories of the update: a control that must not learn."""
    rng = np.random.default_rng(seed)

    def credit(groups: Sequence[Group]) -> Prepared:
        rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
        shuffled = iter([rewards[index] for index in rng.permutation(len(rewards))])
        mixed = [
            replace(group, trajectories=tuple(replace(trajectory, reward=next(shuffled)) for trajectory in group.trajectories))
            for group in groups
        ]
        return prepare(mixed, AdvantageConfig())

    return credit
