"""The base class of tool-use environments: text in, text out, a `gymnasium.Env`.

Idea: a subclass says what the task is, which tools there are, and how an episode is graded. All the rest is here: reading the
action, running tools within limits, answering malformed calls, budgets, stop reasons, rewards in parts, snapshots.

Life of an episode
    reset(seed, options)  `new_task` makes the problem from the seed alone; the first observation is system and user message
    step(action)          calls are run and their results are the observation; calls win over an answer beside them
    the end               an answer (terminated), or a budget of turns or tokens used up (truncated)
A seed, a split and the options always mean the same problem, in any process; train and held-out problems are disjoint.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np

from longstraw_agents.envs.parsing import ParsedAction, ParsedCall, ParserConfig, parse_action
from longstraw_agents.envs.prompts import tool_prompt
from longstraw_agents.envs.rewards import Episode, Grade, RewardPart, weigh
from longstraw_agents.envs.tools import Tool
from longstraw_agents.errors import ConfigError, EnvironmentFault
from longstraw_agents.types import Message, StopReason, Task, ToolCall

SPLITS = ("train", "heldout")

#: What an action without a call and without an answer is told.
NO_CALL = "There was no tool call and no answer. Call a tool, or give the answer as <answer>...</answer>."


class AnyText(gymnasium.spaces.Text):
    """Every string. (`Text` alone admits only a fixed alphabet; a model writes, and documents hold, any character.)"""

    def __init__(self, max_length: int = 1_000_000) -> None:
        super().__init__(max_length=max_length, min_length=0)

    def contains(self, x: Any) -> bool:
        """Whether it is a string."""
        return isinstance(x, str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Up to 63 printable ASCII characters."""
        length = int(self.np_random.integers(0, 64))
        return "".join(chr(code) for code in self.np_random.integers(32, 127, length))


def utf8_length(text: str) -> int:
    """Bytes of `text`: no byte-level tokenizer makes more tokens of it, so a budget in bytes is a safe one."""
    return len(text.encode("utf-8", "surrogatepass"))


def in_split(key: str, split: str, heldout_share: float = 0.2) -> bool:
    """Whether a problem belongs to a split, by the digest of what identifies it: the splits can't share a problem."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") / 2**64 < heldout_share) == (split == "heldout")


class ToolEnv(gymnasium.Env[str, str]):
    """Subclass it: tools are methods with `@tool`; override `new_task` and `grade` (and `grade_turn`, `solver`).

    Keyword arguments set defaults for the options of `reset`: "split", "max_turns", "max_tokens", and those of the subclass in
    `option_defaults`. `max_tokens` counts observations and actions with `count_tokens`, by default their UTF-8 bytes.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}  # type: ignore[misc]
    observation_space: gymnasium.Space[str]
    action_space: gymnasium.Space[str]

    #: What the environment asks in general; stands before the tools in the system message.
    instructions: ClassVar[str] = "Solve the task. Use the tools; then give the answer."
    option_defaults: ClassVar[Mapping[str, Any]] = {}
    reward_parts: ClassVar[tuple[RewardPart, ...]] = (RewardPart("success"),)
    max_turns: ClassVar[int] = 16
    parser: ClassVar[ParserConfig] = ParserConfig()

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        tools: Sequence[Tool] = (),
        rewards: Sequence[RewardPart] = (),
        count_tokens: Callable[[str], int] = utf8_length,
        **options: Any,
    ) -> None:
        self.render_mode = render_mode
        self.observation_space, self.action_space = AnyText(), AnyText()
        self.count_tokens = count_tokens
        self.tools = _collect_tools(self, tools)
        self._parts = (*self.reward_parts, *rewards)
        if twice := [name for name, count in Counter(part.name for part in self._parts).items() if count > 1]:
            raise ConfigError(f"two reward parts are called {twice[0]!r}; rename one")
        self._defaults = {"split": "train", "max_turns": self.max_turns, "max_tokens": None, **self.option_defaults}
        self._defaults = self._merge(options)
        self.options = self._defaults
        self._episode: Episode | None = None
        self._tokens = 0
        self._digests: list[str] = []
        self._recorded: list[ToolCall] = []
        self._repeat_all = True

    # What a subclass overrides

    def new_task(self, rng: np.random.Generator, split: str) -> str | Sequence[Message]:
        """Make the problem from `rng` (and `self.options`) and give the user's message, or all messages."""
        raise NotImplementedError

    def grade(self, episode: Episode) -> Grade:
        """The verdict at the end of an episode; `episode.answer` is None where none was given."""
        raise NotImplementedError

    def grade_turn(self, episode: Episode) -> Mapping[str, float]:
        """Raw values of the parts that the last turn earns."""
        return {}

    def solver(self) -> Generator[str, str, None]:
        """Actions that solve the current task: yields an action, is sent the next observation."""
        raise NotImplementedError

    def system_message(self) -> str:
        """The system message: instructions, the tools' schemas, the form of calls and answers."""
        return tool_prompt(self.instructions, list(self.tools.values()), self.parser)

    # gymnasium's interface

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin the task that (seed, options) mean. Without a seed one is drawn. Raises ConfigError for unknown options."""
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        self.options = self._merge(options or {})
        split = self.options["split"]
        given = {key: value for key, value in self.options.items() if key != "split" and value != self._defaults.get(key)}
        rng = np.random.default_rng([seed, SPLITS.index(split)])
        made = self.new_task(rng, split)
        messages = [Message("system", self.system_message()), Message("user", made)] if isinstance(made, str) else list(made)
        env_id = self.spec.id if self.spec is not None else type(self).__name__
        self._episode = Episode(Task(env_id, seed, split, given), list(messages))
        self._tokens = 0
        self._digests = []
        observation = self._observe(messages)
        return observation, {"messages": messages, "task": self._episode.task, "tools": self.tool_definitions()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the policy's text. Raises EnvironmentFault outside an episode, for a non-string, or where a reward is broken."""
        episode = self.episode
        if episode.stop_reason is not None:
            raise EnvironmentFault(f"the episode has ended ({episode.stop_reason}); call reset before the next step")
        if not isinstance(action, str):
            raise EnvironmentFault(f"an action is a string, got {type(action).__name__}")
        episode.actions.append(action)
        self._tokens += self.count_tokens(action)
        messages: list[Message] = []
        if self._exhausted():
            episode.calls.append(())
            episode.stop_reason = StopReason.TOKEN_LIMIT
        else:
            messages = self._take(parse_action(action, self.parser), episode)
        self._recorded = []
        observation = self._observe(messages)
        episode.messages.extend(messages)
        if episode.stop_reason is None and self._exhausted():
            episode.stop_reason = StopReason.TOKEN_LIMIT
        if episode.stop_reason is None and len(episode.actions) >= self.options["max_turns"]:
            episode.stop_reason = StopReason.TURN_LIMIT
        return self._outcome(observation, messages, episode)

    def render(self) -> str | None:  # type: ignore[override]
        """The transcript so far, in render mode "ansi"."""
        return self.transcript() if self.render_mode == "ansi" and self._episode is not None else None

    # What callers may use besides

    @property
    def episode(self) -> Episode:
        """The record of the current episode. Raises EnvironmentFault before the first reset."""
        if self._episode is None:
            raise EnvironmentFault("there is no episode yet; call reset first")
        return self._episode

    def snapshot(self) -> dict[str, Any]:
        """The episode so far as JSON-able values: the task, the actions, what their calls gave, and the subclass's state."""
        episode = self.episode
        calls = [[[call.name, call.result, call.error] for call in turn] for turn in episode.calls]
        task = {"seed": episode.task.seed, "options": {**episode.task.options, "split": episode.task.split}}
        return {
            "task": task, "actions": list(episode.actions), "calls": calls, "digests": list(self._digests),
            "state": self.get_state(),
        }  # fmt: skip

    def restore(self, snapshot: Mapping[str, Any], turns: int | None = None) -> dict[str, Any]:
        """Bring an episode back, whole or its first `turns`: to fork it, or to go on where a run was stopped.

        The task is made again from its seed and the actions are taken again; tools that are not `repeatable` give what they
        gave then. A subclass's saved state replaces what repeating made. Returns the last step's (or reset's) info. Raises
        EnvironmentFault where the environment now says something else than then. Digests may be missing: then it can't tell.
        """
        task, digests, state = snapshot["task"], snapshot.get("digests"), snapshot.get("state")
        count = len(snapshot["actions"]) if turns is None else turns
        _, info = self.reset(seed=task["seed"], options=dict(task["options"]))
        stateful = state is not None and count == len(snapshot["actions"])
        for turn, action in enumerate(snapshot["actions"][:count]):
            recorded = snapshot.get("calls", [])[turn: turn + 1]
            self.expect([ToolCall(name, {}, result, error) for name, result, error in recorded[0]] if recorded else [])
            self._repeat_all = not stateful
            try:
                *_, info = self.step(action)
            finally:
                self._repeat_all = True
        if stateful:
            self.set_state(state)
        if digests is not None and self._digests != digests[: count + 1]:
            turn = next(i for i, (now, then) in enumerate(zip(self._digests, digests, strict=False)) if now != then)
            raise EnvironmentFault(
                f"the restored episode differs from turn {turn} on: the environment depends on more than seed and actions; "
                "mark tools whose results change as not repeatable, or override get_state and set_state"
            )
        return info

    def expect(self, calls: Sequence[ToolCall]) -> None:
        """The next action was taken before and its calls came to this: tools that are not `repeatable` give that again."""
        self._recorded = list(calls)

    def get_state(self) -> Any:
        """What seed and actions do not bring back, as JSON-able values; None where they bring back everything."""
        return None

    def set_state(self, state: Any) -> None:
        """Take a state that `get_state` gave, after the actions were taken again with recorded tool results."""

    def tool_definitions(self) -> list[dict[str, Any]]:
        """The tools as chat templates and OpenAI-compatible servers expect them."""
        return [each.definition for each in self.tools.values()]

    def transcript(self) -> str:
        """Messages and actions in the order in which they came, for people."""
        episode = self.episode
        opening = [message for message in episode.messages if message.role == "system"]
        rest = episode.messages[len(opening):]
        lines = [f"[{message.role}] {message.content}" for message in (*opening, *rest[:1])]
        replies = rest[1:]
        for action, calls in zip(episode.actions, episode.calls, strict=True):
            lines.append(f"[policy] {action}")
            count = max(1, len(calls))
            lines.extend(f"[{message.role}] {message.content}" for message in replies[:count])
            replies = replies[count:]
        return "\n".join(lines)

    # Inside

    def _take(self, parsed: ParsedAction, episode: Episode) -> list[Message]:
        """Run the calls, or take the answer, or explain that there was neither."""
        calls = tuple(self.call(call) for call in parsed.calls)
        episode.calls.append(calls)
        if calls:
            messages = [Message("tool", f"Error: {call.error}" if call.result is None else call.result) for call in calls]
            if parsed.answer is not None:
                messages.append(Message("user", "The answer beside the call was not taken: answer after reading the result."))
            return messages
        if parsed.answer is not None:
            episode.answer = parsed.answer
            episode.stop_reason = StopReason.ANSWERED
            return []
        return [Message("user", NO_CALL)]

    def call(self, parsed: ParsedCall) -> ToolCall:
        """Run one call; a fault of any kind is in the ToolCall's `error`."""
        then = self._recorded.pop(0) if self._recorded else None
        if parsed.error is not None:
            return ToolCall(parsed.name, {}, error=parsed.error)
        chosen = self.tools.get(parsed.name)
        if chosen is None:
            close = difflib.get_close_matches(parsed.name[:64], self.tools, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            error = f"there is no tool {parsed.name[:64]!r}.{hint} Tools: {', '.join(self.tools)}."
            return ToolCall(parsed.name[:64], parsed.arguments, error=error)
        arguments = {**dict(zip(chosen.schema.get("properties", {}), parsed.positional, strict=False)), **parsed.arguments}
        if len(parsed.positional) > len(chosen.schema.get("properties", {})):
            return ToolCall(parsed.name, arguments, error=f"{parsed.name} was given {len(parsed.positional)} values: too many")
        if then is not None and not (chosen.repeatable and self._repeat_all):
            return ToolCall(parsed.name, arguments, then.result, then.error)
        outcome = chosen.run(arguments)
        return ToolCall(parsed.name, arguments, outcome.result, outcome.error, outcome.seconds)

    def _outcome(
        self, observation: str, messages: list[Message], episode: Episode
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        ended = episode.stop_reason is not None
        values = dict(self.grade_turn(episode))
        info: dict[str, Any] = {"messages": messages, "tool_calls": list(episode.calls[-1])}
        if ended:
            grade = self.grade(episode)
            values.update(grade.parts or ({"success": float(grade.success)} if self._declares("success") else {}))
            info["stop_reason"], info["success"] = episode.stop_reason, bool(grade.success)
        for part in self._parts:
            if part.function is not None and (part.when == "turn" or ended):
                values[part.name] = part.function(episode)
        weighed = weigh(self._parts, values)
        reward = math.fsum(weighed.values())
        info["reward_parts"] = weighed
        terminated = episode.stop_reason is StopReason.ANSWERED
        return observation, reward, terminated, ended and not terminated, info

    def _declares(self, name: str) -> bool:
        return any(part.name == name for part in self._parts)

    def _observe(self, messages: Sequence[Message]) -> str:
        observation = "\n".join(message.content for message in messages)
        self._tokens += self.count_tokens(observation)
        self._digests.append(hashlib.blake2b(observation.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest())
        return observation

    def _exhausted(self) -> bool:
        limit = self.options["max_tokens"]
        return limit is not None and self._tokens >= limit

    def _merge(self, given: Mapping[str, Any]) -> dict[str, Any]:
        unknown = [key for key in given if key not in self._defaults]
        if unknown:
            close = difflib.get_close_matches(str(unknown[0]), self._defaults, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"unknown option {unknown[0]!r}: {hint}Options are {', '.join(self._defaults)}")
        merged = {**self._defaults, **given}
        if merged["split"] not in SPLITS:
            raise ConfigError(f"split is {merged['split']!r}; choose train or heldout")
        if not isinstance(merged["max_turns"], int) or merged["max_turns"] < 1:
            raise ConfigError(f"max_turns is {merged['max_turns']!r}; give a whole number of at least 1")
        if merged["max_tokens"] is not None and not merged["max_tokens"] > 0:
            raise ConfigError(f"max_tokens is {merged['max_tokens']!r}; give a number above 0, or None for no limit")
        return merged


def _collect_tools(env: ToolEnv, given: Sequence[Tool]) -> dict[str, Tool]:
    """The tools declared on the class, in the order of definition, then those passed in."""
    found: dict[str, Tool] = {}
    for owner in reversed(type(env).__mro__):
        for attribute, value in vars(owner).items():
            if isinstance(value, Tool):
                bound = getattr(env, attribute)
                found[bound.name] = bound
    for each in given:
        if each.name in found:
            raise ConfigError(f"two tools are called {each.name!r}; rename one with @tool(name=...)")
        found[each.name] = each
    return found
