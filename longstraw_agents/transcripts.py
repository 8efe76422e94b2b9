"""The calls of an agent program as trajectories: which tokens a call adds, and what to do when it rewrites its history.

Idea: an agent program sends its whole history with every call. As long as a call repeats what it said and what it was answered,
only what is new is encoded, behind the sampled ids. Where it does not (a compacted context, a sub-agent, an edited answer, a
call sent twice), the longest repeated beginning is kept and the call begins a part of its own there, linked to the one it left.
Nothing is re-made, nothing is lost, and the program never notices.

Vocabulary
    entry    one message as an API gives it, reduced to what a model reads: role, text, tool calls
    reply    an entry that the policy sampled here; its ids are kept
    part     one append-only trajectory; an episode has one or more, which share the episode's weight equally
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from longstraw_agents.types import Message, TokenArray


@dataclass(frozen=True)
class Call:
    """A tool call. `arguments` is canonical JSON, so that equal calls are equal."""

    name: str
    arguments: str

    @staticmethod
    def of(name: str, arguments: str | dict[str, object] | None) -> Call:
        """From JSON text or a mapping; text that is no JSON stays as it is."""
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                return Call(name, str(arguments))
        return Call(name, json.dumps(arguments or {}, sort_keys=True, ensure_ascii=False))

    def text(self) -> str:
        """As the model writes and reads it."""
        return f'<tool_call>{{"name": {json.dumps(self.name)}, "arguments": {self.arguments}}}</tool_call>'


@dataclass(frozen=True)
class Entry:
    """One message. role: system, user, assistant, tool, or tools (the tools' definitions as JSON, before all others)."""

    role: str
    content: str
    calls: tuple[Call, ...] = ()
    sampled: str | None = field(default=None, compare=False)  # a reply's text as it was sampled

    def text(self) -> str:
        """Content and calls as the model reads them."""
        if self.sampled is not None:
            return self.sampled
        return "\n".join(filter(None, (self.content, *(call.text() for call in self.calls))))


@dataclass
class Part:
    """One trajectory: `entries` so far, replies included; `ends`: number of entries after each turn's reply; `tokens` [T];
    `token_starts` and `token_ends`: where each turn's action begins and ends."""

    trajectory_id: str
    entries: list[Entry] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    tokens: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    token_starts: list[int] = field(default_factory=list)
    token_ends: list[int] = field(default_factory=list)
    busy: bool = False  # a reply is being sampled

    def repeated_turns(self, entries: Sequence[Entry]) -> int:
        """How many of this part's turns the call repeats word for word (leaving something to add)."""
        same = 0
        for mine, theirs in zip(self.entries, entries, strict=False):
            if mine != theirs:
                break
            same += 1
        return sum(end <= min(same, len(entries) - 1) for end in self.ends)


@dataclass(frozen=True)
class Placement:
    """Where a call belongs: it repeats `turns` turns of `part` (None: nothing) and either goes on there or begins a new part."""

    part: Part | None
    turns: int
    goes_on: bool


def place(parts: Sequence[Part], entries: Sequence[Entry]) -> Placement:
    """The part whose turns cover the most of the call; among equals one that it can go on with, then the latest."""
    best, covered = Placement(None, 0, False), 0
    for part in parts:
        turns = part.repeated_turns(entries)
        goes_on = turns == len(part.ends) > 0 and not part.busy
        if turns and (part.ends[turns - 1], goes_on) >= (covered, best.goes_on):
            best, covered = Placement(part, turns, goes_on), part.ends[turns - 1]
    return best


def tool_instructions(definitions: str) -> str:
    """What the system message says about tools; `definitions`: one JSON object per line."""
    return (
        f"Tools:\n{definitions}\n\nCall a tool like this:\n"
        '<tool_call>{"name": "TOOL", "arguments": {"NAME": "VALUE"}}</tool_call>'
    )


def messages(entries: Sequence[Entry]) -> list[Message]:
    """Entries as messages for a renderer. Tool definitions join the system message; an assistant's text that was not sampled
    here is the environment's."""
    given = [entry for entry in entries if entry.role != "tools"]
    tools = [tool_instructions(entry.content) for entry in entries if entry.role == "tools"]
    shown = [Message(entry.role, entry.text()) for entry in given]
    if tools and shown and shown[0].role == "system":
        shown[0] = Message("system", f"{shown[0].content}\n\n{tools[0]}")
    elif tools:
        shown.insert(0, Message("system", tools[0]))
    return shown
