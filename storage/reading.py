"""Reading history: a trajectory's branches, ranges of its tokens, its turns.

Everything that is read is checked on the way: blobs against their digests, spans for gaps, turns against the digest of their
content. A fault is a CorruptionError that names trajectory and turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, Select, bindparam, select

from longstraw_agents.errors import CorruptionError, StoreError
from longstraw_agents.storage import blobs
from longstraw_agents.storage.rows import Row, checked, intact
from longstraw_agents.storage.schema import BlobTable, BranchTable, SpanTable, ToolCallTable, TurnTable
from longstraw_agents.types import LogpArray, TokenArray, ToolCall

BRANCHES, TURNS, SPANS, BLOBS, CALLS = (m.__table__ for m in (BranchTable, TurnTable, SpanTable, BlobTable, ToolCallTable))


def _line_query() -> Select[Any]:
    """A branch and its ancestors."""
    line = select(BRANCHES).where(BRANCHES.c.id == bindparam("branch")).cte("line", recursive=True)
    return select(line.union_all(select(BRANCHES).join(line, BRANCHES.c.id == line.c.parent_id)))


def _span_query(behaviour: bool) -> Select[Any]:
    """The spans of a branch that may hold positions [low, high), with their blobs."""
    tokens, logp = BLOBS.alias(), BLOBS.alias()
    columns: list[Any] = [*SPANS.c, tokens.c.data.label("token_data")]
    source = SPANS.outerjoin(tokens, tokens.c.digest == SPANS.c.tokens)
    if behaviour:
        columns.append(logp.c.data.label("behaviour_data"))
        source = source.outerjoin(logp, logp.c.digest == SPANS.c.behaviour)
    low = SPANS.c.start > bindparam("low") - blobs.SPAN_TOKENS
    inside = (SPANS.c.branch_id == bindparam("branch"), low, SPANS.c.start < bindparam("high"))
    return select(*columns).select_from(source).where(*inside).order_by(SPANS.c.start)


_DIGESTED = ("observation_tokens", "action_tokens", "policy_version", "reward", "reward_parts", "source", "notes")

# made once: building a statement costs more than running it
_LINE = _line_query()
_SPANS = {behaviour: _span_query(behaviour) for behaviour in (False, True)}


class Stretch(NamedTuple):
    """The part of a trajectory that lies on one branch: turns [first_turn, end_turn), positions [start, stop)."""

    branch_id: int
    first_turn: int
    end_turn: int
    start: int
    stop: int


@dataclass(frozen=True)
class Lineage:
    """A trajectory's stretches, root to leaf; `name` is for messages."""

    name: str
    stretches: tuple[Stretch, ...]

    @property
    def length(self) -> int:
        """Tokens of the trajectory."""
        return self.stretches[-1].stop if self.stretches else 0


class Span(NamedTuple):
    """Tokens [start, stop) with their ids and the marks in (start, stop]; `behaviour` where it was asked for and is there."""

    start: int
    stop: int
    ids: TokenArray
    behaviour: LogpArray | None
    marks: bytes

    def mark_at(self, position: int) -> bytes:
        """The mark at `position`, a multiple of MARK_EVERY in (start, stop]."""
        return mark_in(self.start, self.marks, position)


class StoredTurn(NamedTuple):
    """A turn's row, the (digest, behaviour digest) pairs of its spans, and its tool calls' rows."""

    row: Row
    spans: tuple[tuple[int, bytes, bytes | None], ...]
    calls: tuple[Row, ...]

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.row["start"] + self.row["observation_tokens"] + self.row["action_tokens"]


def trajectory_name(key: int) -> str:
    """The public id of a trajectory."""
    return f"t{key}"


def mark_in(start: int, marks: bytes, position: int) -> bytes:
    """The mark at `position` among those that a span from `start` holds."""
    at = (position // blobs.MARK_EVERY - start // blobs.MARK_EVERY - 1) * blobs.DIGEST_BYTES
    mark = marks[at : at + blobs.DIGEST_BYTES]
    if at < 0 or len(mark) != blobs.DIGEST_BYTES:
        raise CorruptionError(f"the span at {start} holds no mark for position {position}")
    return mark


def lineage_of(connection: Connection, trajectory: Row) -> Lineage:
    """The stretches of a (checked) trajectory row."""
    name = trajectory_name(trajectory["id"])
    if trajectory["branch_id"] is None:
        return Lineage(name, ())
    rows = connection.execute(_LINE, {"branch": trajectory["branch_id"]}).mappings().all()
    end_turn, stop = trajectory["turns"], trajectory["length"]
    expected: int | None = trajectory["branch_id"]
    stretches: list[Stretch] = []
    by_id = {row["id"]: row for row in rows}
    while expected is not None:
        if expected not in by_id or len(stretches) > len(by_id):
            raise CorruptionError(f"trajectory {name}: branch {expected} of its history is missing")
        branch = checked(BRANCHES, by_id[expected])
        stretches.append(Stretch(branch["id"], branch["fork_turn"], end_turn, branch["fork_position"], stop))
        end_turn, stop, expected = branch["fork_turn"], branch["fork_position"], branch["parent_id"]
    return Lineage(name, tuple(reversed(stretches)))


def read_spans(
    connection: Connection, lineage: Lineage, start: int, stop: int, *, behaviour: bool = False
) -> list[Span]:
    """The spans that hold positions [start, stop), in order, without gaps, their blobs checked.

    Raises StoreError for a range outside the trajectory, CorruptionError for a damaged or missing blob or row.
    """
    if not 0 <= start <= stop <= lineage.length:
        raise StoreError(
            f"trajectory {lineage.name} has {lineage.length} tokens; the range [{start}, {stop}) does not lie within them"
        )
    spans: list[Span] = []
    for stretch in lineage.stretches:
        low, high = max(start, stretch.start), min(stop, stretch.stop)
        if low < high:
            spans += _stretch_spans(connection, lineage, stretch, low, high, behaviour)
    return spans


def _stretch_spans(
    connection: Connection, lineage: Lineage, stretch: Stretch, low: int, high: int, behaviour: bool
) -> list[Span]:
    rows = connection.execute(_SPANS[behaviour], {"branch": stretch.branch_id, "low": low, "high": high})
    spans: list[Span] = []
    for row in rows.mappings():
        start, stop = row["start"], row["stop"]
        if stop <= low:
            continue
        if start != (spans[-1].stop if spans else start):
            break
        try:
            checked(SPANS, row, branch_id=stretch.branch_id)
            ids = blobs.decode_ids(_content(row["tokens"], row["token_data"]))
            named = behaviour and row["behaviour"] is not None
            logp_A = blobs.decode_behaviour(_content(row["behaviour"], row["behaviour_data"])) if named else None
        except CorruptionError as error:
            raise _damaged(connection, lineage, stretch, start, str(error)) from None
        if len(ids) != stop - start or (logp_A is not None and len(logp_A) != len(ids)):
            raise _damaged(connection, lineage, stretch, start, f"span [{start}, {stop}) holds {len(ids)} tokens")
        spans.append(Span(start, stop, ids, logp_A, row["marks"] or b""))
    if not spans or spans[0].start > low or spans[-1].stop < high:
        raise _damaged(connection, lineage, stretch, spans[-1].stop if spans else low, "a span is missing")
    return spans


def _content(name: bytes, data: bytes | None) -> bytes:
    if data is None:
        raise CorruptionError(f"blob {name.hex()} is missing")
    return blobs.decompress(name, data)


def blob(connection: Connection, name: bytes) -> bytes:
    """The content of one blob, checked. Raises CorruptionError if it is damaged or missing."""
    return _content(name, connection.execute(select(BLOBS.c.data).where(BLOBS.c.digest == name)).scalar())


def read_call(connection: Connection, row: Row) -> ToolCall:
    """A tool call from its row. Raises CorruptionError where the columns to query by say something else than its blob."""
    call = ToolCall(**json.loads(blob(connection, row["body"])[1:]))
    if (row["name"], bool(row["failed"]), row["seconds"]) != (call.name, call.error is not None, call.seconds):
        raise CorruptionError(f"the row of tool call {row['call']} does not fit its blob")
    return call


def _damaged(connection: Connection, lineage: Lineage, stretch: Stretch, position: int, what: str) -> CorruptionError:
    """The error for a fault at `position`, with the turn that holds it."""
    query = select(TURNS.c.turn).where(TURNS.c.branch_id == stretch.branch_id, TURNS.c.start <= position)
    turn = connection.execute(query.order_by(TURNS.c.turn.desc()).limit(1)).scalar()
    return damaged_turn(lineage.name, turn, what)


def damaged_turn(name: str, turn: int | None, what: str) -> CorruptionError:
    """The error for a fault in one turn."""
    return CorruptionError(f"trajectory {name}, turn {turn}: {what}; restore it from a copy, or delete its run")


def read_turns(connection: Connection, lineage: Lineage, first: int = 0, stop: int | None = None) -> Iterator[StoredTurn]:
    """The trajectory's turns [first, stop) (to its end by default), each checked against its digest; blobs are not read."""
    end = lineage.stretches[-1].end_turn if lineage.stretches else 0
    stop = end if stop is None else min(stop, end)
    position: int | None = 0 if first == 0 else None
    for whole in lineage.stretches:
        part = whole._replace(first_turn=max(whole.first_turn, first), end_turn=min(whole.end_turn, stop))
        if part.first_turn >= part.end_turn:
            continue
        turns = (TURNS.c.branch_id == part.branch_id, TURNS.c.turn >= part.first_turn, TURNS.c.turn < part.end_turn)
        rows = [dict(row) for row in connection.execute(select(TURNS).where(*turns).order_by(TURNS.c.turn)).mappings()]
        if rows and part != whole:
            part = part._replace(start=rows[0]["start"], stop=StoredTurn(rows[-1], (), ()).stop)
        calls, spans = _calls(connection, part), _span_names(connection, part)
        expected = part.first_turn
        for row in rows:
            if not intact(TURNS, row):
                raise damaged_turn(lineage.name, expected, "its row does not fit its seal")
            turn = StoredTurn(row, tuple(_within(spans, row)), calls.get(row["turn"], ()))
            digest = blobs.turn_digest(
                **{name: row[name] for name in _DIGESTED},
                spans=[names[1:] for names in turn.spans],
                calls=[call["body"] for call in turn.calls],
            )
            gap = position is not None and row["start"] != position
            if row["turn"] != expected or gap or digest != row["digest"] or row["calls"] != len(turn.calls):
                raise damaged_turn(lineage.name, expected, "its rows do not fit its digest")
            expected, position = expected + 1, turn.stop
            yield turn
        if expected != part.end_turn or (part.end_turn == whole.end_turn and position != whole.stop):
            raise damaged_turn(lineage.name, expected, "its row is missing")


def _calls(connection: Connection, stretch: Stretch) -> dict[int, tuple[Row, ...]]:
    turns = (CALLS.c.branch_id == stretch.branch_id, CALLS.c.turn >= stretch.first_turn, CALLS.c.turn < stretch.end_turn)
    rows = connection.execute(select(CALLS).where(*turns).order_by(CALLS.c.turn, CALLS.c.call)).mappings()
    return {turn: tuple(map(dict, of)) for turn, of in groupby(rows, key=lambda row: row["turn"])}


def _span_names(connection: Connection, stretch: Stretch) -> list[tuple[int, bytes, bytes | None]]:
    """Start, blob and behaviour blob of every span on the stretch, last one first."""
    inside = (SPANS.c.branch_id == stretch.branch_id, SPANS.c.start >= stretch.start, SPANS.c.start < stretch.stop)
    query = select(SPANS.c.start, SPANS.c.tokens, SPANS.c.behaviour).where(*inside)
    return [(row[0], row[1], row[2]) for row in connection.execute(query.order_by(SPANS.c.start.desc()))]


def _within(spans: list[tuple[int, bytes, bytes | None]], row: Row) -> Iterator[tuple[int, bytes, bytes | None]]:
    """Takes the spans of one turn off the end of the list."""
    stop = row["start"] + row["observation_tokens"] + row["action_tokens"]
    while spans and spans[-1][0] < stop:
        yield spans.pop()


def concatenated(arrays: Sequence[Any], dtype: Any) -> Any:
    """One array of all; of `dtype` and empty where there is none."""
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def read_ids(connection: Connection, lineage: Lineage, start: int, stop: int) -> TokenArray:
    """Tokens [start, stop) of a trajectory."""
    spans = read_spans(connection, lineage, start, stop)
    if not spans:
        return np.zeros(0, np.int32)
    offset = spans[0].start
    return np.concatenate([span.ids for span in spans])[start - offset : stop - offset]
