"""One episode: an environment and a policy take turns, and each turn is in the store before the next begins.

Idea: a turn is committed once its action was taken and its reward is known. Whatever ends the process in between loses that one
turn. To go on, the environment is made anew and given the recorded actions; its observations must be the recorded ones; then
sampling continues with the seeds that the missing turns would have had anyway.

Vocabulary
    replayed   brought to where the store ends by the recorded actions, without sampling
    failed     the environment or the policy raised, or broke its contract: such an episode has no reward
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import gymnasium
import numpy as np

from longstraw_agents.errors import ConfigError, LongStrawError, StoreError
from longstraw_agents.policies.sampling import Policy, Sample, SampleRequest, Sampling
from longstraw_agents.rendering import Rendered, Renderer
from longstraw_agents.storage.secrets import redact
from longstraw_agents.types import Message, StopReason, Task, TokenArray, ToolCall, Turn

T = TypeVar("T")
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

    def __init__(self, make: Callable[[Task], gymnasium.Env[str, str]], task: Task) -> None:
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
    """The environment that `task.env_id` names in gymnasium's registry. Its checker is left off: answers are checked here."""
    try:
        gymnasium.spec(task.env_id)
    except gymnasium.error.UnregisteredEnv as error:
        raise ConfigError(f"unknown environment {task.env_id!r}: {error}; import the module that registers it first") from error
    return gymnasium.make(task.env_id, disable_env_checker=True)


def task_key(task: Task) -> str:
    """The same for equal tasks, also after a way through JSON."""
    return json.dumps([task.env_id, task.seed, task.split, dict(task.options)], sort_keys=True, default=str)


def turn_seed(seed: int, task: Task, repeat: int, version: int, member: int, turn: int) -> int:
    """The seed of one action: a function of what it is for, so that a resumed episode samples what it would have sampled."""
    key = repr((seed, task_key(task), repeat, version, member, turn))
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


@dataclass
class Episode:
    """One attempt at one episode. `record` commits a turn, `in_thread` runs what may block, `seed_of` gives a turn's seed,
    `check` is called before each action and raises EpisodeFailed where the episode shall not go on."""

    session: str
    world: World
    policy: Policy
    renderer: Renderer
    sampling: Sampling
    limits: Limits
    seed_of: Callable[[int], int]
    record: Callable[[int, Turn], Awaitable[None]]
    in_thread: Callable[..., Awaitable[Any]]
    check: Callable[[], None]
    turns: list[Turn] = field(default_factory=list)
    tokens: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))

    async def run(self, recorded: Sequence[Turn] = ()) -> Outcome:
        """Replay what is recorded, then go on to the end. Raises EpisodeFailed."""
        answer: Step = await self.in_thread(self.world.reset)
        rendered = self.renderer.first(answer.messages)
        for turn in recorded:
            if not np.array_equal(rendered.ids, turn.observation):
                message = f"replayed, the environment says something else before turn {len(self.turns)}: it is not deterministic"
                raise EpisodeFailed(StopReason.ENVIRONMENT_ERROR, message)
            self._keep(turn)
            if (cut := self._cut(turn)) is not None:
                return self._outcome(cut, False)
            answer = await self.in_thread(self.world.step, self.renderer.text(turn.action))
            if answer.stop_reason is not None:
                return self._outcome(answer.stop_reason, answer.success)
            rendered = self.renderer.following(turn.action, answer.messages)
        return await self._go_on(rendered)

    async def _go_on(self, rendered: Rendered) -> Outcome:
        while True:
            self.check()
            room = self.limits.trajectory_tokens - len(self.tokens) - len(rendered.ids)
            if room < 1:
                return self._outcome(StopReason.TOKEN_LIMIT, False)
            sample = await self._sample(np.concatenate([self.tokens, rendered.ids]), min(room, self.limits.action_tokens))
            answer = Step(())
            if int(sample.ids[-1]) in self.renderer.stop_ids:
                answer = await self.in_thread(self.world.step, self.renderer.text(sample.ids))
            turn = Turn(
                rendered.ids,
                sample.ids,
                sample.behaviour,
                sample.version,
                answer.reward,
                answer.reward_parts,
                answer.tool_calls,
                rendered.source,
            )
            await self.record(len(self.turns), turn)
            self._keep(turn)
            if (cut := self._cut(turn)) is not None:
                return self._outcome(cut, False)
            if answer.stop_reason is not None:
                return self._outcome(answer.stop_reason, answer.success)
            rendered = self.renderer.following(sample.ids, answer.messages)

    async def _sample(self, tokens: TokenArray, room: int) -> Sample:
        request = SampleRequest(self.session, tokens, room, self.seed_of(len(self.turns)), self.sampling)
        try:
            return await self.policy.sample(request)
        except StoreError:
            raise
        except Exception as error:  # an engine or endpoint is foreign code, as an environment is
            raise EpisodeFailed(StopReason.POLICY_ERROR, f"{type(error).__name__}: {error}") from error

    def _keep(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.tokens = np.concatenate([self.tokens, turn.observation, turn.action])

    def _cut(self, turn: Turn) -> StopReason | None:
        """Why the episode ends here, where the action did not end by itself. Such an action is never acted upon."""
        if int(turn.action[-1]) in self.renderer.stop_ids:
            return None
        full = len(self.tokens) >= self.limits.trajectory_tokens
        return StopReason.TOKEN_LIMIT if full else StopReason.ACTION_CUT

    def _outcome(self, reason: StopReason, success: bool | None) -> Outcome:
        parts: Counter[str] = Counter()
        for turn in self.turns:
            parts.update(turn.reward_parts)
        return Outcome(reason, math.fsum(turn.reward for turn in self.turns), dict(parts), success)


def _messages(observation: str, info: Mapping[str, Any]) -> tuple[Message, ...]:
    """What an environment says, without hidden secrets; one that gives no messages speaks as the user."""
    said = info["messages"] if "messages" in info else (Message("user", str(observation)),)
    return tuple(replace(message, content=redact(message.content)) for message in said)
