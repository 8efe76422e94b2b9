"""Tools made of functions: their schemas, their checks, their limits."""

import asyncio
import platform
import subprocess
import sys
import threading
import time
from typing import Literal

import gymnasium
import pytest

from longstraw_agents.envs import Grade, RewardPart, Tool, ToolEnv, ToolLimits, tool
from longstraw_agents.errors import ConfigError, EnvironmentFault, ToolFault


@tool(limits=ToolLimits(seconds=0.3, output_chars=100))
def search(query: str, limit: int = 5, kinds: list[Literal["web", "news"]] | None = None) -> list[str]:
    """Search the archive.

    Finds documents.

    Args:
        query: words to look for,
            in any order
        limit (int): how many to show
    """
    return [query] * limit


def test_the_schema_comes_from_types_and_docstring():
    schema = search.definition["function"]
    assert schema["name"] == "search" and schema["description"] == "Search the archive. Finds documents."
    parameters = schema["parameters"]
    assert parameters["required"] == ["query"] and parameters["additionalProperties"] is False
    assert parameters["properties"]["query"] == {"type": "string", "description": "words to look for, in any order"}
    assert parameters["properties"]["limit"] == {"type": "integer", "default": 5, "description": "how many to show"}
    assert parameters["properties"]["kinds"]["anyOf"][0]["items"]["enum"] == ["web", "news"]


def test_a_parameter_called_title_survives():
    @tool
    def book(title: str) -> str:
        """Find a book."""
        return title

    assert book.schema["properties"] == {"title": {"type": "string"}} and book.run({"title": "x"}).result == "x"


def test_results_become_text():
    assert search.run({"query": "a", "limit": "2"}).result == '["a", "a"]'

    @tool
    def nothing() -> None:
        """Do nothing."""

    assert nothing.run({}).result == "done"


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({}, "query: Field required"),
        ({"query": 3}, "query"),
        ({"query": "a", "top": 1}, "top"),
        ({"query": "a", "limit": "x"}, "limit"),
    ],
)
def test_bad_arguments_are_explained(arguments, says):
    error = search.run(arguments).error
    assert says in error and "query (string), limit (integer, optional)" in error


def test_output_is_cut_with_a_note():
    result = search.run({"query": "x" * 1000, "limit": 1}).result
    assert len(result) < 200 and "characters left out" in result and result.startswith('["x')


@tool(limits=ToolLimits(seconds=0.3))
def spin() -> str:
    """Never return."""
    while True:
        time.sleep(0.001)


@tool(limits=ToolLimits(seconds=0.3))
def cling() -> str:
    """Swallow the first attempts to stop it."""
    swallowed = 0
    while True:
        try:
            time.sleep(0.001)
        except BaseException:
            swallowed += 1
            if swallowed > 5:
                raise


@tool(limits=ToolLimits(seconds=0.3))
async def wait() -> str:
    """Never return either."""
    await asyncio.sleep(100)
    return "?"


@pytest.mark.parametrize("endless", [spin, cling, wait])
def test_time_is_bounded_and_the_thread_ends(endless):
    outcome = endless.run({})
    assert "longer than 0.3 s" in outcome.error and outcome.seconds < 1.3
    deadline = time.monotonic() + 2
    while any(thread.name in ("tool-spin", "tool-cling") for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.name in ("tool-spin", "tool-cling") for thread in threading.enumerate())


@pytest.mark.parametrize(
    "failure", [ValueError("bad"), ToolFault("bad"), SystemExit(3), KeyboardInterrupt("bad"), RecursionError("bad")]
)
def test_whatever_a_tool_raises_is_an_error_text(failure):
    @tool
    def fail() -> str:
        """Fail."""
        raise failure

    assert fail.run({}).result is None and fail.run({}).error


def test_async_tools_work_inside_a_running_loop():
    @tool
    async def double(x: int) -> int:
        """Double."""
        await asyncio.sleep(0)
        return 2 * x

    async def inside():
        return double.run({"x": 4}).result

    assert asyncio.run(inside()) == "8"


def undescribed(x: int) -> int:
    return x


def untyped(x):
    """Typed not."""


def starred(*x: int) -> int:
    """Starred."""


@pytest.mark.parametrize("function, says", [(undescribed, "no docstring"), (untyped, "no type"), (starred, "plain named")])
def test_functions_that_are_no_tools(function, says):
    with pytest.raises(ConfigError, match=says):
        tool(function)


def test_isolated_tools_are_module_level():
    with pytest.raises(ConfigError, match="module-level"):

        @tool(isolated=True)
        def inner() -> str:
            """Inside."""


class Counter(ToolEnv):
    """Count."""

    reward_parts = (RewardPart("done"), RewardPart("speed", weight=0.5, low=-1.0))
    value: float = 1.0

    def new_task(self, rng, split):
        self.count = 0
        return "Count."

    @tool
    def up(self) -> int:
        """Count one up."""
        self.count += 1
        return self.count

    @tool
    async def later(self) -> str:
        """Count later."""
        await asyncio.sleep(0.01)
        return f"later {self.count}"

    def grade(self, episode):
        return Grade(True, {"done": self.value, "speed": -1.0})


CALL = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'


def test_several_calls_in_a_turn_run_in_order():
    env = Counter()
    env.reset(seed=1)
    observation, *_, info = env.step(CALL % "up" + CALL % "up" + CALL % "later" + CALL % "upp")
    assert observation.splitlines()[:3] == ["1", "2", "later 2"] and "Did you mean up" in observation
    assert [call.name for call in info["tool_calls"]] == ["up", "up", "later", "upp"]


def test_tools_can_be_passed_in_and_names_must_differ():
    assert set(Counter(tools=[search]).tools) == {"up", "later", "search"}
    with pytest.raises(ConfigError, match="two tools"):
        Counter(tools=[search, search])


def test_parts_are_weighted_and_sum_to_the_reward():
    env = Counter(rewards=[RewardPart("length", 0.1, 0, 9, "turn", lambda episode: float(len(episode.actions)))])
    env.reset(seed=1)
    _, reward, *_, info = env.step(CALL % "up")
    assert info["reward_parts"] == {"length": 0.1} and reward == pytest.approx(0.1)
    _, reward, *_, info = env.step("<answer>x</answer>")
    assert info["reward_parts"] == {"done": 1.0, "speed": -0.5, "length": 0.2} and reward == pytest.approx(0.7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.5, -0.1])
def test_a_broken_reward_is_refused(value):
    env = Counter()
    env.value = value
    env.reset(seed=1)
    with pytest.raises(EnvironmentFault, match="done"):
        env.step("<answer>x</answer>")


def test_limits_are_checked():
    with pytest.raises(ConfigError, match="above 0"):
        ToolLimits(seconds=0)


def test_the_tool_binds_like_a_method():
    env = Counter()
    env.reset(seed=1)
    assert isinstance(Counter.up, Tool) and env.up() == 1 and isinstance(env, gymnasium.Env)


FLOOD = """
from concurrent.futures import ThreadPoolExecutor
from longstraw_agents.envs import tool
@tool
def flood() -> str:
    "Return twenty megabytes."
    return "\\u6f22" * 10_000_000
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
before = resident()
for _ in range(5):
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: flood.run({}), range(4)))
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="heaps of threads are glibc's")
def test_memory_of_large_results_is_given_back():
    done = subprocess.run([sys.executable, "-c", FLOOD], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 40  # 150 with a heap for each thread


class Mute:
    def __str__(self):
        while self:
            time.sleep(0.001)
        return ""


class Dark(Exception):
    def __str__(self):
        raise ValueError("no")


def test_what_a_tool_returns_or_raises_can_not_break_out_of_its_call():
    @tool(limits=ToolLimits(seconds=0.3))
    def mute() -> list:
        """Return what never says what it is."""
        return [Mute()]

    @tool
    def dark() -> str:
        """Raise what can't say what it is."""
        raise Dark

    @tool
    def keyed() -> dict:
        """Return what is no JSON."""
        return {("a", 1): b"x"}

    outcome = mute.run({})
    assert "longer than 0.3 s" in outcome.error and outcome.seconds < 1.3
    assert dark.run({}).error == "Dark" and keyed.run({}).result == "{('a', 1): b'x'}"


def test_two_parts_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two reward parts"):
        Counter(rewards=[RewardPart("done")])
