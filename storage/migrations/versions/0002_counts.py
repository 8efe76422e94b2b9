"""Rows that vanish are noticed: owners count what they own, and turns, spans, tasks and used groups have seals.

A row whose old seal does not fit keeps it: damage is not sealed in.
"""

import hashlib
import json

import sqlalchemy as sa
from alembic import op

from longstraw_agents.errors import CorruptionError
from longstraw_agents.storage.schema import AnyText, Json

revision = "0002"
down_revision = "0001"

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
KINDS = {**dict.fromkeys(("name", "env_id", "split"), AnyText()), **dict.fromkeys(("config", "options", "reward_parts"), Json())}
KEYS = {"runs": ("id",), "tasks": ("id",), "groups": ("id",), "step_groups": ("group_id",)}
KEYS |= {"turns": ("branch_id", "turn"), "spans": ("branch_id", "start")}
COUNTS = {"runs": ("groups", "steps", "groups_used", "evaluations"), "groups": ("members", "finished")}


def upgrade() -> None:
    op.create_table(
        "store",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("runs", BIG, nullable=False),
        sa.Column("seal", sa.LargeBinary, nullable=False),
    )
    for table, names in COUNTS.items():
        for name in names:
            op.add_column(table, sa.Column(name, BIG if table == "runs" else sa.Integer, nullable=False, server_default="0"))
    op.add_column("runs", sa.Column("last_step", BIG))
    for table in ("tasks", "turns", "spans", "step_groups"):
        op.add_column(table, sa.Column("seal", sa.LargeBinary))
    connection = op.get_bind()
    _count(connection)
    for table in ("tasks", "step_groups"):
        _seal(connection, table)
    for branch in connection.execute(sa.text("SELECT id FROM branches ORDER BY id")).scalars().all():
        for table in ("turns", "spans"):
            _seal(connection, table, branch_id=branch)
    runs = connection.execute(sa.text("SELECT count(*) FROM runs")).scalar_one()
    row = {"id": 1, "runs": runs}
    connection.execute(sa.text("INSERT INTO store VALUES (:id, :runs, :seal)"), {**row, "seal": _seal_of("store", row)})


def _count(connection: sa.Connection) -> None:
    """Fills the counts of the runs and groups whose seal fits, and seals them again."""
    owned = "(SELECT count(*) FROM {0} WHERE {0}.run_id = runs.id)"
    runs = {name: owned.format(table) for name, table in (("groups", "groups"), ("steps", "steps"))}
    runs |= {"groups_used": owned.format("step_groups"), "evaluations": owned.format("evaluations")}
    runs["last_step"] = "(SELECT max(step) FROM steps WHERE steps.run_id = runs.id)"
    inside = "(SELECT count(*) FROM trajectories WHERE trajectories.group_id = groups.id AND {})"
    groups = {"members": inside.format("part = 0"), "finished": inside.format("stop_reason IS NOT NULL")}
    for table, counts in (("runs", runs), ("groups", groups)):
        intact = [row["id"] for row in _rows(connection, table) if row["seal"] == _seal_of(table, row, leave=counts)]
        sets = ", ".join(f"{name} = {query}" for name, query in counts.items())
        for key in intact:
            connection.execute(sa.text(f"UPDATE {table} SET {sets} WHERE id = :key"), {"key": key})
            _seal(connection, table, id=key)


def _rows(connection: sa.Connection, table: str, **values: int) -> list[dict]:
    where = " AND ".join(f"{name} = :{name}" for name in values)
    found = connection.execute(sa.text(f"SELECT * FROM {table}{' WHERE ' + where if where else ''}"), values)
    return [dict(row) for row in found.mappings()]


def _seal(connection: sa.Connection, table: str, **values: int) -> None:
    """Seals the rows with these values."""
    keys = KEYS[table]
    rows = [{**{f"of_{k}": row[k] for k in keys}, "seal": _seal_of(table, row)} for row in _rows(connection, table, **values)]
    if rows:
        where = " AND ".join(f"{key} = :of_{key}" for key in keys)
        connection.execute(sa.text(f"UPDATE {table} SET seal = :seal WHERE {where}"), rows)


def _seal_of(table: str, row: dict, leave: object = ()) -> bytes:
    """The seal as of this revision; columns in `leave` (new ones) left out. Empty, which fits nothing, for damage."""
    if table in ("turns", "spans"):
        plain = [value for name, value in row.items() if name != "seal"]
        return hashlib.blake2b(f"{table}\0{plain!r}".encode(), digest_size=4).digest()
    try:
        values = {name: _value(name, value) for name, value in row.items() if name != "seal" and name not in leave}
        text = json.dumps(values, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, LookupError, CorruptionError):
        return b""
    return hashlib.blake2b(f"{table}\0{text}".encode(), digest_size=16).digest()


def _value(name: str, value: object) -> object:
    """A column's value as seals take it."""
    if isinstance(value, bytes):
        return value.hex()
    kind = KINDS.get(name)
    return kind.process_result_value(value, None) if kind else value
