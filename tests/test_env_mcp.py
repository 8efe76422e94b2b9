"""Tools of a real MCP server, over stdio and HTTP, as an environment sees them."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longstraw_agents.envs import Grade, ToolEnv, ToolLimits
from longstraw_agents.envs.mcp_tools import MCPServer
from longstraw_agents.errors import EnvironmentFault

pytest.importorskip("mcp", reason="the package mcp is missing")

SERVER = """
import asyncio, sys
from mcp.server.mcpserver import MCPServer
server = MCPServer("shop")
@server.tool()
def price(item: str, count: int = 1) -> int:
    "The price of an item."
    return 7 * count
@server.tool()
async def hang() -> str:
    "Never returns."
    await asyncio.sleep(1000)
@server.tool()
def flood() -> str:
    "Too much."
    return "x" * 1_000_000
@server.tool()
def drown() -> str:
    "Far too much."
    return "x" * 40_000_000
@server.tool()
def fail() -> str:
    "Raises."
    raise ValueError("out of stock")
server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if len(sys.argv) > 2 else {}))
"""


class Shop(ToolEnv):
    """Ask for a price."""

    def new_task(self, rng, split):
        return "What do two pears cost?"

    def grade(self, episode):
        return Grade(episode.answer == "14")


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(params=["stdio", "http"])
def server(request, tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    limits = ToolLimits(seconds=2, output_chars=1000)
    if request.param == "stdio":
        with MCPServer([sys.executable, str(script)], limits=limits) as connected:
            yield connected
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(script), "streamable-http", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        with MCPServer(f"http://127.0.0.1:{port}/mcp", limits=limits) as connected:
            yield connected
    finally:
        process.kill()
        process.wait()


def test_an_environment_uses_its_tools_within_limits(server):
    env = Shop(tools=server.tools)
    env.reset(seed=1)
    assert {"price", "hang", "flood", "fail"} <= set(env.tools) and "The price of an item." in env.system_message()
    observation, *_ = env.step(call("price", item="pear", count=2))
    assert observation == "14"
    started = time.monotonic()
    observation, *_ = env.step(call("hang"))
    assert "Error" in observation and time.monotonic() - started < 3
    observation, *_ = env.step(call("flood"))
    assert len(observation) < 1100 and "left out" in observation
    observation, *_ = env.step(call("fail"))
    assert observation.startswith("Error:") and "fail" in observation
    observation, *_ = env.step(call("price"))
    assert observation.startswith("Error:")
    snapshot = env.snapshot()
    *_, info = env.step("<answer>14</answer>")
    assert info["success"]
    env.restore(snapshot)  # recorded results: nothing is called again


def test_a_message_without_end_is_not_kept(server):
    env = Shop(tools=server.tools)
    env.reset(seed=1)
    before = resident()
    observation, *_ = env.step(call("drown"))
    assert observation.startswith("Error") and resident() - before < 120
    started = time.monotonic()
    observation, *_ = env.step(call("price", item="pear", count=2))
    assert (observation == "14" or observation.startswith("Error")) and time.monotonic() - started < 3


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_a_server_that_is_not_there_is_a_fault():
    with pytest.raises(EnvironmentFault, match="can't be reached"), MCPServer("http://127.0.0.1:9/mcp"):
        pass
    with pytest.raises(EnvironmentFault, match="can't be reached"), MCPServer([sys.executable, "-c", "raise SystemExit(3)"]):
        pass
