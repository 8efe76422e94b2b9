"""A run's trajectories to a file and back, exactly: the imported run has the same digests.

JSON lines: one object a line. The first is the run, then each group is followed by its trajectories, turns within. Parquet: one
row a turn, with run, groups and trajectories as JSON in the file's metadata (needs pyarrow). What trajectories share is written
out with each; the store shares it again. Steps, receipts and evaluations stay with the store: `longstraw db copy` takes all.

An import is a run of its own. If it fails, it is deleted; if it is killed, it stays, and says in its config that it is one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longstraw_agents.errors import ConfigError, StoreError
from longstraw_agents.storage.records import GroupRow, TrajectoryRow
from longstraw_agents.storage.schema import canonical
from longstraw_agents.storage.store import Store
from longstraw_agents.types import StopReason, Task, ToolCall, Turn

VERSION = 1
_METADATA = b"longstraw"


def export_jsonl(store: Store, run_id: str, path: Path) -> int:
    """Writes a run as JSON lines; returns the number of trajectories. The file appears whole or not at all."""
    count = 0
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="ascii") as file:
        for record in _records(store, run_id):
            if record["kind"] == "trajectory":
                record["turns"] = [turn_record(turn) for turn in store.turns(record["id"])]
                count += 1
            file.write(canonical(record) + "\n")
    part.rename(path)
    return count


def import_jsonl(store: Store, path: Path, name: str | None = None) -> str:
    """Reads what `export_jsonl` wrote into a new run; returns its id. Raises StoreError for a file of another form."""
    with open(path, encoding="ascii") as file:
        return _import(store, _parsed_lines(file, path), name)


def export_parquet(store: Store, run_id: str, path: Path) -> int:
    """Writes a run as Parquet, one row a turn; returns the number of trajectories."""
    pa, pq = _pyarrow()
    records = list(_records(store, run_id))
    ids = pa.list_(pa.int32())
    fields = {"trajectory": pa.string(), "observation": ids, "action": ids, "behaviour": pa.list_(pa.float32())}
    fields |= {"policy_version": pa.int64(), "reward": pa.float64(), "reward_parts": pa.string()}
    fields |= {"tool_calls": pa.string(), "source": pa.binary(), "notes": pa.string()}
    schema = pa.schema(fields, metadata={_METADATA: canonical(records).encode()})
    part = path.with_name(path.name + ".part")
    trajectories = [record["id"] for record in records if record["kind"] == "trajectory"]
    with pq.ParquetWriter(part, schema, compression="zstd") as writer:
        for trajectory in trajectories:
            rows = [_parquet_row(trajectory, turn) for turn in store.turns(trajectory)]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    part.rename(path)
    return len(trajectories)


def import_parquet(store: Store, path: Path, name: str | None = None) -> str:
    """Reads what `export_parquet` wrote into a new run; returns its id. Raises StoreError for a file of another form."""
    pa, pq = _pyarrow()
    try:
        file = pq.ParquetFile(path)
        records = json.loads(file.schema_arrow.metadata[_METADATA])
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path} is no Parquet file of trajectories ({error}); export one with `longstraw db export`") from None
    turns: dict[str, list[Turn]] = {}
    for batch in file.iter_batches():
        for row in batch.to_pylist():
            turns.setdefault(row["trajectory"], []).append(_parquet_turn(row))

    def joined() -> Iterator[dict[str, Any]]:
        for record in records:
            yield {**record, "turns": turns.get(record["id"], [])} if record["kind"] == "trajectory" else record

    return _import(store, joined(), name)


def _records(store: Store, run_id: str) -> Iterator[dict[str, Any]]:
    """The run, its groups and trajectories, without turns."""
    run = next((row for row in store.runs() if row.run_id == run_id), None)
    groups = store.groups(run_id)  # raises for a run that is not there
    assert run is not None
    yield {"kind": "run", "version": VERSION, "name": run.name, "config": run.config}
    for group in groups:
        yield _group_record(group)
        for row in store.trajectories(group.group_id):
            yield _trajectory_record(row)


def _group_record(group: GroupRow) -> dict[str, Any]:
    task = {name: getattr(group.task, name) for name in ("env_id", "seed", "split")} | {"options": dict(group.task.options)}
    names = ("size", "purpose", "policy_version")
    return {"kind": "group", "id": group.group_id, "task": task, **{name: getattr(group, name) for name in names}}


def _trajectory_record(row: TrajectoryRow) -> dict[str, Any]:
    names = ("member", "parent", "weight", "reward", "success", "stop_reason")
    parts = dict(row.reward_parts)
    return {"kind": "trajectory", "id": row.trajectory_id, "reward_parts": parts, **{n: getattr(row, n) for n in names}}


def turn_record(turn: Turn) -> dict[str, Any]:
    """A turn as JSON-able values; `turn_of` is its inverse."""
    source = turn.observation_source
    return {
        "observation": turn.observation.tolist(),
        "action": turn.action.tolist(),
        "behaviour": turn.behaviour.tolist(),
        "policy_version": turn.policy_version,
        "reward": turn.reward,
        "reward_parts": dict(turn.reward_parts),
        "tool_calls": [call_record(call) for call in turn.tool_calls],
        "source": None if source is None else base64.b64encode(source).decode(),
        "notes": dict(turn.notes),
    }


def call_record(call: ToolCall) -> dict[str, Any]:
    """A tool call as JSON-able values; `ToolCall(**record)` is its inverse."""
    names = ("name", "result", "error", "seconds")
    return {"arguments": dict(call.arguments), **{name: getattr(call, name) for name in names}}


def turn_of(record: Mapping[str, Any]) -> Turn:
    """The turn of a record. Raises KeyError, TypeError or ValueError for one of another form."""
    source = record["source"]
    return Turn(
        observation=np.asarray(record["observation"], np.int32),
        action=np.asarray(record["action"], np.int32),
        behaviour=np.asarray(record["behaviour"], np.float32),
        policy_version=record["policy_version"],
        reward=record["reward"],
        reward_parts=record["reward_parts"],
        tool_calls=tuple(ToolCall(**call) for call in record["tool_calls"]),
        observation_source=None if source is None else base64.b64decode(source, validate=True),
        notes=record.get("notes") or {},  # files of earlier versions have none
    )


def _parquet_row(trajectory: str, turn: Turn) -> dict[str, Any]:
    record = turn_record(turn)
    texts = {name: canonical(record[name]) for name in ("reward_parts", "tool_calls", "notes")}
    return {**record, **texts, "trajectory": trajectory, "source": turn.observation_source}


def _parquet_turn(row: Mapping[str, Any]) -> Turn:
    source = row["source"]
    values = {name: json.loads(row[name]) for name in ("reward_parts", "tool_calls", "notes") if name in row}
    return turn_of({**row, **values, "source": None if source is None else base64.b64encode(source).decode()})


def _parsed_lines(lines: Iterable[str], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if record["kind"] == "trajectory":
                record["turns"] = [turn_of(turn) for turn in record["turns"]]
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{path}, line {number} is no record of a trajectory file ({error!r})") from None
        yield record


def _import(store: Store, records: Iterator[dict[str, Any]], name: str | None) -> str:
    """Makes a run of records whose trajectories hold turns; deletes it again if they cannot be stored."""
    first = next(records, None)
    if first is None or first.get("kind") != "run" or first.get("version") != VERSION:
        raise StoreError(f"the file does not begin with a run of version {VERSION}; export it with `longstraw db export`")
    run = store.create_run(name or first["name"], {"imported": True, "config": first["config"]})
    known: dict[str, str] = {}
    group = ""
    try:
        for record in records:
            if record["kind"] == "group":
                rest = {key: record[key] for key in ("purpose", "policy_version")}
                group = store.add_group(run, Task(**record["task"]), record["size"], **rest)
            else:
                known[record["id"]] = _import_trajectory(store, group, record, known)
    except BaseException as error:
        store.delete_run(run)
        if isinstance(error, KeyError | TypeError) and not isinstance(error, StoreError):
            raise StoreError(f"a record of the file is incomplete ({error!r}); nothing was imported") from None
        raise
    return run


def _import_trajectory(store: Store, group: str, record: Mapping[str, Any], known: Mapping[str, str]) -> str:
    parent = known.get(record["parent"]) if record["parent"] else None
    trajectory = store.add_trajectory(group, record["member"], parent=parent, weight=record["weight"])
    for index, turn in enumerate(record["turns"]):
        store.append_turn(trajectory, index, turn)
    if record["stop_reason"] is not None:
        end = (StopReason(record["stop_reason"]), record["reward"], record["reward_parts"])
        store.finish_trajectory(trajectory, *end, success=record["success"])
    return trajectory


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("Parquet needs pyarrow: pip install 'longstraw-agents[parquet]'") from None
    return pyarrow, pyarrow.parquet
