"""Snapshots: an episode comes back whole, forks at any turn, and says so where it can't."""

import json
import random

import gymnasium
import pytest

import longstraw_agents.envs  # noqa: F401
from longstraw_agents.envs import Grade, ToolEnv, tool
from longstraw_agents.envs.sandbox import available
from longstraw_agents.errors import EnvironmentFault


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_an_episode_comes_back_after_json_and_goes_on():
    env = gymnasium.make("longstraw/SQLAnalyst-v0").unwrapped
    env.reset(seed=4, options={"split": "heldout", "orders": 50})
    solver = env.solver()
    observation, *_ = env.step(next(solver))
    snapshot = json.loads(json.dumps(env.snapshot()))
    other = gymnasium.make("longstraw/SQLAnalyst-v0").unwrapped
    other.restore(snapshot)
    assert other.snapshot() == snapshot and other.transcript() == env.transcript()
    assert other.episode.task.options == {"orders": 50} and other.episode.task.split == "heldout"
    *_, info = other.step(solver.send(observation))
    assert info["success"]


def test_forks_at_any_turn():
    env = gymnasium.make("longstraw/Ledger-v0", sessions=5).unwrapped
    env.reset(seed=1)
    solver = env.solver()
    for _ in range(4):
        env.step(next(solver))
    whole = env.snapshot()
    for turns in range(5):
        fork = gymnasium.make("longstraw/Ledger-v0", sessions=5).unwrapped
        fork.restore(whole, turns)
        assert fork.episode.actions == env.episode.actions[:turns] and fork.right == turns
        fork.step("<answer>wrong</answer>")


class Dice(ToolEnv):
    """Roll."""

    def new_task(self, rng, split):
        return "Roll."

    @tool
    def roll(self) -> int:
        """Roll the dice."""
        return random.SystemRandom().randrange(10**9)

    def grade(self, episode):
        return Grade(True)


def test_an_environment_that_changes_is_found_out():
    env = Dice()
    env.reset(seed=1)
    env.step(call("roll"))
    with pytest.raises(EnvironmentFault, match="differs from turn 1"):
        env.restore(env.snapshot())


def test_recorded_results_stand_for_tools_that_are_not_repeatable():
    import dataclasses

    env = Dice()
    env.tools["roll"] = dataclasses.replace(env.tools["roll"], repeatable=False)
    env.reset(seed=1)
    observation, *_ = env.step(call("nothing") + call("roll"))
    env.restore(env.snapshot())
    assert env.episode.messages[-1].content == observation.splitlines()[-1]


@pytest.mark.skipif(not available(), reason="bubblewrap is missing")
def test_a_workspace_comes_back_with_its_files():
    env = gymnasium.make("longstraw/Workspace-v0").unwrapped
    env.reset(seed=3)
    env.step(call("shell", command="date +%N > now; mkdir -p a/b; ln -s /etc/passwd a/link; printf '\\0\\377' > bytes; echo $$"))
    snapshot = json.loads(json.dumps(env.snapshot()))
    now = env.tools["read_file"].run({"path": "now"}).result
    other = gymnasium.make("longstraw/Workspace-v0").unwrapped
    other.restore(snapshot)
    assert other.tools["read_file"].run({"path": "now"}).result == now
    listing = other.tools["shell"].run({"command": "ls a; wc -c < bytes"}).result
    assert listing.split()[:3] == ["b", "link", "2"]
    env.close()
    other.close()
