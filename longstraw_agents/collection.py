"""Collecting groups of trajectories: many episodes at once on one policy, each turn in the store as it happens.

Idea: the store says what is there, and only what is missing is sampled. `collect` is told which tasks shall have a group; groups
that an earlier call began are completed, complete ones are left alone, so calling it again after a crash, or twice, does no work
twice. Episodes are taken up group by group, so groups become complete one after the other. A failed episode is tried again from
its last turn, then recorded with its reason; its siblings are kept.

Vocabulary
    plan       a task that shall have a group, and the group once there is one
    stale      begun under weights that are more than `max_staleness` versions older than the policy's
    progress   counts of this call so far: what it did, not what it found
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from longstraw_agents.episodes import Episode, EpisodeFailed, Limits, Outcome, World, make_registered, task_key, turn_seed
from longstraw_agents.errors import ConfigError
from longstraw_agents.policies.sampling import Policy, Sampling
from longstraw_agents.rendering import Renderer
from longstraw_agents.storage import GroupRow, Store
from longstraw_agents.types import FAILED, StopReason, Task, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CollectConfig:
    """concurrency: episodes at once; retries: further attempts at an episode that failed; max_staleness: versions that the
    policy may be ahead of the one a training group was begun under (0: none)."""

    sampling: Sampling = Sampling()
    max_action_tokens: int = 256
    max_trajectory_tokens: int = 8192
    concurrency: int = 32
    retries: int = 2
    max_staleness: int = 0
    environment_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("max_action_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("retries", "max_staleness"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_trajectory_tokens < 2:
            raise ConfigError(f"max_trajectory_tokens must be at least 2, got {self.max_trajectory_tokens}")
        if not self.environment_seconds > 0:
            raise ConfigError(f"environment_seconds must be positive, got {self.environment_seconds}")


@dataclass
class Progress:
    """Counts of one call: episodes to do and done, turns, tokens, rewards, failures by stop reason, attempts repeated."""

    total: int = 0
    episodes: int = 0
    turns: int = 0
    observation_tokens: int = 0
    action_tokens: int = 0
    rewarded: int = 0
    reward_sum: float = 0.0
    successes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    stop_reasons: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the call began."""
        return time.monotonic() - self.started

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second."""
        return self.action_tokens / max(self.seconds, 1e-9)

    @property
    def mean_reward(self) -> float | None:
        """Over the episodes with a valid reward."""
        return self.reward_sum / self.rewarded if self.rewarded else None


@dataclass(frozen=True)
class CollectResult:
    """group_ids: one per task, in the tasks' order (None for one not begun); complete: every member of every group finished."""

    group_ids: tuple[str | None, ...]
    complete: bool
    progress: Progress


@dataclass
class _Plan:
    task: Task
    repeat: int  # how many equal tasks stand before it in the call
    group_id: str | None = None
    version: int = 0
    finished: frozenset[int] = frozenset()
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


async def collect(
    store: Store,
    policy: Policy,
    renderer: Renderer,
    tasks: Sequence[Task],
    config: CollectConfig = CollectConfig(),
    *,
    run_id: str,
    group_size: int = 8,
    purpose: str = "train",
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
    make: Callable[[Task], gymnasium.Env[str, str]] = make_registered,
) -> CollectResult:
    """See to it that each task has a group of `group_size` finished trajectories in the run; sample only what is missing.

    A task's existing group counts if it has the same purpose and size, and for training is unused and not stale, for evaluation
    is of the policy's version. `progress` is called after each turn and each episode. After `stop` is set no turn is begun;
    what is open stays open, for the next call. Store errors end the call; everything committed stays.
    """
    if group_size < 1:
        raise ConfigError(f"group_size must be at least 1, got {group_size}")
    collector = _Collector(store, policy, renderer, config, run_id, group_size, purpose, seed, progress, stop, make)
    return await collector.run(tasks)


class _Stopped(Exception):
    """The call's `stop` was set: leave the episode open."""


@dataclass
class _Collector:
    store: Store
    policy: Policy
    renderer: Renderer
    config: CollectConfig
    run_id: str
    group_size: int
    purpose: str
    seed: int
    report: Callable[[Progress], None] | None
    stop: asyncio.Event | None
    make: Callable[[Task], gymnasium.Env[str, str]]

    async def run(self, tasks: Sequence[Task]) -> CollectResult:
        self.progress = Progress()
        self.threads = ThreadPoolExecutor(min(self.config.concurrency, 64), thread_name_prefix="longstraw-episode")
        try:
            plans = await self._in_thread(self._plans, tasks)
            work = [(plan, member) for plan in plans for member in range(self.group_size) if member not in plan.finished]
            self.progress.total = len(work)
            queue = iter(work)
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(self.config.concurrency, len(work))):
                    workers.create_task(self._work(queue))
        except* Exception as errors:
            raise _innermost(errors) from None
        finally:
            self.threads.shutdown(wait=False, cancel_futures=True)
        complete = self.progress.episodes == len(work)
        return CollectResult(tuple(plan.group_id for plan in plans), complete, self.progress)

    def _plans(self, tasks: Sequence[Task]) -> list[_Plan]:
        existing: defaultdict[str, list[GroupRow]] = defaultdict(list)
        for row in self.store.groups(self.run_id, purpose=self.purpose):
            if self._counts(row):
                existing[task_key(row.task)].append(row)
        seen: Counter[str] = Counter()
        plans = []
        for task in tasks:
            key = task_key(task)
            plan = _Plan(task, seen[key])
            seen[key] += 1
            if existing[key]:
                row = existing[key].pop(0)
                plan.group_id, plan.version = row.group_id, row.policy_version
                members = self.store.trajectories(row.group_id)
                plan.finished = frozenset(m.member for m in members if m.stop_reason is not None)
            plans.append(plan)
        return plans

    def _counts(self, row: GroupRow) -> bool:
        if row.size != self.group_size or row.step is not None:
            return False
        behind = self.policy.version - row.policy_version
        return 0 <= behind <= (self.config.max_staleness if self.purpose == "train" else 0)

    async def _work(self, queue: Iterator[tuple[_Plan, int]]) -> None:
        for plan, member in queue:
            if self._stopping():
                return
            try:
                await self._member(plan, member)
            except _Stopped:
                return

    async def _member(self, plan: _Plan, member: int) -> None:
        async with plan.lock:
            if plan.group_id is None:
                plan.version = self.policy.version
                plan.group_id = await self._in_thread(self._add_group, plan)
        trajectory_id = await self._in_thread(self.store.add_trajectory, plan.group_id, member)
        outcome = await self._outcome(plan, member, trajectory_id)
        await self._in_thread(
            lambda: self.store.finish_trajectory(
                trajectory_id, outcome.stop_reason, outcome.reward, outcome.reward_parts, success=outcome.success
            )
        )
        self._count(outcome)

    def _add_group(self, plan: _Plan) -> str:
        return self.store.add_group(self.run_id, plan.task, self.group_size, purpose=self.purpose, policy_version=plan.version)

    async def _outcome(self, plan: _Plan, member: int, trajectory_id: str) -> Outcome:
        """Attempts until one ends by itself or the retries are used up."""
        for attempt in range(self.config.retries + 1):
            try:
                return await self._attempt(plan, member, trajectory_id)
            except EpisodeFailed as failure:
                last = failure
                log.warning("%s, attempt %d: %s: %s", trajectory_id, attempt + 1, failure.reason, failure)
                if failure.reason is StopReason.CANCELLED:
                    break
                self.progress.retried += attempt < self.config.retries
                await asyncio.sleep(min(0.1 * 2**attempt, 5.0))
        return Outcome(last.reason, None, {}, None)

    async def _attempt(self, plan: _Plan, member: int, trajectory_id: str) -> Outcome:
        recorded = await self._in_thread(self.store.turns, trajectory_id)

        def seed_of(turn: int) -> int:
            return turn_seed(self.seed, plan.task, plan.repeat, plan.version, member, turn)

        async def record(index: int, turn: Turn) -> None:
            await self._in_thread(self.store.append_turn, trajectory_id, index, turn)
            self._count_turn(turn)

        world = await self._bounded(World, self.make, plan.task)
        limits = Limits(self.config.max_action_tokens, self.config.max_trajectory_tokens)
        episode = Episode(
            trajectory_id,
            world,
            self.policy,
            self.renderer,
            self.config.sampling,
            limits,
            seed_of,
            record,
            self._bounded,
            lambda: self._check(plan),
        )
        try:
            return await episode.run(recorded)
        finally:
            await self.policy.close_session(trajectory_id)
            await self._bounded(world.close)

    def _check(self, plan: _Plan) -> None:
        if self._stopping():
            raise _Stopped
        if self.purpose == "train" and self.policy.version - plan.version > self.config.max_staleness:
            raise EpisodeFailed(
                StopReason.CANCELLED, f"stale: begun under version {plan.version}, the policy is at {self.policy.version}"
            )

    def _stopping(self) -> bool:
        return self.stop is not None and self.stop.is_set()

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.threads, call, *arguments)

    async def _bounded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """For the environment's calls: one that takes too long fails its episode (its thread ends when the call does)."""
        try:
            return await asyncio.wait_for(self._in_thread(call, *arguments), self.config.environment_seconds)
        except TimeoutError:
            message = f"the environment took longer than {self.config.environment_seconds} s"
            raise EpisodeFailed(StopReason.ENVIRONMENT_ERROR, message) from None

    def _count_turn(self, turn: Turn) -> None:
        self.progress.turns += 1
        self.progress.observation_tokens += len(turn.observation)
        self.progress.action_tokens += len(turn.action)
        self._tell()

    def _count(self, outcome: Outcome) -> None:
        self.progress.episodes += 1
        self.progress.stop_reasons[outcome.stop_reason.value] += 1
        if outcome.stop_reason in FAILED:
            self.progress.failures[outcome.stop_reason.value] += 1
        if outcome.reward is not None:
            self.progress.rewarded += 1
            self.progress.reward_sum += outcome.reward
        self.progress.successes += bool(outcome.success)
        self._tell()

    def _tell(self) -> None:
        if self.report is not None:
            self.report(self.progress)


def _innermost(errors: BaseExceptionGroup[Exception]) -> Exception:
    """The first error of the workers: callers handle one error, not a group."""
    first: Any = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    error: Exception = first
    return error
