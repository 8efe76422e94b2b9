"""The store: tasks, groups, trajectories turn by turn, steps, receipts, evaluations. The source of truth of a run.

    with Store.open("runs/first.sqlite") as store:
        run = store.create_run("first", {"learning_rate": 3e-4})
        group = store.add_group(run, task, size=8)
        trajectory = store.add_trajectory(group, member=0)
        store.append_turn(trajectory, 0, turn)
        store.finish_trajectory(trajectory, StopReason.ANSWERED, 1.0, {})

When a method returns, what it wrote is on disk; when it raises, nothing of it is there. Every write may be sent again. A store
may be used by several threads, and opened by several processes, at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, delete, func, insert, select, text

from longstraw_agents.errors import ConfigError, NotStoredError, StoreError
from longstraw_agents.redaction import redact, redact_turn, redact_value
from longstraw_agents.storage import blobs, history, listing, reading
from longstraw_agents.storage.database import Database, StoreConfig
from longstraw_agents.storage.migrations import require_current, revision_of, upgrade
from longstraw_agents.storage.outline import Branches, Outline, read_outline
from longstraw_agents.storage.records import EvaluationRow, GroupRow, RunRow, StepRow, StoreStats, TrajectoryRow
from longstraw_agents.storage.rows import Row, fetch, insert_sealed, nonce, seal_of, update_sealed
from longstraw_agents.storage.schema import (
    EvaluationTable,
    GroupTable,
    PolicyTable,
    RunTable,
    StepGroupTable,
    StepTable,
    StoreTable,
    TaskTable,
    TrajectoryTable,
    canonical,
)
from longstraw_agents.types import Group, StopReason, Task, TokenArray, Trajectory, Turn

STORE, RUNS, POLICIES, TASKS, GROUPS, TRAJECTORIES, STEPS, STEP_GROUPS, EVALUATIONS = (
    model.__table__
    for model in (
        StoreTable,
        RunTable,
        PolicyTable,
        TaskTable,
        GroupTable,
        TrajectoryTable,
        StepTable,
        StepGroupTable,
        EvaluationTable,
    )
)

PURPOSES = ("train", "eval")


class Store:
    """An open store. Make it with `Store.open`; close it, or use it as a context manager."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @classmethod
    def open(cls, url: str, *, create: bool = True, config: StoreConfig | None = None) -> Store:
        """Opens the store at `url`, a path of a SQLite file or an SQLAlchemy URL; an empty database becomes one if `create`.

        Raises SchemaError for a store of another schema or a database that is none, StoreError where there is nothing.
        """
        database = Database(str(url), config or StoreConfig(), create=create)
        try:
            revision = database.read(revision_of)
            if revision is None:
                if not create:
                    raise StoreError(f"the database {url} is empty; create a store in it, or give the right one")
                database.write(_create_schema)
            else:
                require_current(revision)
        except BaseException:
            database.close()
            raise
        return cls(database)

    def close(self) -> None:
        """Closes all connections."""
        self.database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- runs and groups

    def create_run(self, name: str, config: Mapping[str, Any]) -> str:
        """Begins a run with its configuration (JSON-able); returns its id."""
        values: Row = {"nonce": nonce(), "name": redact(name), "config": _json(config, "the run's config")}
        values |= {"created": time.time(), "groups": 0, "steps": 0, "last_step": None, "groups_used": 0, "evaluations": 0}

        def action(connection: Connection) -> int:
            whole = listing.store_row(connection, lock=True)
            if (row := fetch(connection, RUNS, nonce=values["nonce"])) is not None:
                return row["id"]
            update_sealed(connection, STORE, whole, runs=whole["runs"] + 1)
            key = insert_sealed(connection, RUNS, values)["id"]
            connection.execute(insert(POLICIES).values(run_id=key, version=0, step=None, created=values["created"]))
            return key

        return f"r{self.database.write(action)}"

    def runs(self) -> list[RunRow]:
        """All runs, oldest first."""
        return self.database.read(listing.runs)

    def delete_run(self, run_id: str) -> None:
        """Deletes a run, a damaged one too, with all that belongs to it. Its blobs stay until `gc`: others may share them."""
        key = listing.key_of("r", run_id)

        def action(connection: Connection) -> None:
            whole = listing.store_row(connection, lock=True)
            deleted = connection.execute(delete(RUNS).where(RUNS.c.id == key)).rowcount
            update_sealed(connection, STORE, whole, runs=whole["runs"] - deleted)

        there = select(RUNS.c.id).where(RUNS.c.id == key)
        if self.database.read(lambda connection: connection.execute(there).first()) is None:
            raise NotStoredError(f"run {run_id} is not in the store")
        self.database.write(action, frees=True)

    def add_group(self, run_id: str, task: Task, size: int, *, purpose: str = "train", policy_version: int = 0) -> str:
        """Adds a group of `size` trajectories of `task` to a run; returns its id. purpose is "train" or "eval"."""
        if size < 1 or purpose not in PURPOSES:
            raise ConfigError(f"a group needs a size of at least 1 and a purpose of {PURPOSES}, got {size} and {purpose!r}")
        run = listing.key_of("r", run_id)
        values = {
            "nonce": nonce(),
            "run_id": run,
            "size": int(size),
            "purpose": purpose,
            "policy_version": int(policy_version),
            **{"trajectories": 0, "members": 0, "finished": 0},
            "created": time.time(),
        }

        def action(connection: Connection) -> int:
            if (row := fetch(connection, GROUPS, nonce=values["nonce"])) is not None:
                return row["id"]
            owner = listing.get(connection, RUNS, run, run_id, lock=True)
            update_sealed(connection, RUNS, owner, groups=owner["groups"] + 1)
            return insert_sealed(connection, GROUPS, {**values, "task_id": _task_key(connection, task)})["id"]

        return f"g{self.database.write(action)}"

    def groups(
        self, run_id: str, *, purpose: str | None = None, complete: bool | None = None, unused: bool | None = None
    ) -> list[GroupRow]:
        """The run's groups, oldest first. complete: all members finished (True) or not (False); unused: by any step."""
        found = self.database.read(lambda connection: listing.groups(connection, listing.key_of("r", run_id)))
        return [
            group
            for group in found
            if purpose in (None, group.purpose)
            and complete in (None, group.complete)
            and unused in (None, group.step is None)
        ]

    # ---- trajectories

    def add_trajectory(
        self, group_id: str, member: int, *, parent: str | None = None, parent_turns: int | None = None, weight: float = 1.0
    ) -> str:
        """Begins member `member` of a group, or finds it: the same arguments give the same trajectory. Returns its id.

        `parent`, a trajectory of the same run, is what it continues: of the same member, it becomes the episode's next part.
        With `parent_turns` it begins with that many of the parent's turns, sharing them.
        """
        group, parent_key = listing.key_of("g", group_id), None if parent is None else listing.key_of("t", parent)

        def action(connection: Connection) -> int:
            row = listing.get(connection, GROUPS, group, group_id, lock=True)
            if not 0 <= member < row["size"]:
                raise ConfigError(f"group {group_id} has members 0 to {row['size'] - 1}, got {member}")
            start = _start_of(connection, row, member, parent_key, parent, parent_turns)
            place = {"group_id": group, "member": member, "part": start["part"]}
            if (there := fetch(connection, TRAJECTORIES, **place)) is not None:
                return there["id"]
            values = {
                **place,
                **start,
                "weight": history.finite(weight, "the weight"),
                "stop_reason": None,
                "reward": None,
                "reward_parts": {},
                "success": None,
                "created": time.time(),
                "finished": None,
            }
            counts = {"trajectories": row["trajectories"] + 1, "members": row["members"] + (start["part"] == 0)}
            update_sealed(connection, GROUPS, row, **counts)
            return insert_sealed(connection, TRAJECTORIES, values)["id"]

        return f"t{self.database.write(action)}"

    def append_turn(self, trajectory_id: str, index: int, turn: Turn) -> None:
        """Appends turn `index` in one transaction, at a cost that does not depend on the length.

        The same turn again is no error; another turn at an index that is taken, a gap, or a finished trajectory is a StoreError.
        Raises TokenError and NonFiniteError for bad content, StoreFullError where there is no room.
        """
        key = listing.key_of("t", trajectory_id)
        encoded = history.encode_turn(redact_turn(turn))
        if index == 0 and not encoded.observation_tokens and encoded.action_tokens:
            raise StoreError(f"trajectory {trajectory_id}: its first turn needs an observation: token 0 is never sampled")

        def action(connection: Connection) -> None:
            row = listing.get(connection, TRAJECTORIES, key, trajectory_id, lock=True)
            if index < row["turns"]:
                if history.digest_at(connection, row, index) != encoded.digest:
                    raise StoreError(f"trajectory {trajectory_id} holds another turn {index}; history is append-only")
                return
            if row["stop_reason"] is not None:
                raise StoreError(f"trajectory {trajectory_id} is finished ({row['stop_reason']}); nothing can be appended")
            if index > row["turns"]:
                raise StoreError(f"trajectory {trajectory_id}: turn {row['turns']} must come next, not {index}")
            changes = history.append(connection, row, _run_of(connection, row), encoded)
            update_sealed(connection, TRAJECTORIES, row, **changes)

        self.database.write(action)

    def finish_trajectory(
        self,
        trajectory_id: str,
        stop_reason: StopReason,
        reward: float | None,
        reward_parts: Mapping[str, float],
        *,
        success: bool | None = None,
        trailing_observation: npt.ArrayLike | None = None,
        weight: float | None = None,
    ) -> None:
        """Ends an episode: why, with which reward (None where none is valid), and what the environment said last.

        `trailing_observation`, ids after the last action, becomes a last turn without action. `weight` replaces the one that the
        trajectory began with, where only the end shows into how many parts an episode fell. The same call again is no error.
        """
        key = listing.key_of("t", trajectory_id)
        parts = history.finite_parts({**reward_parts, **({} if reward is None else {"reward": reward})})
        end = {
            "stop_reason": StopReason(stop_reason).value,
            "reward": None if reward is None else parts["reward"],
            "reward_parts": {name: parts[name] for name in reward_parts},
            "success": None if success is None else bool(success),
            **({} if weight is None else {"weight": history.finite(weight, "the weight")}),
        }
        trailing = None if trailing_observation is None else blobs.as_ids(trailing_observation, "trailing observation")

        def action(connection: Connection) -> None:
            row = listing.get(connection, TRAJECTORIES, key, trajectory_id, lock=True)
            if row["stop_reason"] is not None:
                if any(row[name] != value for name, value in end.items()):
                    raise StoreError(f"trajectory {trajectory_id} is finished already ({row['stop_reason']}, {row['reward']})")
                return
            changes: Row = {}
            if trailing is not None and len(trailing):
                last = history.encode_turn(Turn(trailing, np.zeros(0, np.int32), np.zeros(0, np.float32), policy_version=-1))
                changes = history.append(connection, row, _run_of(connection, row), last)
            update_sealed(connection, TRAJECTORIES, row, **changes, **end, finished=time.time())
            group = listing.get(connection, GROUPS, row["group_id"], f"g{row['group_id']}", lock=True)
            update_sealed(connection, GROUPS, group, finished=group["finished"] + 1)

        self.database.write(action)

    def trajectory(self, trajectory_id: str) -> TrajectoryRow:
        """The trajectory's row, open or finished."""
        return self.database.read(lambda connection: listing.trajectory_row(self._row(connection, trajectory_id)))

    def trajectories(self, group_id: str) -> list[TrajectoryRow]:
        """The group's trajectories, by member and part, open ones too."""
        return self.database.read(lambda connection: listing.trajectories(connection, listing.key_of("g", group_id), group_id))

    def open_trajectories(self, run_id: str) -> list[TrajectoryRow]:
        """The run's trajectories that have not finished: what a collection resumes after a crash."""
        return self.database.read(lambda connection: listing.open_trajectories(connection, listing.key_of("r", run_id)))

    # ---- reading

    def load_trajectory(self, trajectory_id: str) -> Trajectory:
        """A finished trajectory, whole and checked. Raises StoreError while it is open, CorruptionError for damage."""
        return self.database.read(lambda connection: history.load(connection, self._row(connection, trajectory_id)))

    def load_group(self, group_id: str) -> Group:
        """A group with all its trajectories, by member and part; one that is still open is a StoreError."""

        def action(connection: Connection) -> Group:
            key = listing.key_of("g", group_id)
            row = listing.get(connection, GROUPS, key, group_id)
            members = listing.trajectory_values(connection, row)
            return Group(group_id, listing.task(connection, row["task_id"]), tuple(history.load(connection, m) for m in members))

        return self.database.read(action)

    def read_tokens(self, trajectory_id: str, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) of a trajectory, open or finished, at a cost that depends on their number alone."""

        def action(connection: Connection) -> TokenArray:
            lineage = reading.lineage_of(connection, self._row(connection, trajectory_id))
            return reading.read_ids(connection, lineage, start, stop)

        return self.database.read(action)

    def read_batch(self, ranges: Sequence[tuple[str, int, int]]) -> list[TokenArray]:
        """Tokens [start, stop) of each (trajectory, start, stop), from one state of the store, without loading trajectories."""

        def action(connection: Connection) -> list[TokenArray]:
            lines = {name: reading.lineage_of(connection, self._row(connection, name)) for name in {name for name, *_ in ranges}}
            return [reading.read_ids(connection, lines[name], start, stop) for name, start, stop in ranges]

        return self.database.read(action)

    def iterate_tokens(self, trajectory_id: str, *, size: int = 65536) -> Iterator[TokenArray]:
        """All tokens of a trajectory in arrays of `size` (the last may be shorter), each read when it is asked for."""
        length = self.trajectory(trajectory_id).length
        for start in range(0, length, size):
            yield self.read_tokens(trajectory_id, start, min(start + size, length))

    def outlines(self, trajectory_ids: Sequence[str]) -> list[Outline]:
        """Outlines of finished trajectories, in one state of the store; no token is read."""

        def action(connection: Connection) -> list[Outline]:
            known: Branches = {}
            return [read_outline(connection, self._row(connection, name), known) for name in trajectory_ids]

        return self.database.read(action)

    def turns(self, trajectory_id: str) -> list[Turn]:
        """All committed turns, with tool calls and sources: what an environment is replayed from."""
        return self.database.read(lambda connection: history.turns(connection, self._row(connection, trajectory_id)))

    # ---- training

    def commit_step(
        self,
        run_id: str,
        *,
        step: int,
        first_version: int,
        last_version: int,
        group_ids: Sequence[str],
        files: Mapping[str, str],
        receipt: Mapping[str, Any],
    ) -> None:
        """Commits a step whose files are on disk already: versions, digests of files, groups, receipt, in one transaction.

        The same step again is no error. Another content for it, a gap, or a group that served another step is a StoreError.
        """
        run, keys = listing.key_of("r", run_id), [listing.key_of("g", group_id) for group_id in group_ids]
        values = {
            "run_id": run,
            "step": int(step),
            "first_version": int(first_version),
            "last_version": int(last_version),
            "files": _json(dict(files), "files"),
            "receipt": _json(dict(receipt), "the receipt"),
            "groups": len(keys),
        }

        def action(connection: Connection) -> None:
            owner = listing.get(connection, RUNS, run, run_id, lock=True)
            there = fetch(connection, STEPS, run_id=run, step=values["step"])
            if there is not None:
                if {name: there[name] for name in values} != values or listing.groups_of_step(connection, there) != keys:
                    raise StoreError(f"step {step} of run {run_id} is committed with other content; it is never changed")
                return
            _require_next(connection, owner, step, keys)
            counts = {"steps": owner["steps"] + 1, "groups_used": owner["groups_used"] + len(keys)}
            update_sealed(connection, RUNS, owner, **counts, last_step=values["step"])
            row = {**values, "created": time.time()}
            connection.execute(insert(STEPS).values(**row, seal=seal_of(STEPS, row)))
            if keys:
                used: list[Row] = [{"group_id": g, "run_id": run, "step": step, "position": i} for i, g in enumerate(keys)]
                connection.execute(insert(STEP_GROUPS), [{**one, "seal": seal_of(STEP_GROUPS, one)} for one in used])
            known = connection.execute(select(func.max(POLICIES.c.version)).where(POLICIES.c.run_id == run)).scalar()
            made = [
                {"run_id": run, "version": version, "step": step, "created": row["created"]}
                for version in range(max(first_version, known if known is not None else -1) + 1, last_version + 1)
            ]
            if made:
                connection.execute(insert(POLICIES), made)

        self.database.write(action)

    def steps(self, run_id: str, *, first: int = 0, count: int | None = None) -> list[StepRow]:
        """Committed steps of a run in order, from step `first` on, at most `count`."""
        return self.database.read(
            lambda connection: listing.steps(connection, listing.key_of("r", run_id), first=first, count=count)
        )

    def latest_step(self, run_id: str) -> StepRow | None:
        """The last committed step: where training resumes."""
        return self.database.read(lambda connection: listing.latest_step(connection, listing.key_of("r", run_id)))

    def add_evaluation(self, run_id: str, name: str, policy_version: int, metrics: Mapping[str, Any]) -> str:
        """Records an evaluation's metrics (JSON-able); returns its id."""
        run = listing.key_of("r", run_id)
        values = {
            "nonce": nonce(),
            "run_id": run,
            "name": redact(name),
            "policy_version": int(policy_version),
            "metrics": _json(dict(metrics), "metrics"),
            "created": time.time(),
        }

        def action(connection: Connection) -> int:
            if (row := fetch(connection, EVALUATIONS, nonce=values["nonce"])) is not None:
                return row["id"]
            owner = listing.get(connection, RUNS, run, run_id, lock=True)
            update_sealed(connection, RUNS, owner, evaluations=owner["evaluations"] + 1)
            return insert_sealed(connection, EVALUATIONS, values)["id"]

        return f"e{self.database.write(action)}"

    def evaluations(self, run_id: str) -> list[EvaluationRow]:
        """All evaluations of a run, oldest first."""
        return self.database.read(lambda connection: listing.evaluations(connection, listing.key_of("r", run_id)))

    def stats(self) -> StoreStats:
        """Counts and bytes of the whole store."""
        return self.database.read(lambda connection: listing.stats(connection, self.database.size(connection)))

    @staticmethod
    def _row(connection: Connection, trajectory_id: str) -> Row:
        return listing.get(connection, TRAJECTORIES, listing.key_of("t", trajectory_id), trajectory_id)


def _create_schema(connection: Connection) -> None:
    """Makes the tables unless another process was first."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(7041776)"))
    if revision_of(connection) is None:
        upgrade(connection)


def _json(value: Any, what: str) -> Any:
    """`value` as JSON gives it back, without secrets. Raises StoreError for what is not JSON."""
    try:
        return listing.parsed(canonical(redact_value(value)))
    except (TypeError, ValueError) as error:
        raise StoreError(f"{what} cannot be stored as JSON ({error}); give plain, finite values") from None


def _task_key(connection: Connection, task: Task) -> int:
    """The task's row, made if it is new."""
    values = {"env_id": task.env_id, "seed": int(task.seed), "split": task.split, "options": _json(dict(task.options), "options")}
    if not -(2**63) <= values["seed"] < 2**63:
        raise ConfigError(f"a task's seed must fit 64 bits, got {task.seed}")
    name = blobs.seal("task", values)
    row = fetch(connection, TASKS, digest=name) or insert_sealed(connection, TASKS, {**values, "digest": name})
    return row["id"]


def _run_of(connection: Connection, trajectory: Row) -> int:
    return listing.get(connection, GROUPS, trajectory["group_id"], f"g{trajectory['group_id']}")["run_id"]


def _start_of(
    connection: Connection, group: Row, member: int, parent_key: int | None, parent: str | None, parent_turns: int | None
) -> Row:
    """Columns that a new trajectory takes from its parent: part, branch, turns, length."""
    start: Row = {"part": 0, "parent_id": parent_key, "branch_id": None, "turns": 0, "length": 0}
    if parent_key is None or parent is None:
        if parent_turns:
            raise ConfigError(f"parent_turns is {parent_turns}, but no parent is given")
        return start
    row = listing.get(connection, TRAJECTORIES, parent_key, parent)
    if _run_of(connection, row) != group["run_id"]:
        raise ConfigError(f"the parent {parent} belongs to another run")
    if (row["group_id"], row["member"]) == (group["id"], member):
        start["part"] = row["part"] + 1
    if parent_turns:
        start.update(history.fork(connection, row, parent_turns))
    return start


def _require_next(connection: Connection, run: Row, step: int, groups: list[int]) -> None:
    """Raises StoreError unless `step` comes next in the run and its groups are of it, each new."""
    last = run["last_step"]
    if last is not None and step != last + 1:
        raise StoreError(f"run r{run['id']} has steps up to {last}; step {last + 1} must come next, not {step}")
    if len(set(groups)) != len(groups):
        raise StoreError(f"step {step} names a group twice")
    for key in groups:
        row, taken = listing.get(connection, GROUPS, key, f"g{key}"), fetch(connection, STEP_GROUPS, group_id=key)
        if row["run_id"] != run["id"] or taken is not None:
            why = f"serves step {taken['step']} already" if taken is not None else "belongs to another run"
            raise StoreError(f"group g{key} {why}; a group is trained on once")
