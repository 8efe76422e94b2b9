"""Environments: gymnasium tool-use environments, their tools and the sandbox.

Importing this package registers the built-in environments: `gymnasium.make("longstraw/Lookup-v0")`.
"""

import gymnasium

from longstraw_agents.envs.parsing import ParsedAction, ParsedCall, ParserConfig, parse_action
from longstraw_agents.envs.rewards import Episode, Grade, RewardPart
from longstraw_agents.envs.tool_env import ToolEnv, in_split
from longstraw_agents.envs.tools import Tool, ToolLimits, tool
from longstraw_agents.types import Message, StopReason, ToolCall

__all__ = [
    "BUILT_IN",
    "Episode",
    "Grade",
    "Message",
    "ParsedAction",
    "ParsedCall",
    "ParserConfig",
    "RewardPart",
    "StopReason",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolLimits",
    "in_split",
    "parse_action",
    "tool",
]

#: The built-in environments: id -> entry point. Modules are imported when an environment is made.
BUILT_IN: dict[str, str] = {
    "longstraw/Lookup-v0": "longstraw_agents.envs.lookup:LookupEnv",
    "longstraw/DocumentSearch-v0": "longstraw_agents.envs.document_search:DocumentSearchEnv",
    "longstraw/Workspace-v0": "longstraw_agents.envs.workspace:WorkspaceEnv",
    "longstraw/SQLAnalyst-v0": "longstraw_agents.envs.sql_analyst:SQLAnalystEnv",
    "longstraw/Ledger-v0": "longstraw_agents.envs.ledger:LedgerEnv",
    "longstraw/Reasoning-v0": "longstraw_agents.envs.reasoning:ReasoningEnv",
}

for _id, _entry in BUILT_IN.items():
    if _id not in gymnasium.registry:
        gymnasium.register(_id, entry_point=_entry)
