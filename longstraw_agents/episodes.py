"""One episode: an environment and a policy take turns, and each turn is in the store before the next begins.

Idea: a turn is committed once its action was taken and its reward is known. Whatever ends the process in between loses that one
turn. To go on, the environment is made anew and given the recorded actions; its observations must be the recorded ones; then
sampling continues with the seeds that the missing turns would have had anyway.

Vocabulary
    replayed   brought to where the store ends by the recorded actions, without sampling
    part       one append-only trajectory; an episode whose context is rewritten has several, which share its weight equally
    failed     the environment or the policy raised, or broke its contract: such an episode has no reward
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import gymnasium
import numpy as np

from longstraw_agents.errors import ConfigError, LongStrawError
from longstraw_agents.policies.sampling import Policy, Sample, SampleRequest, Sampling
from longstraw_agents.redaction import redact
from longstraw_agents.rendering import Rendered, Renderer
from longstraw_agents.types import Message, StopReason, Task, TokenArray, ToolCall, Turn

T = TypeVar("T")

#: Given a part's messages (actions among them) and its tokens: None, or the messages that a new part begins with. It must give
#: the same for the same, because a resumed episode asks again.
Rewrite = Callable[[Sequence[Message], int], Sequence[Message] | None]

#: Makes the environment of a task.
Make = Callable[[Task], "gymnasium.Env[str, str]"]

log = logging.getLogger(__name__)


class EpisodeFailed(LongStrawError):
    """An attempt at an episode failed; the turns committed so far are good. `reason` is a StopReason of FAILED."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    """Tokens of one action, and of a whole trajectory."""

    action_tokens: int
    trajectory_tokens: int


@dataclass(frozen=True)
class Outcome:
    """How an episode ended. reward is the sum of its turns' rewards, None where none is valid."""

    stop_reason: StopReason
    reward: float | None
    reward_parts: Mapping[str, float]
    success: bool | None


@dataclass(frozen=True)
class Step:
    """What an environment answered: its messages, and from a step the reward and how things stand."""

    messages: tuple[Message, ...]
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: StopReason | None = None
    success: bool | None = None


class World:
    """A gymnasium environment on one task, its answers checked. Every method raises EpisodeFailed for a fault of it."""

    def __init__(self, make: Make, task: Task) -> None:
        self._task = task
        self._env = self._guarded(lambda: make(task))

    def reset(self) -> Step:
        """The task's first messages."""
        options = {**self._task.options, "split": self._task.split}
        observation, info = self._guarded(lambda: self._env.reset(seed=self._task.seed, options=options))
        return Step(_messages(observation, info))

    def step(self, action: str) -> Step:
        """Take an action."""
        observation, reward, terminated, truncated, info = self._guarded(lambda: self._env.step(action))
        parts = {str(name): float(value) for name, value in info.get("reward_parts", {}).items()}
        if not all(math.isfinite(value) for value in (float(reward), *parts.values())):
            raise EpisodeFailed(StopReason.ENVIRONMENT_ERROR, f"the reward is not finite: {reward} from parts {parts}")
        ended = StopReason.ANSWERED if terminated else StopReason.TURN_LIMIT if truncated else None
        if ended is not None and info.get("stop_reason") is not None:
            ended = StopReason(info["stop_reason"])
        calls = tuple(info.get("tool_calls", ()))
        return Step(_messages(observation, info), float(reward), parts, calls, ended, info.get("success"))

    def repeat(self, action: str, calls: Sequence[ToolCall]) -> Step:
        """Take a recorded action; what its calls came to stands for tools that can't be called twice alike."""
        expect = getattr(self._env.unwrapped, "expect", None)
        if expect is not None:
            self._guarded(lambda: expect(calls))
        return self.step(action)

    def close(self) -> None:
        """Let the environment go. What it raises now changes nothing of the episode, so it is only logged."""
        try:
            self._env.close()
        except Exception:
            log.warning("closing the environment of %s failed", self._task.env_id, exc_info=True)

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except ConfigError:  # an unknown environment or option is the user's mistake, in every episode alike: it ends the run
            raise
        except Exception as error:  # an environment is foreign code: whatever it raises ends the episode, not the run
            raise EpisodeFailed(StopReason.ENVIRONMENT_ERROR, f"{type(error).__name__}: {error}") from error


def make_registered(task: Task) -> gymnasium.Env[str, str]:
    """The environment that `task.env_id` names in gymnasium's registry; "module:id" imports the module first, which registers it.

    Its checker is left off: answers are checked here.
    """
    module, _, env_id = task.env_id.rpartition(":")
    try:
        importlib.import_module(module or "longstraw_agents.envs")  # another process (Ray's) knows neither yet
        gymnasium.spec(env_id)
    except (ImportError, gymnasium.error.Error) as error:
        raise ConfigError(
            f"unknown environment {task.env_id!r}: {error}; import the module that registers it first, or write 'module:id'"
        ) from error
    return gymnasium.make(env_id, disable_env_checker=True)


def task_key(task: Task) -> str:
    """The same for equal tasks, also after a way through JSON."""
    return json.dumps([task.env_id, task.seed, task.split, dict(task.options)], sort_keys=True, default=str)


def turn_seed(seed: int, task: Task, repeat: int, version: int, member: int, turn: int) -> int:
    """The seed of one action: a function of what it is for, so that a resumed episode samples what it would have sampled."""
    key = repr((seed, task_key(task), repeat, version, member, turn))
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def turn_notes(sampling: Sampling, rendered: Rendered) -> dict[str, Any]:
    """A turn's notes: how its action was sampled and how its observation stands to what was before, where that is not plain."""
    return {**sampling.notes(), **({} if rendered.history == "appended" else {"history": rendered.history})}


@dataclass
class Episode:
    """One attempt at one episode.

    `record(part, index, turn)` commits a turn, `begin(part)` begins another part, `in_thread` runs what may block, `seed_of`
    gives the seed of the episode's nth turn, `check` is called before each action and raises EpisodeFailed where the episode
    shall not go on, `session_of` names a part to the policy.
    """

    world: World
    policy: Policy
    renderer: Renderer
    sampling: Sampling
    limits: Limits
    seed_of: Callable[[int], int]
    record: Callable[[int, int, Turn], Awaitable[None]]
    begin: Callable[[int], Awaitable[None]]
    in_thread: Callable[..., Awaitable[Any]]
    check: Callable[[], None]
    session_of: Callable[[int], str]
    rewrite: Rewrite | None = None
    parts: list[list[Turn]] = field(default_factory=lambda: [[]])
    tokens: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))  # of the current part
    context: list[Message] = field(default_factory=list)  # what the current part says, actions included

    @property
    def turns(self) -> list[Turn]:
        """All turns so far."""
        return [turn for part in self.parts for turn in part]

    async def run(self, recorded: Sequence[Sequence[Turn]] = ()) -> Outcome:
        """Replay what is recorded, part by part, then go on to the end. Raises EpisodeFailed."""
        answer: Step = await self.in_thread(self.world.reset)
        rendered = self._first(answer.messages)
        replayed = 0
        for number, part in enumerate(recorded):
            for turn in part:
                if number != len(self.parts) - 1 or not np.array_equal(rendered.ids, turn.observation):
                    message = f"replayed, the environment says something else before turn {replayed}: it is not deterministic"
                    raise EpisodeFailed(StopReason.ENVIRONMENT_ERROR, message)
                replayed += 1
                answer = await self._act(turn.action, turn.tool_calls)
                self._keep(turn, answer)
                if (end := self._end(turn, answer)) is not None:
                    return end
                rendered = self._next(turn.action, answer.messages)
        return await self._go_on(rendered, begun=len(recorded))

    async def _go_on(self, rendered: Rendered, begun: int) -> Outcome:
        while True:
            self.check()
            part, index = len(self.parts) - 1, len(self.parts[-1])
            if part >= max(begun, 1):
                await self.begin(part)
                begun = part + 1
            room = self.limits.trajectory_tokens - len(self.tokens) - len(rendered.ids)
            if room < 1:
                return self._outcome(StopReason.TOKEN_LIMIT, False)
            prompt = np.concatenate([self.tokens, rendered.ids])
            sample = await self._sample(prompt, min(room, self.limits.action_tokens))
            answer = await self._act(sample.ids)
            turn = Turn(
                rendered.ids,
                sample.ids,
                sample.behaviour,
                sample.version,
                answer.reward,
                answer.reward_parts,
                answer.tool_calls,
                rendered.source,
                turn_notes(self.sampling, rendered),
            )
            await self.record(part, index, turn)
            self._keep(turn, answer)
            if (end := self._end(turn, answer)) is not None:
                return end
            rendered = self._next(sample.ids, answer.messages)

    async def _sample(self, tokens: TokenArray, room: int) -> Sample:
        session = self.session_of(len(self.parts) - 1)
        request = SampleRequest(session, tokens, room, self.seed_of(len(self.turns)), self.sampling)
        try:
            return await self.policy.sample(request)
        except ConfigError:
            raise
        except Exception as error:  # an engine or endpoint is foreign code, as an environment is
            raise EpisodeFailed(StopReason.POLICY_ERROR, f"{type(error).__name__}: {error}") from error

    async def _act(self, action: TokenArray, recorded: Sequence[ToolCall] | None = None) -> Step:
        """What the environment answers. An action that did not end by itself is never acted upon."""
        if int(action[-1]) not in self.renderer.stop_ids:
            return Step(())
        text = self.renderer.text(action)
        step = partial(self.world.step, text) if recorded is None else partial(self.world.repeat, text, recorded)
        answer: Step = await self.in_thread(step)
        return answer

    def _keep(self, turn: Turn, answer: Step) -> None:
        self.parts[-1].append(turn)
        self.tokens = np.concatenate([self.tokens, turn.observation, turn.action])
        self.context += [Message("assistant", self.renderer.text(turn.action)), *answer.messages]

    def _first(self, opening: Sequence[Message]) -> Rendered:
        self.context = list(opening)
        return self.renderer.first(opening)

    def _next(self, action: TokenArray, said: Sequence[Message]) -> Rendered:
        """The next observation: behind the action, or the beginning of a new part where the context is rewritten, by the caller's
        function or by the format itself."""
        rewritten = None if self.rewrite is None else self.rewrite(self.context, len(self.tokens))
        if rewritten is None:
            rendered = self.renderer.following(action, said, self.context[: -1 - len(said)])
            if rendered.history != "rewritten":
                return rendered
        self.parts.append([])
        self.tokens = self.tokens[:0]
        return rendered if rewritten is None else self._first(rewritten)

    def _end(self, turn: Turn, answer: Step) -> Outcome | None:
        if int(turn.action[-1]) not in self.renderer.stop_ids:
            full = len(self.tokens) >= self.limits.trajectory_tokens
            return self._outcome(StopReason.TOKEN_LIMIT if full else StopReason.ACTION_CUT, False)
        return None if answer.stop_reason is None else self._outcome(answer.stop_reason, answer.success)

    def _outcome(self, reason: StopReason, success: bool | None) -> Outcome:
        parts: Counter[str] = Counter()
        for turn in self.turns:
            parts.update(turn.reward_parts)
        return Outcome(reason, math.fsum(turn.reward for turn in self.turns), dict(parts), success)


@dataclass(frozen=True)
class KeepRecent:
    """A Rewrite: once a part has more than `tokens` tokens, go on with the opening messages and the last `messages` messages."""

    tokens: int
    messages: int = 6

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.messages < 1:
            raise ConfigError(f"tokens and messages must be at least 1, got {self.tokens} and {self.messages}")

    def __call__(self, context: Sequence[Message], tokens: int) -> Sequence[Message] | None:
        opening = list(itertools.takewhile(lambda message: message.role != "assistant", context))
        recent = context[max(len(opening), len(context) - self.messages) :]
        return [*opening, *recent] if tokens > self.tokens and len(recent) < len(context) - len(opening) else None


def _messages(observation: str, info: Mapping[str, Any]) -> tuple[Message, ...]:
    """What an environment says, without hidden secrets; one that gives no messages speaks as the user."""
    said = info["messages"] if "messages" in info else (Message("user", str(observation)),)
    return tuple(replace(message, content=redact(message.content)) for message in said)
