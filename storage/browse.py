"""Reading for people who look: one page of a long list, one stretch of a long trajectory, never all of it.

Idea: a page costs what it shows. Counts and spreads are made by the database; rows, turns and tokens are read for what the page
holds, and checked as everywhere else.

Vocabulary
    spread    of a group: the highest valid reward minus the lowest
    passage   consecutive tokens of one turn's observation or action, as they are stored: at most SPAN_TOKENS
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, and_, case, desc, func, or_, select

from longstraw_agents.errors import ConfigError, CorruptionError
from longstraw_agents.storage import blobs, listing, reading
from longstraw_agents.storage.listing import BLOBS, GROUPS, RUNS, STEP_GROUPS, STEPS, TRAJECTORIES, TURNS
from longstraw_agents.storage.reading import BRANCHES, SPANS
from longstraw_agents.storage.records import GroupRow, RunRow
from longstraw_agents.storage.store import Store
from longstraw_agents.types import LogpArray, TokenArray, ToolCall

ORDERS = ("spread", "newest", "oldest")


@dataclass(frozen=True)
class RunCounts:
    """What a run holds now. open: trajectories that have not finished; step: the last committed one, 0 before the first."""

    groups: int = 0
    trajectories: int = 0
    open: int = 0
    turns: int = 0
    tokens: int = 0
    step: int = 0


@dataclass(frozen=True)
class GroupSummary:
    """A group and what its trajectories came to; rewards are None where none is valid. tokens: the sum of their lengths."""

    group: GroupRow
    trajectories: int
    finished: int
    successes: int
    tokens: int
    lowest: float | None
    mean: float | None
    highest: float | None

    @property
    def spread(self) -> float | None:
        """Highest minus lowest valid reward."""
        return None if self.highest is None or self.lowest is None else self.highest - self.lowest


@dataclass(frozen=True)
class Gathered:
    """The collection of one step's groups: tokens, and when its first group began and its last trajectory ended."""

    step: int
    tokens: int
    began: float
    ended: float


@dataclass(frozen=True)
class TurnRow:
    """A turn without its tokens: observation [start, border), action [border, stop)."""

    index: int
    start: int
    border: int
    stop: int
    policy_version: int
    reward: float
    reward_parts: Mapping[str, float]
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class Passage:
    """Tokens from position `start` of a branch, on turn `turn`. begins: it is the first passage of its part of the turn."""

    branch: int
    turn: int
    start: int
    action: bool
    begins: bool
    digest: bytes
    ids: TokenArray


def run(store: Store, run_id: str) -> RunRow:
    """One run. Raises NotStoredError."""

    def action(connection: Connection) -> RunRow:
        row = listing.get(connection, RUNS, listing.key_of("r", run_id), run_id)
        return RunRow(run_id, row["name"], row["config"], row["created"])

    return store.database.read(action)


def counts(store: Store, run_id: str | None = None) -> dict[str, RunCounts]:
    """What each run (or one) holds, by run id; one that holds nothing may be missing."""
    key = None if run_id is None else listing.key_of("r", run_id)

    def action(connection: Connection) -> dict[str, RunCounts]:
        found: dict[int, dict[str, int]] = {}

        def gather(query: Any, names: Sequence[str]) -> None:
            for run, *values in connection.execute(query):
                found.setdefault(run, {}).update({name: int(value or 0) for name, value in zip(names, values, strict=True)})

        def one(column: Any) -> list[Any]:
            return [] if key is None else [column == key]

        gather(select(GROUPS.c.run_id, func.count()).where(*one(GROUPS.c.run_id)).group_by(GROUPS.c.run_id), ["groups"])
        t = TRAJECTORIES.c
        sums = (func.count(), func.count() - func.count(t.stop_reason), func.sum(t.turns), func.sum(t.length))
        joined = select(GROUPS.c.run_id, *sums).join(GROUPS, GROUPS.c.id == t.group_id).where(*one(GROUPS.c.run_id))
        gather(joined.group_by(GROUPS.c.run_id), ["trajectories", "open", "turns", "tokens"])
        gather(select(STEPS.c.run_id, func.max(STEPS.c.step)).where(*one(STEPS.c.run_id)).group_by(STEPS.c.run_id), ["step"])
        return {f"r{run}": RunCounts(**values) for run, values in found.items()}

    return store.database.read(action)


def group(store: Store, group_id: str) -> GroupRow:
    """One group. Raises NotStoredError."""

    def action(connection: Connection) -> GroupRow:
        key = listing.key_of("g", group_id)
        listing.get(connection, GROUPS, key, group_id)
        return listing.groups_of_keys(connection, [key])[0]

    return store.database.read(action)


def groups(
    store: Store, run_id: str, *, order: str = "spread", purpose: str | None = None, step: int | None = None,
    offset: int = 0, count: int = 50,
) -> list[GroupSummary]:  # fmt: skip
    """One page of a run's groups. order: one of ORDERS; "spread" puts the widest first. step: only those that it used.

    Raises ConfigError for another order, NotStoredError for an unknown run.
    """
    if order not in ORDERS:
        raise ConfigError(f"groups are ordered by one of {ORDERS}, got {order!r}")
    run = listing.key_of("r", run_id)

    def action(connection: Connection) -> list[GroupSummary]:
        listing.get(connection, RUNS, run, run_id)
        t = TRAJECTORIES.c
        spread = func.coalesce(func.max(t.reward) - func.min(t.reward), -1.0)
        query = _of_groups(spread).where(GROUPS.c.run_id == run).group_by(GROUPS.c.id)
        if purpose is not None:
            query = query.where(GROUPS.c.purpose == purpose)
        if step is not None:
            query = query.where(GROUPS.c.id.in_(select(STEP_GROUPS.c.group_id).where(STEP_GROUPS.c.step == step)))
        by = {"spread": [desc("spread"), GROUPS.c.id], "newest": [GROUPS.c.id.desc()], "oldest": [GROUPS.c.id]}[order]
        made = connection.execute(query.order_by(*by).offset(offset).limit(count)).all()
        rows = {row.group_id: row for row in listing.groups_of_keys(connection, [row[0] for row in made])}
        return [_summary(rows[f"g{row[0]}"], row) for row in made]

    return store.database.read(action)


def _of_groups(spread: ColumnElement[Any]) -> Any:
    t = TRAJECTORIES.c
    successes = func.coalesce(func.sum(case((t.success.is_(True), 1), else_=0)), 0)
    columns = (func.count(t.id), func.count(t.stop_reason), successes, func.coalesce(func.sum(t.length), 0))
    rewards = (func.min(t.reward), func.avg(t.reward), func.max(t.reward))
    joined = GROUPS.outerjoin(TRAJECTORIES, t.group_id == GROUPS.c.id)
    return select(GROUPS.c.id, spread.label("spread"), *columns, *rewards).select_from(joined)


def _summary(group: GroupRow, row: Any) -> GroupSummary:
    """From a row of `_of_groups`."""
    counted = {name: int(row[i]) for i, name in enumerate(("trajectories", "finished", "successes", "tokens"), start=2)}
    rewards = {name: None if row[i] is None else float(row[i]) for i, name in enumerate(("lowest", "mean", "highest"), start=6)}
    return GroupSummary(group, **counted, **rewards)


def gathered(store: Store, run_id: str, first: int = 0) -> list[Gathered]:
    """How the groups of each step, from step `first` on, were collected; steps without groups are left out."""
    run = listing.key_of("r", run_id)

    def action(connection: Connection) -> list[Gathered]:
        t, g = TRAJECTORIES.c, GROUPS.c
        query = (
            select(STEP_GROUPS.c.step, func.sum(t.length), func.min(g.created), func.max(t.finished))
            .join(GROUPS, g.id == STEP_GROUPS.c.group_id)
            .join(TRAJECTORIES, t.group_id == g.id)
            .where(STEP_GROUPS.c.run_id == run, STEP_GROUPS.c.step >= first)
            .group_by(STEP_GROUPS.c.step)
            .order_by(STEP_GROUPS.c.step)
        )
        return [Gathered(row[0], int(row[1]), row[2], row[3] or row[2]) for row in connection.execute(query)]

    return store.database.read(action)


def turns(store: Store, trajectory_id: str, first: int, count: int) -> list[TurnRow]:
    """Turns [first, first + count) of a trajectory, open or finished, checked, with their tool calls and without tokens."""

    def action(connection: Connection) -> list[TurnRow]:
        lineage = reading.lineage_of(connection, _trajectory(connection, trajectory_id))
        return [
            TurnRow(
                index=(row := stored.row)["turn"],
                start=row["start"],
                border=row["start"] + row["observation_tokens"],
                stop=stored.stop,
                policy_version=row["policy_version"],
                reward=row["reward"],
                reward_parts=row["reward_parts"] or {},
                tool_calls=tuple(reading.read_call(connection, call) for call in stored.calls),
            )
            for stored in reading.read_turns(connection, lineage, first, first + count)
        ]

    return store.database.read(action)


def turn_at(store: Store, trajectory_id: str, position: int) -> int:
    """The index of the turn that holds a position; the last turn's for one behind the end."""

    def action(connection: Connection) -> int:
        lineage = reading.lineage_of(connection, _trajectory(connection, trajectory_id))
        for stretch in reversed(lineage.stretches):
            inside = (TURNS.c.branch_id == stretch.branch_id, TURNS.c.turn < stretch.end_turn, TURNS.c.start <= position)
            found = connection.execute(select(func.max(TURNS.c.turn)).where(*inside)).scalar()
            if found is not None:
                return int(found)
        return 0

    return store.database.read(action)


def read_ranges(
    store: Store, trajectory_id: str, ranges: Sequence[tuple[int, int]]
) -> list[tuple[TokenArray, LogpArray]]:
    """For each [start, stop) its ids and behaviour log-probabilities, both [stop - start], from one state of the store.

    Log-probabilities are NaN where the token was not sampled. Raises StoreError for a range outside the trajectory.
    """

    def action(connection: Connection) -> list[tuple[TokenArray, LogpArray]]:
        lineage = reading.lineage_of(connection, _trajectory(connection, trajectory_id))
        return [_range(connection, lineage, start, stop) for start, stop in ranges]

    return store.database.read(action)


def _range(connection: Connection, lineage: reading.Lineage, start: int, stop: int) -> tuple[TokenArray, LogpArray]:
    ids, logp = np.zeros(stop - start, np.int32), np.full(stop - start, np.nan, np.float32)
    for span in reading.read_spans(connection, lineage, start, stop, behaviour=True):
        low, high = max(start, span.start), min(stop, span.stop)
        inside, own = slice(low - start, high - start), slice(low - span.start, high - span.start)
        ids[inside] = span.ids[own]
        if span.behaviour is not None:
            logp[inside] = span.behaviour[own]
    return ids, logp


def _trajectory(connection: Connection, trajectory_id: str) -> Any:
    return listing.get(connection, TRAJECTORIES, listing.key_of("t", trajectory_id), trajectory_id)


# ---- all text of a run or a trajectory, piece by piece


Place = tuple[int, int]  # branch and position


def passages(
    store: Store, run_id: str, *, trajectory_id: str | None = None, after: Place | None = None, batch: int = 256
) -> Iterator[Passage]:
    """All that is stored of a run (or of one trajectory), each shared turn once: newest branches first, each from its start.

    `after`: where an earlier reading stopped. Blobs are read `batch` at a time and checked. Raises CorruptionError for damage.
    """
    run = listing.key_of("r", run_id)
    position: Place | None = after
    while True:
        found = store.database.read(partial(_passages, run=run, trajectory_id=trajectory_id, after=position, batch=batch))
        yield from found
        if not found:
            return
        position = (found[-1].branch, found[-1].start)


def _passages(connection: Connection, run: int, trajectory_id: str | None, after: Place | None, batch: int) -> list[Passage]:
    if trajectory_id is None:
        inside: ColumnElement[bool] = BRANCHES.c.run_id == run
    else:
        lineage = reading.lineage_of(connection, _trajectory(connection, trajectory_id))
        c = SPANS.c
        parts = [and_(c.branch_id == s.branch_id, c.start >= s.start, c.start < s.stop) for s in lineage.stretches]
        inside = or_(*parts) if parts else BRANCHES.c.id.is_(None)
    query = (
        select(SPANS.c.branch_id, SPANS.c.start, SPANS.c.tokens, SPANS.c.behaviour, BLOBS.c.data)
        .join(BRANCHES, BRANCHES.c.id == SPANS.c.branch_id)
        .outerjoin(BLOBS, BLOBS.c.digest == SPANS.c.tokens)
        .where(inside)
        .order_by(BRANCHES.c.id.desc(), SPANS.c.start)
        .limit(batch)
    )
    if after is not None:
        branch, start = after
        query = query.where(BRANCHES.c.id <= branch, or_(BRANCHES.c.id < branch, SPANS.c.start > start))
    found: list[Passage] = []
    for branch, rows in groupby(connection.execute(query).all(), key=lambda row: row[0]):
        spans = list(rows)
        for row, (turn, begin, border) in zip(spans, _turns_of(connection, branch, [r[1] for r in spans]), strict=True):
            if row[4] is None:
                raise CorruptionError(f"blob {bytes(row[2]).hex()} is missing; `longstraw db check` lists what is affected")
            ids = blobs.decode_ids(blobs.decompress(row[2], row[4]))
            action = row[1] >= border
            found.append(Passage(branch, turn, row[1], action, row[1] == (border if action else begin), bytes(row[2]), ids))
    return found


def _turns_of(connection: Connection, branch: int, starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(turn, start, border) of the turn that holds each of the ascending positions of a branch."""
    t = TURNS.c
    last = select(func.max(t.start)).where(t.branch_id == branch, t.start <= starts[0]).scalar_subquery()
    query = select(t.turn, t.start, t.observation_tokens).where(t.branch_id == branch, t.start >= last, t.start <= starts[-1])
    rows = connection.execute(query.order_by(t.turn)).all()
    at = 0
    for start in starts:
        while at + 1 < len(rows) and rows[at + 1][1] <= start:
            at += 1
        turn, begin, observation = rows[at]
        yield turn, begin, begin + observation


def through(store: Store, run_id: str, places: Sequence[tuple[int, int]]) -> list[str | None]:
    """For each (branch, turn) a trajectory that goes through it; None where no trajectory does."""
    run = listing.key_of("r", run_id)

    def action(connection: Connection) -> list[str | None]:
        b, t = BRANCHES.c, TRAJECTORIES.c
        children: dict[int, list[tuple[int, int]]] = {}
        for child, parent, fork in connection.execute(select(b.id, b.parent_id, b.fork_turn).where(b.run_id == run)):
            children.setdefault(parent, []).append((child, fork))

        def find(branch: int, turn: int) -> str | None:
            waiting = [branch]
            while waiting:
                at = waiting.pop()
                query = select(func.min(t.id)).where(t.branch_id == at, t.turns > turn)
                if (found := connection.execute(query).scalar()) is not None:
                    return f"t{found}"
                waiting += [child for child, fork in children.get(at, []) if fork > turn]
            return None

        return [find(branch, turn) for branch, turn in places]

    return store.database.read(action)
