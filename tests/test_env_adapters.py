"""Environments of other packages through the adapters, each against the real package where it is installed."""

import json
import socket
import subprocess
import sys
import time

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from longstraw_agents.envs.adapters import GymnasiumText, OpenEnv, TextArena
from longstraw_agents.errors import ConfigError, EnvironmentFault
from longstraw_agents.types import StopReason


def test_a_discrete_environment_in_text():
    lake = gymnasium.make("FrozenLake-v1", is_slippery=False)
    env = GymnasiumText(lake, instructions="0 left, 1 down, 2 right, 3 up")
    first, info = env.reset(seed=3)
    assert first.splitlines() == ["0 left, 1 down, 2 right, 3 up", "0"]
    assert [message.role for message in info["messages"]] == ["system", "user"]
    for action in ("1", "go down: 1", "<answer>2</answer>", "2", "I choose 1"):
        observation, reward, terminated, *_ = env.step(action)
        assert not terminated
    *_, info = outcome = env.step("2")
    assert outcome[1] == 1.0 and outcome[2] and info["success"] and info["stop_reason"] is StopReason.ANSWERED
    with pytest.raises(EnvironmentFault, match="reset"):
        env.step("2")


@pytest.mark.parametrize("action", ["hello", "7", "-1", "9" * 5000, "", "\ud800", "0" * 12 + "9"])
def test_what_is_no_action_is_explained_and_does_not_step(action):
    env = GymnasiumText(gymnasium.make("FrozenLake-v1", is_slippery=False))
    env.reset(seed=1)
    observation, reward, terminated, truncated, _ = env.step(action)
    assert observation == "Answer with one number from 0 to 3." and not terminated and env.env.unwrapped.s == 0


def test_gymnasium_accepts_an_adapter():
    check_env(GymnasiumText(gymnasium.make("Blackjack-v1")), skip_render_check=True)


def test_continuous_actions_need_help():
    with pytest.raises(ConfigError, match="read="):
        GymnasiumText(gymnasium.make("Pendulum-v1"))
    env = GymnasiumText(gymnasium.make("Pendulum-v1"), read=lambda text: [float(text)])
    observation, _ = env.reset(seed=1)
    assert len(json.loads(observation)) == 3
    assert "could not convert" in env.step("fast")[0] and len(json.loads(env.step("0.5")[0])) == 3


def test_splits_and_turns():
    env = GymnasiumText(gymnasium.make("Pendulum-v1"), read=lambda text: [float(text)], max_turns=2)
    assert env.reset(seed=1)[0] != env.reset(seed=1, options={"split": "heldout"})[0]
    env.step("0")
    _, _, terminated, truncated, info = env.step("0")
    assert truncated and info["stop_reason"] is StopReason.TURN_LIMIT
    with pytest.raises(ConfigError, match="split"):
        env.reset(seed=1, options={"level": 3})


class Broken(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(10)

    def reset(self, *, seed=None, options=None):
        return "begin", {}

    def step(self, action):
        return "x", self.reward, False, False, {}


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 2.0, -0.5])
def test_a_reward_that_is_not_finite_or_out_of_bounds_is_refused(reward):
    env = GymnasiumText(Broken(), bounds=(0.0, 1.0))
    env.env.reward = reward
    env.reset(seed=1)
    with pytest.raises(EnvironmentFault, match="not a finite number within"):
        env.step("x")


class TestTextArena:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("textarena", reason="the package textarena is missing")

    def test_a_game_alone(self):
        env = TextArena("GuessTheNumber-v0")
        first, _ = env.reset(seed=5)
        assert env.reset(seed=5)[0] == first and "[" in first
        for number in range(1, 21):
            observation, reward, terminated, truncated, info = env.step(f"<answer>[{number}]</answer>")
            assert terminated or ("The target number is" in observation and "You are Player" not in observation)
            if terminated or truncated:
                break
        assert terminated and info["stop_reason"] is StopReason.ANSWERED and isinstance(info["success"], bool)

    def test_a_game_against_somebody(self):
        moves = iter("345678")
        env = TextArena("TicTacToe-v0", players=2, opponent=lambda seen: f"[{next(moves)}]")
        env.reset(seed=1)
        for move in ("[0]", "[1]", "[2]"):
            observation, reward, terminated, truncated, info = env.step(move)
        assert terminated and reward == 1 and info["success"]

    def test_an_opponent_is_needed(self):
        with pytest.raises(ConfigError, match="opponent="):
            TextArena("TicTacToe-v0", players=2)


OPENENV_SERVER = """
import sys, uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
class Say(Action):
    message: str
class Seen(Observation):
    text: str = ""
class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__(); self.number = 0; self.count = 0
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self.count = (seed or 0) % 10, 0
        return Seen(text="Guess a digit.", done=False, reward=0.0)
    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        right = action.message == str(self.number)
        return Seen(text="yes" if right else "no", done=right, reward=float(right))
    @property
    def state(self):
        return State(step_count=self.count)
uvicorn.run(create_app(Guess, Say, Seen, env_name="guess"), port=int(sys.argv[1]), log_level="error")
"""


class TestOpenEnv:
    @pytest.fixture
    def url(self, tmp_path):
        pytest.importorskip("openenv.core", reason="the package openenv is missing")
        (tmp_path / "server.py").write_text(OPENENV_SERVER)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), str(port)])
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and process.poll() is None:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()

    def test_a_server(self, url):
        env = OpenEnv(url, field="message", shown="text")
        assert env.reset(seed=7)[0] == "Guess a digit."
        assert env.step("3")[:3] == ("no", 0.0, False)
        _, reward, terminated, _, info = env.step("<answer>7</answer>")
        assert reward == 1 and terminated and info["success"]
        env.close()
        env = OpenEnv(url)
        assert json.loads(env.reset(seed=7)[0])["text"] == "Guess a digit."
        assert "not valid JSON" in env.step("seven")[0]
        assert env.step('{"message": "7"}')[2]
        env.close()


class TestVerifiers:
    @pytest.fixture
    def taskset(self):
        vf = pytest.importorskip("verifiers.v1", reason="the package verifiers (0.4 or later) is missing")

        class SumData(vf.TaskData):
            total: int

        class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
            @vf.reward(weight=2.0)
            async def right(self, trace) -> float:
                return float(trace.last_reply == str(self.data.total))

            @vf.reward
            async def short(self, trace) -> float:
                return float(len(trace.last_reply) < 5)

        class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
            def load(self):
                for a in range(40):
                    data = SumData(prompt=f"What is {a} + 1?", system_prompt="Add.", total=a + 1)
                    yield SumTask(data, self.config.task if hasattr(self.config, "task") else None)

        return Sums(vf.TasksetConfig())

    def test_a_taskset(self, taskset):
        from longstraw_agents.envs.adapters_verifiers import VerifiersText

        env = VerifiersText(taskset, success_at=3.0)
        seen = {}
        for split in ("train", "heldout"):
            seen[split] = {env.reset(seed=seed, options={"split": split})[0] for seed in range(60)}
        assert len(seen["train"]) > 15 and seen["heldout"] and not seen["train"] & seen["heldout"]
        first, info = env.reset(seed=1)
        assert first.startswith("Add.\n\nWhat is") and first == env.reset(seed=1)[0]
        total = int(first.split()[3]) + 1
        _, reward, terminated, _, info = env.step(str(total))
        assert reward == 3.0 and terminated and info["success"]
        env.reset(seed=1)
        assert env.step("I do not know")[1] == 0.0
