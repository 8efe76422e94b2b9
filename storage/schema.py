"""The tables, as typed models.

Idea: history is stored once. A *branch* is a run of turns that every trajectory through it shares; where trajectories part, a
new branch points at its parent and at the turn where it leaves it. A trajectory is a branch and a number of turns.

Vocabulary
    blob     compressed bytes under the digest of what they decompress to
    branch   turns with consecutive indices from `fork_turn` on; what lies before them is the parent's
    span     at most `SPAN_TOKENS` consecutive tokens of one observation or one action: one blob
    mark     chain digest of all ids before a multiple of `MARK_EVERY`; it depends on the ids alone, not on turn borders
    chain    the same digest at a turn's end
    seal     digest of a row's other columns, its key among them: a flipped bit in a row is noticed as one in a blob is
    nonce    random bytes chosen by the writer, so that a commit whose outcome is unknown can be sent again

A row that vanished has no seal to look at. So whoever owns rows counts them in its own sealed row: the store its runs, a run its
groups, steps and evaluations, a group its trajectories; turns and spans have to follow each other without a gap.

Positions and turn indices count from the trajectory's beginning also in branches that leave another one. Parents are no foreign
keys: they are of the same run and go with it, and each key would cost an index.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import BigInteger, Boolean, Float, ForeignKey, Integer, LargeBinary, String, Text, UniqueConstraint
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator, TypeEngine

from longstraw_agents.errors import CorruptionError

#: Revision that this version of the code reads and writes; revisions are four digits, ascending.
REVISION = "0003"

BigInt = BigInteger().with_variant(Integer, "sqlite")


class Json(TypeDecorator[Any]):
    """A JSON value as ASCII text with sorted keys: NUL and lone surrogates survive on every database."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """To text."""
        return None if value is None else canonical(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """From text. Raises CorruptionError for what is no JSON."""
        try:
            return None if value is None else json.loads(value)
        except (TypeError, ValueError) as error:
            raise CorruptionError(f"a stored JSON value cannot be read ({error})") from None


class AnyText(TypeDecorator[str]):
    """Text that may hold NUL and lone surrogates, which databases refuse: those, and the backslash, are escaped."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """With escapes."""
        if value is None:
            return None
        plain = value.replace("\\", "\\\\").replace("\0", "\\0")
        return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in plain)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """Without escapes."""
        if value is None or "\\" not in value:
            return value
        first, *rest = value.split("\\\\")
        return "\\".join(_unescape(part) for part in (first, *rest))

    def coerce_compared_value(self, op: Any, value: Any) -> TypeEngine[Any]:
        """What it is compared with is escaped too."""
        return self


def _unescape(part: str) -> str:
    """One stretch without escaped backslashes."""
    head, *escapes = part.split("\\")
    return head + "".join("\0" + e[1:] if e[0] == "0" else chr(int(e[1:5], 16)) + e[5:] for e in escapes)


def canonical(value: Any) -> str:
    """JSON that is equal for equal values. Raises ValueError for numbers that are not finite, TypeError for other objects."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


class Base(DeclarativeBase):
    """All tables of the store."""


class StoreTable(Base):
    """One row: how many runs there are."""

    __tablename__ = "store"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    runs: Mapped[int] = mapped_column(BigInt)
    seal: Mapped[bytes] = mapped_column(LargeBinary)


class RunTable(Base):
    """One training run, or one import. `last_step` is NULL before the first; `groups_used` counts the rows of step_groups."""

    __tablename__ = "runs"
    __table_args__ = {"sqlite_autoincrement": True}
    id: Mapped[int] = mapped_column(BigInt, primary_key=True)
    nonce: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    name: Mapped[str] = mapped_column(AnyText)
    config: Mapped[Any] = mapped_column(Json)
    created: Mapped[float] = mapped_column(Float(53))
    seal: Mapped[bytes] = mapped_column(LargeBinary)
    groups: Mapped[int] = mapped_column(BigInt, server_default="0")
    steps: Mapped[int] = mapped_column(BigInt, server_default="0")
    last_step: Mapped[int | None] = mapped_column(BigInt)
    groups_used: Mapped[int] = mapped_column(BigInt, server_default="0")
    evaluations: Mapped[int] = mapped_column(BigInt, server_default="0")


class PolicyTable(Base):
    """A policy version of a run; version 0 is what the run began with, later ones name the step that made them."""

    __tablename__ = "policies"
    __table_args__ = {"sqlite_with_rowid": False}
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=False)
    step: Mapped[int | None] = mapped_column(BigInt)
    created: Mapped[float] = mapped_column(Float(53))


class TaskTable(Base):
    """A task, stored once however many groups work on it."""

    __tablename__ = "tasks"
    id: Mapped[int] = mapped_column(BigInt, primary_key=True)
    digest: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    env_id: Mapped[str] = mapped_column(AnyText)
    seed: Mapped[int] = mapped_column(BigInteger)
    split: Mapped[str] = mapped_column(AnyText)
    options: Mapped[Any] = mapped_column(Json)
    seal: Mapped[bytes] = mapped_column(LargeBinary, nullable=True)


class GroupTable(Base):
    """Trajectories of one task whose rewards are compared. `trajectories`, `members`, `finished` count: rows, those that are a
    member's first part, those that have ended."""

    __tablename__ = "groups"
    __table_args__ = {"sqlite_autoincrement": True}
    id: Mapped[int] = mapped_column(BigInt, primary_key=True)
    nonce: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    task_id: Mapped[int] = mapped_column(ForeignKey("tasks.id"))
    size: Mapped[int] = mapped_column(Integer)
    purpose: Mapped[str] = mapped_column(String(16))
    policy_version: Mapped[int] = mapped_column(BigInt)
    trajectories: Mapped[int] = mapped_column(Integer)
    created: Mapped[float] = mapped_column(Float(53))
    seal: Mapped[bytes] = mapped_column(LargeBinary)
    members: Mapped[int] = mapped_column(Integer, server_default="0")
    finished: Mapped[int] = mapped_column(Integer, server_default="0")


class BranchTable(Base):
    """Where a run of turns leaves its parent. `key` digests run, parent, fork and first turn: equal history is found by it."""

    __tablename__ = "branches"
    id: Mapped[int] = mapped_column(BigInt, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    parent_id: Mapped[int | None] = mapped_column(BigInt)
    fork_turn: Mapped[int] = mapped_column(BigInt)
    fork_position: Mapped[int] = mapped_column(BigInt)
    key: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    seal: Mapped[bytes] = mapped_column(LargeBinary)


class TurnTable(Base):
    """One turn. `digest` covers all its content, tool calls and log-probabilities included; `calls` counts tool calls."""

    __tablename__ = "turns"
    __table_args__ = {"sqlite_with_rowid": False}
    branch_id: Mapped[int] = mapped_column(ForeignKey("branches.id", ondelete="CASCADE"), primary_key=True)
    turn: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=False)
    start: Mapped[int] = mapped_column(BigInt)
    observation_tokens: Mapped[int] = mapped_column(BigInt)
    action_tokens: Mapped[int] = mapped_column(BigInt)
    policy_version: Mapped[int] = mapped_column(BigInt)
    reward: Mapped[float] = mapped_column(Float(53))
    reward_parts: Mapped[Any] = mapped_column(Json, nullable=True)
    calls: Mapped[int] = mapped_column(Integer)
    source: Mapped[bytes | None] = mapped_column(LargeBinary)
    digest: Mapped[bytes] = mapped_column(LargeBinary)
    chain: Mapped[bytes] = mapped_column(LargeBinary)
    seal: Mapped[bytes] = mapped_column(LargeBinary, nullable=True)
    notes: Mapped[Any] = mapped_column(Json, nullable=True)


class SpanTable(Base):
    """Tokens [start, stop) of a branch: their blob, the blob of their behaviour log-probabilities, the marks in (start, stop]."""

    __tablename__ = "spans"
    __table_args__ = {"sqlite_with_rowid": False}
    branch_id: Mapped[int] = mapped_column(ForeignKey("branches.id", ondelete="CASCADE"), primary_key=True)
    start: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=False)
    stop: Mapped[int] = mapped_column(BigInt)
    tokens: Mapped[bytes] = mapped_column(LargeBinary)
    behaviour: Mapped[bytes | None] = mapped_column(LargeBinary)
    marks: Mapped[bytes | None] = mapped_column(LargeBinary)
    seal: Mapped[bytes] = mapped_column(LargeBinary, nullable=True)


class ToolCallTable(Base):
    """A tool call: columns to query by, and the whole of it in a blob."""

    __tablename__ = "tool_calls"
    __table_args__ = {"sqlite_with_rowid": False}
    branch_id: Mapped[int] = mapped_column(ForeignKey("branches.id", ondelete="CASCADE"), primary_key=True)
    turn: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=False)
    call: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(AnyText)
    failed: Mapped[bool] = mapped_column(Boolean)
    seconds: Mapped[float] = mapped_column(Float(53))
    body: Mapped[bytes] = mapped_column(LargeBinary)


class BlobTable(Base):
    """Compressed data under the digest of its content. References to blobs are no foreign keys: see `gc` in `admin`."""

    __tablename__ = "blobs"
    id: Mapped[int] = mapped_column(BigInt, primary_key=True)
    digest: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    data: Mapped[bytes] = mapped_column(LargeBinary)


class TrajectoryTable(Base):
    """The first `turns` turns of `branch_id` and its ancestors, `length` tokens; open while `stop_reason` is NULL."""

    __tablename__ = "trajectories"
    __table_args__ = (UniqueConstraint("group_id", "member", "part"), {"sqlite_autoincrement": True})
    id: Mapped[int] = mapped_column(BigInt, primary_key=True)
    group_id: Mapped[int] = mapped_column(ForeignKey("groups.id", ondelete="CASCADE"))
    member: Mapped[int] = mapped_column(Integer)
    part: Mapped[int] = mapped_column(Integer)
    parent_id: Mapped[int | None] = mapped_column(BigInt)
    weight: Mapped[float] = mapped_column(Float(53))
    branch_id: Mapped[int | None] = mapped_column(ForeignKey("branches.id"), index=True)
    turns: Mapped[int] = mapped_column(BigInt)
    length: Mapped[int] = mapped_column(BigInt)
    stop_reason: Mapped[str | None] = mapped_column(String(32))
    reward: Mapped[float | None] = mapped_column(Float(53))
    reward_parts: Mapped[Any] = mapped_column(Json)
    success: Mapped[bool | None] = mapped_column(Boolean)
    created: Mapped[float] = mapped_column(Float(53))
    finished: Mapped[float | None] = mapped_column(Float(53))
    seal: Mapped[bytes] = mapped_column(LargeBinary)


class StepTable(Base):
    """One committed update: the policy versions before and after it, and its receipt."""

    __tablename__ = "steps"
    __table_args__ = {"sqlite_with_rowid": False}
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=False)
    first_version: Mapped[int] = mapped_column(BigInt)
    last_version: Mapped[int] = mapped_column(BigInt)
    files: Mapped[Any] = mapped_column(Json)
    receipt: Mapped[Any] = mapped_column(Json)
    groups: Mapped[int] = mapped_column(Integer)
    created: Mapped[float] = mapped_column(Float(53))
    seal: Mapped[bytes] = mapped_column(LargeBinary)


class StepGroupTable(Base):
    """A group that a step was trained on; no group serves two steps of its run."""

    __tablename__ = "step_groups"
    group_id: Mapped[int] = mapped_column(ForeignKey("groups.id", ondelete="CASCADE"), primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    step: Mapped[int] = mapped_column(BigInt)
    position: Mapped[int] = mapped_column(Integer)
    seal: Mapped[bytes] = mapped_column(LargeBinary, nullable=True)


class EvaluationTable(Base):
    """The result of one evaluation of one policy version."""

    __tablename__ = "evaluations"
    __table_args__ = {"sqlite_autoincrement": True}
    id: Mapped[int] = mapped_column(BigInt, primary_key=True)
    nonce: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(AnyText)
    policy_version: Mapped[int] = mapped_column(BigInt)
    metrics: Mapped[Any] = mapped_column(Json)
    created: Mapped[float] = mapped_column(Float(53))
    seal: Mapped[bytes] = mapped_column(LargeBinary)
