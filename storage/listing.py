"""Rows as records: the queries behind `Store`'s lists."""

from __future__ import annotations

import json
import re
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, func, select

from longstraw_agents.errors import CorruptionError, NotStoredError
from longstraw_agents.storage import blobs
from longstraw_agents.storage.database import Database
from longstraw_agents.storage.records import EvaluationRow, GroupRow, RunRow, StepRow, StoreStats, TrajectoryRow
from longstraw_agents.storage.rows import Row, checked, fetch
from longstraw_agents.storage.schema import (
    BlobTable,
    EvaluationTable,
    GroupTable,
    RunTable,
    StepGroupTable,
    StepTable,
    TaskTable,
    TrajectoryTable,
    TurnTable,
)
from longstraw_agents.types import StopReason, Task

RUNS, TASKS, GROUPS, TRAJECTORIES, STEPS, STEP_GROUPS, EVALUATIONS, TURNS, BLOBS = (
    model.__table__
    for model in (
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
    row = fetch(connection, table, table.c.id == key, lock=lock)
    if row is None:
        raise NotStoredError(f"{_KINDS[public_id[0]]} {public_id} is not in the store")
    return row


def require(database: Database, table: Table, key: int, public_id: str) -> None:
    """Raises NotStoredError if there is no such row."""
    database.read(lambda connection: get(connection, table, key, public_id))


def parsed(text: str) -> Any:
    """JSON text as values."""
    return json.loads(text)


def runs(connection: Connection) -> list[RunRow]:
    """All runs, oldest first."""
    rows = [checked(RUNS, row) for row in connection.execute(select(RUNS).order_by(RUNS.c.id)).mappings()]
    return [RunRow(f"r{row['id']}", row["name"], row["config"], row["created"]) for row in rows]


def task(connection: Connection, key: int) -> Task:
    """A task, checked against its digest."""
    row = connection.execute(select(TASKS).where(TASKS.c.id == key)).mappings().one_or_none()
    if row is None:
        raise CorruptionError(f"task {key} is missing; restore the store from a copy")
    return _task(dict(row))


def _task(row: Row) -> Task:
    values = {name: row[name] for name in ("env_id", "seed", "split", "options")}
    if blobs.seal("task", values) != row["digest"]:
        raise CorruptionError(f"task {row['id']} does not fit its digest; restore the store from a copy")
    return Task(**values)


def groups(connection: Connection, run: int, run_id: str) -> list[GroupRow]:
    """All groups of a run, oldest first."""
    get(connection, RUNS, run, run_id)
    return group_rows(connection, GROUPS.c.run_id == run)


def group_rows(connection: Connection, where: ColumnElement[bool]) -> list[GroupRow]:
    """The groups that meet `where`, a condition on their columns, oldest first."""
    rows = [
        checked(GROUPS, row) for row in connection.execute(select(GROUPS).where(where).order_by(GROUPS.c.id)).mappings()
    ]
    tasks = select(TASKS).where(TASKS.c.id.in_(select(GROUPS.c.task_id).where(where)))
    by_id = {row["id"]: _task(dict(row)) for row in connection.execute(tasks).mappings()}
    used = select(STEP_GROUPS.c.group_id, STEP_GROUPS.c.step).join(GROUPS, GROUPS.c.id == STEP_GROUPS.c.group_id).where(where)
    steps_of = {row[0]: row[1] for row in connection.execute(used)}
    finished = (
        select(
            TRAJECTORIES.c.group_id,
            func.count(func.distinct(TRAJECTORIES.c.member)),
            func.count(),
            func.count(TRAJECTORIES.c.stop_reason),
        )
        .join(GROUPS, GROUPS.c.id == TRAJECTORIES.c.group_id)
        .where(where)
        .group_by(TRAJECTORIES.c.group_id)
    )
    members = {row[0]: row[1] if row[2] == row[3] else -1 for row in connection.execute(finished)}
    return [
        GroupRow(
            f"g{row['id']}",
            f"r{row['run_id']}",
            by_id[row["task_id"]],
            row["size"],
            row["purpose"],
            row["policy_version"],
            members.get(row["id"]) == row["size"],
            steps_of.get(row["id"]),
            row["created"],
        )
        for row in rows
    ]


def trajectory_values(connection: Connection, group: Row) -> list[Row]:
    """The checked rows of a group's trajectories, by member and part. Raises CorruptionError if one is missing."""
    query = select(TRAJECTORIES).where(TRAJECTORIES.c.group_id == group["id"])
    found = connection.execute(query.order_by(TRAJECTORIES.c.member, TRAJECTORIES.c.part)).mappings()
    rows = [checked(TRAJECTORIES, row) for row in found]
    if len(rows) != group["trajectories"]:
        raise CorruptionError(
            f"group g{group['id']} has {group['trajectories']} trajectories, {len(rows)} were found; restore it from a copy"
        )
    return rows


def trajectories(connection: Connection, group: int, group_id: str) -> list[TrajectoryRow]:
    """The group's trajectories."""
    return [trajectory_row(row) for row in trajectory_values(connection, get(connection, GROUPS, group, group_id))]


def open_trajectories(connection: Connection, run: int) -> list[TrajectoryRow]:
    """The run's open trajectories, by group, member and part."""
    query = select(TRAJECTORIES).join(GROUPS, GROUPS.c.id == TRAJECTORIES.c.group_id)
    query = query.where(GROUPS.c.run_id == run, TRAJECTORIES.c.stop_reason.is_(None))
    order = (TRAJECTORIES.c.group_id, TRAJECTORIES.c.member, TRAJECTORIES.c.part)
    rows = connection.execute(query.order_by(*order)).mappings()
    return [trajectory_row(checked(TRAJECTORIES, row)) for row in rows]


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


def groups_of_step(connection: Connection, run: int, step: int) -> list[int]:
    """Keys of the groups that a step used, in order."""
    query = select(STEP_GROUPS.c.group_id).where(STEP_GROUPS.c.run_id == run, STEP_GROUPS.c.step == step)
    return list(connection.execute(query.order_by(STEP_GROUPS.c.position)).scalars())


def steps(connection: Connection, run: int, *, first: int = 0, count: int | None = None) -> list[StepRow]:
    """Steps of a run in order, from step `first` on, at most `count`."""
    query = select(STEPS).where(STEPS.c.run_id == run, STEPS.c.step >= first).order_by(STEPS.c.step)
    rows = connection.execute(query if count is None else query.limit(count)).mappings().all()
    return [_step(connection, checked(STEPS, row)) for row in rows]


def latest_step(connection: Connection, run: int) -> StepRow | None:
    """The last step of a run."""
    query = select(STEPS).where(STEPS.c.run_id == run).order_by(STEPS.c.step.desc()).limit(1)
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else _step(connection, checked(STEPS, row))


def _step(connection: Connection, row: Row) -> StepRow:
    used = groups_of_step(connection, row["run_id"], row["step"])
    if len(used) != row["groups"]:
        raise CorruptionError(f"step {row['step']} used {row['groups']} groups, {len(used)} were found; restore from a copy")
    names = ("step", "first_version", "last_version", "files", "receipt", "created")
    return StepRow(run_id=f"r{row['run_id']}", group_ids=tuple(f"g{key}" for key in used), **{name: row[name] for name in names})


def evaluations(connection: Connection, run: int) -> list[EvaluationRow]:
    """All evaluations of a run, oldest first."""
    query = select(EVALUATIONS).where(EVALUATIONS.c.run_id == run).order_by(EVALUATIONS.c.id)
    rows = [checked(EVALUATIONS, row) for row in connection.execute(query).mappings()]
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
