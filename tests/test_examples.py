"""Examples: configurations load, scripts compile and name files that exist, and those that need no model run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from longstraw_agents import config
from longstraw_agents.loop import RunConfig

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(ROOT))  # some tasks lie in benchmarks/


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_configurations_load(path: Path) -> None:
    import gymnasium

    settings = config.load(path, RunConfig)
    env = gymnasium.make(settings.tasks.env, disable_env_checker=True)
    observation, info = env.reset(seed=1, options={"split": "train", **settings.tasks.options})
    assert observation and info["messages"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_scripts_compile_and_say_how_to_start_them(path: Path) -> None:
    text = path.read_text()
    compile(text, str(path), "exec")
    assert f"python examples/{path.name}" in text.split('"""')[1]


def test_the_index_lists_every_example() -> None:
    listed = set(re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".toml")}


def test_the_environment_of_ones_own_can_be_solved() -> None:
    code = (
        "import sys; sys.path.insert(0, 'examples'); import own_environment as own\n"
        "env = own.Boxes(); env.reset(seed=3); actions = env.solver(); step = env.step(next(actions))\n"
        "step = env.step(actions.send(step[0])); assert step[1] == 1.2 and step[4]['success'], step\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tools_from_an_mcp_server() -> None:
    pytest.importorskip("mcp", reason="the MCP SDK is not installed")
    done = subprocess.run([sys.executable, str(EXAMPLES / "mcp_tools.py")], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "tool: 17" in done.stdout and "success True" in done.stdout
