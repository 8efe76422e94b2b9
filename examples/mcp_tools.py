"""An environment whose tools come from an MCP server (pip install mcp).

    python examples/mcp_tools.py

In a run, connect to the server once and register the environment with its tools:
gymnasium.register("mine/Inventory-v0", Inventory, kwargs={"tools": server.tools}).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from longstraw_agents.envs import Episode, Grade, ToolEnv
from longstraw_agents.envs.mcp_tools import MCPServer


class Inventory(ToolEnv):
    """How many bolts are there? Only the server knows."""

    instructions = "Use the tools, then answer with the number."

    def new_task(self, rng: np.random.Generator, split: str) -> str:
        """One task from the random numbers of its seed."""
        return "How many bolts are in stock?"

    def grade(self, episode: Episode) -> Grade:
        """The outcome and the parts of the reward, at the end."""
        right = episode.answer == "17"
        return Grade(right, {"success": float(right)})


def play() -> None:
    """One episode, with a scripted policy."""
    with MCPServer([sys.executable, str(Path(__file__).with_name("mcp_server.py"))]) as server:
        env = Inventory(tools=server.tools)
        observation, _ = env.reset(seed=0)
        print(observation)
        seen, *_ = env.step('<tool_call>{"name": "stock", "arguments": {"item": "bolts"}}</tool_call>')
        print("tool:", seen)
        _, reward, terminated, _, info = env.step(f"<answer>{seen.strip()}</answer>")
        print("reward", reward, "success", info["success"], "terminated", terminated)


if __name__ == "__main__":
    play()
