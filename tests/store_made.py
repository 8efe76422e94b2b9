"""What the store's tests write into it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
from sqlalchemy import Connection, MetaData, insert

from longstraw_agents.storage import Store, StoreConfig
from longstraw_agents.storage.admin import set_sequences
from longstraw_agents.storage.database import Database
from longstraw_agents.storage.migrations import upgrade
from longstraw_agents.types import StopReason, Task, Turn

TASK = Task("longstraw/Lookup-v0", 7, "train", {"rows": 3})


def make_turn(seed: int, observation: int = 30, action: int = 10, **rest) -> Turn:
    random = np.random.default_rng(seed)
    ids = random.integers(0, 49152, observation + action).astype(np.int32)
    logp = -random.random(action).astype(np.float32)
    return Turn(ids[:observation], ids[observation:], logp, **{"policy_version": seed % 3, "reward": seed / 7, **rest})


def tokens_of(turns: list[Turn]) -> np.ndarray:
    return np.concatenate([part for turn in turns for part in (turn.observation, turn.action)] or [np.zeros(0, np.int32)])


def begin(store: Store, size: int = 4) -> tuple[str, str]:
    run = store.create_run("run", {"learning_rate": 3e-4})
    return run, store.add_group(run, TASK, size)


def write(store: Store, group: str, member: int, turns: list[Turn], reward: float | None = 1.0) -> str:
    trajectory = store.add_trajectory(group, member)
    for index, turn in enumerate(turns):
        store.append_turn(trajectory, index, turn)
    store.finish_trajectory(trajectory, StopReason.ANSWERED, reward, {})
    return trajectory


def assert_same_turn(left: Turn, right: Turn) -> None:
    for name in ("observation", "action", "behaviour"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
    for name in ("policy_version", "reward", "observation_source"):
        assert getattr(left, name) == getattr(right, name), name
    assert dict(left.reward_parts) == dict(right.reward_parts) and dict(left.notes) == dict(right.notes)
    assert list(left.tool_calls) == list(right.tool_calls)


def write_old_store(url: str) -> None:
    """Makes the store of tests/data/store-0001.sql at `url`: written by the first schema; t7 is open."""
    memory = sqlite3.connect(":memory:")
    memory.executescript((Path(__file__).parent / "data" / "store-0001.sql").read_text())
    database = Database(url, StoreConfig(), create=True)

    def fill(connection: Connection) -> None:
        upgrade(connection, "0001")
        tables = MetaData()
        tables.reflect(connection)
        for table in tables.sorted_tables:
            if table.name != "alembic_version":
                names = table.columns.keys()
                rows = memory.execute(f"SELECT {', '.join(names)} FROM {table.name}").fetchall()
                connection.execute(insert(table), [dict(zip(names, row, strict=True)) for row in rows])
        if connection.dialect.name == "postgresql":
            set_sequences(connection, tables.sorted_tables)

    database.write(fill)
    database.close()
