"""The first schema.

Written out rather than taken from the models: a released migration never changes.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _column(name: str, kind: sa.types.TypeEngine, *keys: sa.ForeignKey, **options: object) -> sa.Column:
    return sa.Column(name, kind, *keys, **{"nullable": False, **options})


def _within(table: str) -> sa.ForeignKey:
    return sa.ForeignKey(f"{table}.id", ondelete="CASCADE")


def _key(name: str, *keys: sa.ForeignKey) -> sa.Column:
    return sa.Column(name, BIG, *keys, primary_key=True, autoincrement=False)


def upgrade() -> None:
    _runs_and_tasks()
    _history()
    _trajectories()
    _training()
    if op.get_bind().dialect.name == "postgresql":  # blobs are compressed already
        op.execute("ALTER TABLE blobs ALTER COLUMN data SET STORAGE EXTERNAL")


def _runs_and_tasks() -> None:
    op.create_table(
        "runs",
        sa.Column("id", BIG, primary_key=True),
        _column("nonce", sa.LargeBinary, unique=True),
        _column("name", sa.Text),
        _column("config", sa.Text),
        _column("created", sa.Float(53)),
        _column("seal", sa.LargeBinary),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "policies",
        _key("run_id", _within("runs")),
        _key("version"),
        _column("step", BIG, nullable=True),
        _column("created", sa.Float(53)),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "tasks",
        sa.Column("id", BIG, primary_key=True),
        _column("digest", sa.LargeBinary, unique=True),
        _column("env_id", sa.Text),
        _column("seed", sa.BigInteger),
        _column("split", sa.Text),
        _column("options", sa.Text),
    )
    op.create_table(
        "groups",
        sa.Column("id", BIG, primary_key=True),
        _column("nonce", sa.LargeBinary, unique=True),
        _column("run_id", BIG, _within("runs"), index=True),
        _column("task_id", BIG, sa.ForeignKey("tasks.id")),
        _column("size", sa.Integer),
        _column("purpose", sa.String(16)),
        _column("policy_version", BIG),
        _column("trajectories", sa.Integer),
        _column("created", sa.Float(53)),
        _column("seal", sa.LargeBinary),
        sqlite_autoincrement=True,
    )


def _history() -> None:
    op.create_table(
        "branches",
        sa.Column("id", BIG, primary_key=True),
        _column("run_id", BIG, _within("runs"), index=True),
        _column("parent_id", BIG, nullable=True),
        _column("fork_turn", BIG),
        _column("fork_position", BIG),
        _column("key", sa.LargeBinary, unique=True),
        _column("seal", sa.LargeBinary),
    )
    op.create_table(
        "turns",
        _key("branch_id", _within("branches")),
        _key("turn"),
        _column("start", BIG),
        _column("observation_tokens", BIG),
        _column("action_tokens", BIG),
        _column("policy_version", BIG),
        _column("reward", sa.Float(53)),
        _column("reward_parts", sa.Text, nullable=True),
        _column("calls", sa.Integer),
        _column("source", sa.LargeBinary, nullable=True),
        _column("digest", sa.LargeBinary),
        _column("chain", sa.LargeBinary),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "spans",
        _key("branch_id", _within("branches")),
        _key("start"),
        _column("stop", BIG),
        _column("tokens", sa.LargeBinary),
        _column("behaviour", sa.LargeBinary, nullable=True),
        _column("marks", sa.LargeBinary, nullable=True),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "tool_calls",
        _key("branch_id", _within("branches")),
        _key("turn"),
        sa.Column("call", sa.Integer, primary_key=True, autoincrement=False),
        _column("name", sa.Text),
        _column("failed", sa.Boolean),
        _column("seconds", sa.Float(53)),
        _column("body", sa.LargeBinary),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "blobs",
        sa.Column("id", BIG, primary_key=True),
        _column("digest", sa.LargeBinary, unique=True),
        _column("data", sa.LargeBinary),
    )


def _trajectories() -> None:
    op.create_table(
        "trajectories",
        sa.Column("id", BIG, primary_key=True),
        _column("group_id", BIG, _within("groups")),
        _column("member", sa.Integer),
        _column("part", sa.Integer),
        _column("parent_id", BIG, nullable=True),
        _column("weight", sa.Float(53)),
        _column("branch_id", BIG, sa.ForeignKey("branches.id"), index=True, nullable=True),
        _column("turns", BIG),
        _column("length", BIG),
        _column("stop_reason", sa.String(32), nullable=True),
        _column("reward", sa.Float(53), nullable=True),
        _column("reward_parts", sa.Text),
        _column("success", sa.Boolean, nullable=True),
        _column("created", sa.Float(53)),
        _column("finished", sa.Float(53), nullable=True),
        _column("seal", sa.LargeBinary),
        sa.UniqueConstraint("group_id", "member", "part"),
        sqlite_autoincrement=True,
    )


def _training() -> None:
    op.create_table(
        "steps",
        _key("run_id", _within("runs")),
        _key("step"),
        _column("first_version", BIG),
        _column("last_version", BIG),
        _column("files", sa.Text),
        _column("receipt", sa.Text),
        _column("groups", sa.Integer),
        _column("created", sa.Float(53)),
        _column("seal", sa.LargeBinary),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "step_groups",
        _key("group_id", _within("groups")),
        _column("run_id", BIG, _within("runs"), index=True),
        _column("step", BIG),
        _column("position", sa.Integer),
    )
    op.create_table(
        "evaluations",
        sa.Column("id", BIG, primary_key=True),
        _column("nonce", sa.LargeBinary, unique=True),
        _column("run_id", BIG, _within("runs")),
        _column("name", sa.Text),
        _column("policy_version", BIG),
        _column("metrics", sa.Text),
        _column("created", sa.Float(53)),
        _column("seal", sa.LargeBinary),
        sqlite_autoincrement=True,
    )
