"""The system message that shows tools to a policy: their schemas, and the form of calls and answers."""

from __future__ import annotations

import json
from collections.abc import Sequence

from longstraw_agents.envs.parsing import ParserConfig
from longstraw_agents.envs.tools import Tool

CALL_FORMS = {
    "tags": '<tool_call>{"name": "TOOL", "arguments": {"NAME": "VALUE"}}</tool_call>',
    "fenced": '```tool_call\n{"name": "TOOL", "arguments": {"NAME": "VALUE"}}\n```',
    "mistral": '[TOOL_CALLS][{"name": "TOOL", "arguments": {"NAME": "VALUE"}}]',
    "llama": '<|python_tag|>{"name": "TOOL", "parameters": {"NAME": "VALUE"}}',
    "deepseek": '<｜tool▁call▁begin｜>TOOL<｜tool▁sep｜>{"NAME": "VALUE"}<｜tool▁call▁end｜>',
    "json": '{"name": "TOOL", "arguments": {"NAME": "VALUE"}}',
    "python": 'TOOL(NAME="VALUE")',
}


def tool_prompt(instructions: str, tools: Sequence[Tool], parser: ParserConfig) -> str:
    """Instructions, one line of JSON per tool, and the first of the parser's call formats."""
    lines = [instructions, "", "Tools:"]
    for each in tools:
        shown = {"name": each.name, "description": each.description, "parameters": each.schema}
        lines.append(json.dumps(shown, ensure_ascii=False))
    lines += ["", "Call a tool like this:", CALL_FORMS[parser.formats[0]]]
    lines += ["Give the answer like this:", "<answer>...</answer>"] if parser.answer == "tags" else ["Then give the answer."]
    return "\n".join(lines)
