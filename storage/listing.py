"""Rows as records: the queries behind `Store`'s lists."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, func, select

from longstraw_agents.errors import CorruptionError, NotStoredError
from longstraw_agents.storage.records import EvaluationRow, GroupRow, RunRow, StepRow, StoreStats, TrajectoryRow
from longstraw_agents.storage.rows import Row, checked, fetch, fetch_all
from longstraw_agents.storage.schema import (
    BlobTable,
    EvaluationTable,
    GroupTable,
    RunTable,
    StepGroupTable,
    StepTable,
    StoreTable,
    TaskTable,
    TrajectoryTable,
    TurnTable,
)
from longstraw_agents.types import StopReason, Task

STORE, RUNS, TASKS, GROUPS, TRAJECTORIES, STEPS, STEP_GROUPS, EVALUATIONS, TURNS, BLOBS = (
    model.__table__
    for model in (
        StoreTable,
        RunTable,
        TaskTable,
        GroupTable,
        TrajectoryTable,
        StepTable,
        StepGroupTable,
        EvaluationTable,
        TurnTable,
        BlobTable,
    )
)

_KINDS = {"r": "run", "g": "group", "t": "trajectory", "e": "evaluation"}


def key_of(kind: str, public_id: str) -> int:
    """The row's key in a public id such as "t12". Raises NotStoredError for an id of another form."""
    found = re.fullmatch(rf"{kind}([1-9][0-9]{{0,17}})", public_id) if isinstance(public_id, str) else None
    if found is None:
        raise NotStoredError(f"{public_id!r} is no id of a {_KINDS[kind]}; they look like {kind}1")
    return int(found[1])


def get(connection: Connection, table: Table, key: int, public_id: str, *, lock: bool = False) -> Row:
    """The row with this key, checked. Raises NotStoredError if there is none."""
    row = fetch(connection, table, lock=lock, id=key)
    if row is None:
        raise NotStoredError(f"{_KINDS[public_id[0]]} {public_id} is not in the store")
    return row


def parsed(text: str) -> Any:
    """JSON text as values."""
    return json.loads(text)


def store_row(connection: Connection, *, lock: bool = False) -> Row:
    """The store's own row."""
    row = fetch(connection, STORE, lock=lock, id=1)
    if row is None:
        raise CorruptionError("the row that counts the store's runs is missing; restore the store from a copy")
    return row


def runs(connection: Connection) -> list[RunRow]:
    """All runs, oldest first."""
    rows = fetch_all(connection, RUNS, store_row(connection)["runs"])
    return [RunRow(f"r{row['id']}", row["name"], row["config"], row["created"]) for row in rows]


def task(connection: Connection, key: int) -> Task:
    """A task, checked."""
    row = fetch(connection, TASKS, id=key)
    if row is None:
        raise CorruptionError(f"task {key} is missing; restore the store from a copy")
    return _task(row)


def _task(row: Row) -> Task:
    return Task(**{name: row[name] for name in ("env_id", "seed", "split", "options")})


def groups(connection: Connection, run: int) -> list[GroupRow]:
    """All groups of a run, oldest first."""
    owner = get(connection, RUNS, run, f"r{run}")
    rows = fetch_all(connection, GROUPS, owner["groups"], run_id=run)
    used = fetch_all(connection, STEP_GROUPS, owner["groups_used"], run_id=run)
    return _group_rows(connection, rows, used, GROUPS.c.run_id == run)


def groups_of_keys(connection: Connection, keys: Sequence[int]) -> list[GroupRow]:
    """The groups with these keys, oldest first."""
    chosen = GROUPS.c.id.in_(keys)
    rows = [checked(GROUPS, row) for row in connection.execute(select(GROUPS).where(chosen).order_by(GROUPS.c.id)).mappings()]
    used = connection.execute(select(STEP_GROUPS).where(STEP_GROUPS.c.group_id.in_(keys))).mappings()
    return _group_rows(connection, rows, [checked(STEP_GROUPS, row) for row in used], chosen)


def _group_rows(connection: Connection, rows: list[Row], used: list[Row], chosen: ColumnElement[bool]) -> list[GroupRow]:
    """The records of checked rows; `used`: their rows in step_groups, `chosen`: the condition that they meet."""
    query = select(TASKS).where(TASKS.c.id.in_(select(GROUPS.c.task_id).where(chosen)))
    tasks = {row["id"]: _task(checked(TASKS, row)) for row in connection.execute(query).mappings()}
    step_of = {row["group_id"]: row["step"] for row in used}
    return [
        GroupRow(
            group_id=f"g{row['id']}",
            run_id=f"r{row['run_id']}",
            task=tasks[row["task_id"]],
            complete=row["members"] == row["size"] and row["finished"] == row["trajectories"],
            step=step_of.get(row["id"]),
            **{name: row[name] for name in ("size", "purpose", "policy_version", "created")},
        )
        for row in rows
    ]


def trajectory_values(connection: Connection, group: Row) -> list[Row]:
    """The checked rows of a group's trajectories, by member and part. Raises CorruptionError if one is missing."""
    try:
        rows = fetch_all(connection, TRAJECTORIES, group["trajectories"], group_id=group["id"])
    except CorruptionError as error:
        raise CorruptionError(f"group g{group['id']}: {error}") from None
    counts = {"members": sum(not row["part"] for row in rows), "finished": sum(row["stop_reason"] is not None for row in rows)}
    if any(group[name] != count for name, count in counts.items()):
        raise CorruptionError(f"group g{group['id']} counts others than were found ({counts}); restore it from a copy")
    return sorted(rows, key=lambda row: (row["member"], row["part"]))


def trajectories(connection: Connection, group: int, group_id: str) -> list[TrajectoryRow]:
    """The group's trajectories."""
    return [trajectory_row(row) for row in trajectory_values(connection, get(connection, GROUPS, group, group_id))]


def open_trajectories(connection: Connection, run: int) -> list[TrajectoryRow]:
    """The run's open trajectories, by group, member and part."""
    owner = get(connection, RUNS, run, f"r{run}")
    groups = fetch_all(connection, GROUPS, owner["groups"], run_id=run)
    unfinished = [group for group in groups if group["finished"] < group["trajectories"]]
    rows = [row for group in unfinished for row in trajectory_values(connection, group)]
    return [trajectory_row(row) for row in rows if row["stop_reason"] is None]


def trajectory_row(row: Row) -> TrajectoryRow:
    """The record of a checked row."""
    names = ("member", "part", "weight", "turns", "length", "reward", "reward_parts", "success", "created", "finished")
    return TrajectoryRow(
        trajectory_id=f"t{row['id']}",
        group_id=f"g{row['group_id']}",
        parent=None if row["parent_id"] is None else f"t{row['parent_id']}",
        stop_reason=None if row["stop_reason"] is None else StopReason(row["stop_reason"]),
        **{name: row[name] for name in names},
    )


def groups_of_step(connection: Connection, step: Row) -> list[int]:
    """Keys of the groups that a step used, in order."""
    rows = fetch_all(connection, STEP_GROUPS, step["groups"], run_id=step["run_id"], step=step["step"])
    return [row["group_id"] for row in sorted(rows, key=lambda row: row["position"])]


def steps(connection: Connection, run: int, *, first: int = 0, count: int | None = None) -> list[StepRow]:
    """Steps of a run in order, from step `first` on, at most `count`. They are numbered without a gap."""
    owner = get(connection, RUNS, run, f"r{run}")
    if owner["last_step"] is None:
        return []
    begin, end = max(first, owner["last_step"] + 1 - owner["steps"]), owner["last_step"] + 1
    wanted = range(begin, end if count is None else min(end, begin + count))

    def rows_of(table: Table) -> list[Row]:
        inside = (table.c.run_id == run, table.c.step >= wanted.start, table.c.step < wanted.stop)
        return [checked(table, row) for row in connection.execute(select(table).where(*inside).order_by(table.c.step)).mappings()]

    rows, used = rows_of(STEPS), rows_of(STEP_GROUPS)
    if [row["step"] for row in rows] != list(wanted):
        raise CorruptionError(f"steps {wanted.start} to {wanted.stop - 1} of run r{run} are not all there; restore from a copy")
    used_by: dict[int, list[Row]] = {number: [] for number in wanted}
    for one in used:
        used_by[one["step"]].append(one)
    return [_step(row, used_by[row["step"]]) for row in rows]


def latest_step(connection: Connection, run: int) -> StepRow | None:
    """The last step of a run."""
    last = get(connection, RUNS, run, f"r{run}")["last_step"]
    return None if last is None else steps(connection, run, first=last)[0]


def _step(row: Row, used: list[Row]) -> StepRow:
    if len({one["group_id"] for one in used}) != row["groups"]:
        raise CorruptionError(f"step {row['step']} used {row['groups']} groups, {len(used)} were found; restore from a copy")
    names = ("step", "first_version", "last_version", "files", "receipt", "created")
    groups = tuple(f"g{one['group_id']}" for one in sorted(used, key=lambda one: one["position"]))
    return StepRow(run_id=f"r{row['run_id']}", group_ids=groups, **{name: row[name] for name in names})


def evaluations(connection: Connection, run: int) -> list[EvaluationRow]:
    """All evaluations of a run, oldest first."""
    rows = fetch_all(connection, EVALUATIONS, get(connection, RUNS, run, f"r{run}")["evaluations"], run_id=run)
    names = ("name", "policy_version", "metrics", "created")
    return [EvaluationRow(f"e{row['id']}", f"r{row['run_id']}", **{name: row[name] for name in names}) for row in rows]


def stats(connection: Connection, size: int) -> StoreStats:
    """Counts and bytes of the whole store."""

    def count(table: Table) -> int:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()

    tokens = connection.execute(select(func.sum(TRAJECTORIES.c.length))).scalar()
    bytes_ = connection.execute(select(func.sum(func.length(BLOBS.c.data)))).scalar()
    counts = {t.name: count(t) for t in (RUNS, GROUPS, TRAJECTORIES, TURNS, STEPS, EVALUATIONS, BLOBS)}
    return StoreStats(**counts, tokens=int(tokens or 0), blob_bytes=int(bytes_ or 0), size_bytes=size)
