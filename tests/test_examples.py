"""Every example is a configuration of a registered environment, and says the command that runs it."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import pytest

import longstraw_agents.envs  # noqa: F401
from longstraw_agents import config as toml
from longstraw_agents.loop import RunConfig

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_loads(path: Path) -> None:
    settings = toml.load(path, RunConfig)
    assert f"longstraw run examples/{path.name}" in path.read_text()
    env = gymnasium.make(settings.tasks.env, disable_env_checker=True)
    env.reset(seed=0, options={**settings.tasks.options, "split": "train"})
    if settings.warm_start.updates and settings.warm_start.source == "solver":
        assert next(env.unwrapped.solver())
    env.close()
