"""Care of a store: bring its schema forward, check all of it, collect what nothing refers to, copy it elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, Table, delete, func, insert, literal, select, text, union_all

from longstraw_agents.errors import CorruptionError, LongStrawError, StoreError
from longstraw_agents.storage import blobs, listing, reading
from longstraw_agents.storage.database import Database, StoreConfig
from longstraw_agents.storage.migrations import require_current, revision_of, upgrade
from longstraw_agents.storage.rows import Row, checked, fetch
from longstraw_agents.storage.schema import (
    Base,
    BlobTable,
    EvaluationTable,
    GroupTable,
    PolicyTable,
    RunTable,
    SpanTable,
    StepGroupTable,
    StepTable,
    StoreTable,
    TaskTable,
    ToolCallTable,
    TrajectoryTable,
    TurnTable,
)
from longstraw_agents.storage.store import Store

BLOBS, SPANS, TURNS, CALLS, TRAJECTORIES, GROUPS, POLICIES, STORE = (
    m.__table__ for m in (BlobTable, SpanTable, TurnTable, ToolCallTable, TrajectoryTable, GroupTable, PolicyTable, StoreTable)
)

_WINDOW = 2**20  # tokens that a check holds at once
_BATCH = 500  # rows that a copy holds at once


def upgrade_store(url: str) -> tuple[str | None, str]:
    """Brings the store's schema to this version's; returns the revisions before and after.

    Raises SchemaError for a newer schema or a database that is no store. Killed midway, it leaves the store as it was.
    """
    database = Database(url, StoreConfig(), create=False)
    try:
        before = database.read(revision_of)
        database.write(upgrade)
        after = database.read(revision_of)
        require_current(after)
        return before, str(after)
    finally:
        database.close()


@dataclass(frozen=True)
class Collected:
    """What `gc` took: blobs, and their compressed bytes."""

    blobs: int
    bytes: int


def gc(store: Store, *, compact: bool = False) -> Collected:
    """Deletes the blobs that nothing refers to; `compact` gives the space back to the file system.

    References to blobs are no foreign keys (an index for each would cost a tenth of the store). Instead this holds a lock that
    every writer of blobs needs, from before it looks until it has deleted.
    """

    def action(connection: Connection) -> Collected:
        if connection.dialect.name == "postgresql":
            connection.execute(text("LOCK TABLE blobs IN EXCLUSIVE MODE"))
        used = union_all(
            select(SPANS.c.tokens),
            select(SPANS.c.behaviour).where(SPANS.c.behaviour.is_not(None)),
            select(TURNS.c.source).where(TURNS.c.source.is_not(None)),
            select(CALLS.c.body),
        )
        unused = BLOBS.c.digest.not_in(used)
        count, size = connection.execute(select(func.count(), func.sum(func.length(BLOBS.c.data))).where(unused)).one()
        connection.execute(delete(BLOBS).where(unused))
        return Collected(count, int(size or 0))

    collected = store.database.write(action, frees=True)
    if compact:
        store.database.compact()
    return collected


@dataclass(frozen=True)
class Problem:
    """One fault that `check` found, and what it touches: a trajectory, a row, or the file."""

    where: str
    what: str


def check(store: Store) -> list[Problem]:
    """Reads all of the store and returns every fault: file structure, seals, turns, blobs, chain digests, references."""

    def action(connection: Connection) -> list[Problem]:
        return [*_file_problems(connection), *_row_problems(connection), *_history_problems(connection)]

    return store.database.read(action)


def _file_problems(connection: Connection) -> Iterator[Problem]:
    if connection.dialect.name != "sqlite":
        return
    for (line,) in connection.execute(text("PRAGMA integrity_check")):
        if line != "ok":
            yield Problem("file", line)
    for row in connection.execute(text("PRAGMA foreign_key_check")):
        yield Problem(f"table {row[0]}", f"a row refers to {row[2]} that is missing")


def _row_problems(connection: Connection) -> Iterator[Problem]:
    for model in (StoreTable, RunTable, GroupTable, TrajectoryTable, StepTable, StepGroupTable, EvaluationTable):
        table, keys = model.__table__, list(model.__table__.primary_key.columns)
        for row in connection.execute(select(*keys)).mappings().all():
            yield from _attempt(f"table {table.name}", lambda table=table, row=row: fetch(connection, table, **row))
    for key in connection.execute(select(TaskTable.__table__.c.id)).scalars().all():
        yield from _attempt(f"task {key}", lambda key=key: listing.task(connection, key))
    yield from _attempt("store", lambda: listing.runs(connection))
    for key in connection.execute(select(RunTable.__table__.c.id)).scalars().all():
        for read in (listing.groups, listing.steps, listing.evaluations, _check_policies):
            yield from _attempt(f"run r{key}", lambda key=key, read=read: read(connection, key))
    for key in connection.execute(select(GROUPS.c.id)).scalars().all():
        name = f"g{key}"
        yield from _attempt(f"group {name}", lambda key=key, name=name: listing.trajectories(connection, key, name))


def _check_policies(connection: Connection, run: int) -> None:
    """Raises CorruptionError unless the run's policy versions are 0 and those that its steps made."""
    made: dict[int, int | None] = {0: None}
    for step in listing.steps(connection, run):
        made |= {version: step.step for version in range(max(step.first_version, max(made)) + 1, step.last_version + 1)}
    found = connection.execute(select(POLICIES.c.version, POLICIES.c.step).where(POLICIES.c.run_id == run))
    if dict(map(tuple, found)) != made:
        raise CorruptionError(f"the policy versions of run r{run} are not those that its steps made")


def _history_problems(connection: Connection) -> Iterator[Problem]:
    """Every turn, blob and chain digest, each branch once."""
    done: dict[int, int] = {}  # branch to the turn up to which it is known to be right
    for key in connection.execute(select(TRAJECTORIES.c.id).order_by(TRAJECTORIES.c.id)).scalars().all():
        name = reading.trajectory_name(key)
        check_one = lambda key=key, name=name: _check_history(connection, listing.get(connection, TRAJECTORIES, key, name), done)
        yield from _attempt(f"trajectory {name}", check_one)


def _attempt(where: str, action: Callable[[], Any]) -> Iterator[Problem]:
    try:
        action()
    except LongStrawError as error:
        yield Problem(where, str(error))
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:  # a damaged value of another type than its column's
        yield Problem(where, f"a row cannot be read ({error!r})")


def _check_history(connection: Connection, row: Row, done: dict[int, int]) -> None:
    """Raises CorruptionError at the first fault in a trajectory's history that no earlier one had."""
    lineage = reading.lineage_of(connection, row)
    turns = list(reading.read_turns(connection, lineage))
    for turn in turns:
        try:
            if turn.row["source"] is not None:
                reading.blob(connection, turn.row["source"])
            for call in turn.calls:
                reading.read_call(connection, call)
        except CorruptionError as error:
            raise reading.damaged_turn(lineage.name, turn.row["turn"], str(error)) from None
    known = [s.stop for s in lineage.stretches if done.get(s.branch_id, -1) >= s.end_turn]
    _check_chain(connection, lineage, turns, start=max(known, default=0))
    for stretch in lineage.stretches:
        done[stretch.branch_id] = max(done.get(stretch.branch_id, 0), stretch.end_turn)


def _check_chain(connection: Connection, lineage: reading.Lineage, turns: list[reading.StoredTurn], start: int) -> None:
    """Decodes all spans from the last mark before `start` on, and makes their chain digests again."""
    ends = {turn.stop: turn for turn in turns if turn.stop > start}
    position = start - start % blobs.MARK_EVERY
    mark = blobs.EMPTY_CHAIN
    if position:
        mark = reading.read_spans(connection, lineage, position - 1, position)[0].mark_at(position)
    since = np.zeros(0, np.int32)
    while position < lineage.length:
        spans = reading.read_spans(connection, lineage, position, min(position + _WINDOW, lineage.length), behaviour=True)
        for span in spans:
            made, mark, since = blobs.marks(mark, since, span.ids[max(position - span.start, 0) :])
            turn = ends.get(span.stop)
            if span.start >= start and b"".join(made) != span.marks:
                raise CorruptionError(f"trajectory {lineage.name}: the marks of the span at {span.start} do not fit its tokens")
            if turn is not None and turn.row["chain"] != blobs.chain(mark, since):
                raise reading.damaged_turn(lineage.name, turn.row["turn"], "its chain digest does not fit its tokens")
            position = span.stop


def copy(source_url: str, target_url: str) -> dict[str, int]:
    """Copies a whole store into an empty database; returns the rows copied of each table. All or nothing.

    Ids stay the same. Readers and writers may use the source meanwhile: the copy is of one moment. Raises StoreError if the
    target holds anything.
    """
    with Store.open(source_url, create=False) as source, Store.open(target_url) as target:
        if source.database.url == target.database.url:
            raise StoreError(f"source and target are the same store, {source_url}")
        tables = Base.metadata.sorted_tables

        def transfer(reader: Connection) -> dict[str, int]:
            def action(writer: Connection) -> dict[str, int]:
                if any(writer.execute(select(literal(1)).select_from(t).limit(1)).first() for t in tables if t is not STORE):
                    raise StoreError(f"the target {target_url} is not empty; copy into a new database")
                writer.execute(delete(STORE))
                counts = {table.name: _copy_table(reader, writer, table) for table in tables}
                if writer.dialect.name == "postgresql":
                    set_sequences(writer, tables)
                return counts

            return target.database.write(action)

        return source.database.read(transfer)


def _copy_table(reader: Connection, writer: Connection, table: Table) -> int:
    count = 0
    for batch in reader.execute(select(table).execution_options(yield_per=_BATCH)).mappings().partitions():
        rows = [dict(row) for row in batch]
        if "seal" in table.c:
            rows = [checked(table, row) for row in rows]
        writer.execute(insert(table), rows)
        count += len(rows)
    return count


def set_sequences(connection: Connection, tables: list[Table]) -> None:
    """Lets PostgreSQL give ids after those that were copied."""
    for table in tables:
        if list(table.primary_key.columns.keys()) == ["id"]:
            last = f"(SELECT max(id) FROM {table.name})"
            sequence = f"pg_get_serial_sequence('{table.name}', 'id')"
            connection.execute(text(f"SELECT setval({sequence}, COALESCE({last}, 1), {last} IS NOT NULL)"))
