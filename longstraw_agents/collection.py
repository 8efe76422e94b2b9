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
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from longstraw_agents.episodes import (
    Episode,
    EpisodeFailed,
    Limits,
    Make,
    Outcome,
    Rewrite,
    World,
    make_registered,
    task_key,
    turn_seed,
)
from longstraw_agents.errors import ConfigError
from longstraw_agents.forking import Chooser, TreeConfig
from longstraw_agents.policies.sampling import Policy, Sampling
from longstraw_agents.rendering import Renderer
from longstraw_agents.storage import GroupRow, Store, TrajectoryRow
from longstraw_agents.types import FAILED, StopReason, Task, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CollectConfig:
    """concurrency: episodes at once; retries: further attempts at an episode that failed; max_staleness: versions that the
    policy may be ahead of the one a training group was begun under (0: none); environment_seconds: for one call of one.

    tree: members branch from others late (None: all from the beginning). workers: environments run in threads here, or in
    `ray_workers` processes of the Ray cluster at `ray_address` (None: one is started here)."""

    sampling: Sampling = Sampling()
    max_action_tokens: int = 256
    max_trajectory_tokens: int = 8192
    concurrency: int = 32
    retries: int = 2
    max_staleness: int = 0
    environment_seconds: float = 600.0
    tree: TreeConfig | None = None
    workers: Literal["threads", "ray"] = "threads"
    ray_address: str | None = None
    ray_workers: int = 2

    def __post_init__(self) -> None:
        for name in ("max_action_tokens", "concurrency", "ray_workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("retries", "max_staleness"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_trajectory_tokens < 2:
            raise ConfigError(f"max_trajectory_tokens must be at least 2, got {self.max_trajectory_tokens}")
        if self.workers not in ("threads", "ray"):
            raise ConfigError(f'workers must be "threads" or "ray", got {self.workers!r}')
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
    trajectories: dict[int, list[str]] = field(default_factory=dict)  # of the members that the store has, one per part
    finished: set[int] = field(default_factory=set)
    left: int = 0  # members that are not finished
    kept: list[str] = field(default_factory=list)  # sessions to close when all are
    ended: defaultdict[int, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        """The group's id, once there is one."""
        assert self.group_id is not None
        return self.group_id


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
    make: Make = make_registered,
    rewrite: Rewrite | None = None,
    fork: Chooser | None = None,
) -> CollectResult:
    """See to it that each task has a group of `group_size` finished trajectories in the run; sample only what is missing.

    A task's existing group counts if it has the same purpose and size, and for training is unused and not stale, for evaluation
    is of the policy's version. `progress` is called after each turn and each episode. After `stop` is set no turn is begun;
    what is open stays open, for the next call. Store errors end the call; everything committed stays.

    rewrite: where an episode's context is to be rewritten (see `episodes.Rewrite`, `KeepRecent`); it then goes on in a part of
    its own. fork: names the turn at which a branch leaves its trunk, in place of `config.tree.by`.
    """
    if group_size < 1:
        raise ConfigError(f"group_size must be at least 1, got {group_size}")
    if purpose == "train" and not getattr(policy, "exact", True):
        raise ConfigError("this policy makes its token ids from text: they are no evidence for training; use it for evaluation")
    tree = config.tree or (TreeConfig() if fork is not None else None)
    if tree is not None and rewrite is not None:
        raise ConfigError("an episode whose context is rewritten has no single trunk to branch from; use one or the other")
    chooser = fork or (None if tree is None else tree.chooser())
    with _environments(config, make) as made:
        collector = _Collector(
            store=store,
            policy=policy,
            renderer=renderer,
            config=config,
            run_id=run_id,
            group_size=group_size,
            purpose=purpose,
            seed=seed,
            report=progress,
            stop=stop,
            make=made,
            rewrite=rewrite,
            fork=chooser,
            trunks=0 if tree is None else tree.trunks,
        )
        return await collector.run(tasks)


@contextmanager
def _environments(config: CollectConfig, make: Make) -> Iterator[Make]:
    """How environments are made: here, or in Ray's processes while the call lasts."""
    if config.workers == "threads":
        yield make
        return
    from longstraw_agents.workers import RayWorkers

    with RayWorkers(make, config.ray_address, config.ray_workers) as workers:
        yield workers.make


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
    make: Make
    rewrite: Rewrite | None
    fork: Chooser | None
    trunks: int

    async def run(self, tasks: Sequence[Task]) -> CollectResult:
        """Collect all tasks; see `collect`."""
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
                self._find_members(plan, row.group_id)
            plan.left = self.group_size - len(plan.finished)
            plans.append(plan)
        return plans

    def _find_members(self, plan: _Plan, group_id: str) -> None:
        members: defaultdict[int, list[TrajectoryRow]] = defaultdict(list)
        for row in self.store.trajectories(group_id):
            members[row.member].append(row)
        for member, parts in members.items():
            plan.trajectories[member] = [row.trajectory_id for row in parts]
        plan.finished = {m for m, parts in members.items() if all(row.stop_reason is not None for row in parts)}
        for member in plan.finished:
            plan.ended[member].set()

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
        try:
            trajectory_ids = await self._begun(plan, member)
            outcome = await self._outcome(plan, member, trajectory_ids)
            await self._in_thread(self._finish, trajectory_ids, outcome)
            plan.trajectories[member] = trajectory_ids
            plan.finished.add(member)
        finally:
            plan.ended[member].set()
        plan.left -= 1
        if plan.left == 0:
            for session in plan.kept:
                await self.policy.close_session(session)
        self._count(outcome)

    async def _begun(self, plan: _Plan, member: int) -> list[str]:
        """The member's trajectories, one per part. A branch waits until its trunk has ended."""
        if member in plan.trajectories:
            return plan.trajectories[member]
        if self.fork is None or member < self.trunks:
            return [await self._in_thread(self.store.add_trajectory, plan.name, member)]
        number, trunk = divmod(member - self.trunks, self.trunks)
        await plan.ended[trunk].wait()
        if trunk not in plan.finished:  # it was stopped
            raise _Stopped
        parent = plan.trajectories[trunk][0]
        turns = await self._in_thread(self.store.turns, parent)
        at = min(max(self.fork(turns, number), 0), len(turns) - 1) if turns else 0
        add = partial(self.store.add_trajectory, plan.name, member, parent=parent, parent_turns=at or None)
        return [await self._in_thread(add)]

    def _finish(self, trajectory_ids: Sequence[str], outcome: Outcome) -> None:
        """All parts end alike and share the episode's weight. The last one goes first: while one is open all are resumed."""
        for trajectory_id in reversed(trajectory_ids):
            self.store.finish_trajectory(
                trajectory_id,
                outcome.stop_reason,
                outcome.reward,
                outcome.reward_parts,
                success=outcome.success,
                weight=1.0 / len(trajectory_ids),
            )

    def _add_group(self, plan: _Plan) -> str:
        return self.store.add_group(self.run_id, plan.task, self.group_size, purpose=self.purpose, policy_version=plan.version)

    async def _outcome(self, plan: _Plan, member: int, trajectory_ids: list[str]) -> Outcome:
        """Attempts until one ends by itself or the retries are used up."""
        for attempt in range(self.config.retries + 1):
            try:
                return await self._attempt(plan, member, trajectory_ids)
            except EpisodeFailed as failure:
                last = failure
                log.warning("%s, attempt %d: %s: %s", trajectory_ids[-1], attempt + 1, failure.reason, failure)
                if failure.reason is StopReason.CANCELLED:
                    break
                self.progress.retried += attempt < self.config.retries
                await asyncio.sleep(min(0.1 * 2**attempt, 5.0))
        return Outcome(last.reason, None, {}, None)

    async def _attempt(self, plan: _Plan, member: int, trajectory_ids: list[str]) -> Outcome:
        recorded = [await self._in_thread(self.store.turns, trajectory_id) for trajectory_id in trajectory_ids]

        def seed_of(turn: int) -> int:
            return turn_seed(self.seed, plan.task, plan.repeat, plan.version, member, turn)

        async def record(part: int, index: int, turn: Turn) -> None:
            await self._in_thread(self.store.append_turn, trajectory_ids[part], index, turn)
            self._count_turn(turn)

        async def begin(part: int) -> None:
            add = partial(self.store.add_trajectory, plan.name, member, parent=trajectory_ids[-1])
            trajectory_ids.append(await self._in_thread(add))

        world = await self._bounded(World, self.make, plan.task)
        episode = Episode(
            world=world,
            policy=self.policy,
            renderer=self.renderer,
            sampling=self.config.sampling,
            limits=Limits(self.config.max_action_tokens, self.config.max_trajectory_tokens),
            seed_of=seed_of,
            record=record,
            begin=begin,
            in_thread=self._bounded,
            check=lambda: self._check(plan),
            session_of=lambda part: trajectory_ids[part],
            rewrite=self.rewrite,
        )
        try:
            return await episode.run(recorded)
        finally:
            if self.fork is not None and member < self.trunks:
                plan.kept += trajectory_ids  # a branch takes over what the policy holds of its trunk
            else:
                for session in trajectory_ids:
                    await self.policy.close_session(session)
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
