"""Writing turns: from a `Turn` to blobs, spans, and its place on a branch.

Idea: a trajectory that repeats turns already stored *rides* on their branch: only its row changes. It leaves the branch with
its first turn that differs. Whether two turns are equal is a comparison of digests, so riding costs as little as appending.

What an append reads is bounded: the trajectory's row, one turn, and the ids since the last mark (fewer than MARK_EVERY).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import Connection, insert, select
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from longstraw_agents.errors import ConfigError, CorruptionError, NonFiniteError, StoreError
from longstraw_agents.storage import blobs
from longstraw_agents.storage.reading import (
    StoredTurn,
    blob,
    concatenated,
    damaged_turn,
    lineage_of,
    read_call,
    read_spans,
    read_turns,
)
from longstraw_agents.storage.rows import Row, checked, fetch, insert_sealed, seal_of
from longstraw_agents.storage.schema import BlobTable, BranchTable, SpanTable, ToolCallTable, TurnTable, canonical
from longstraw_agents.types import LogpArray, StopReason, TokenArray, ToolCall, Trajectory, Turn

BRANCHES, TURNS, SPANS, BLOBS, CALLS = (m.__table__ for m in (BranchTable, TurnTable, SpanTable, BlobTable, ToolCallTable))


@dataclass(frozen=True)
class Piece:
    """One span's content: ids, its blob, the blob of its behaviour log-probabilities."""

    ids: TokenArray
    tokens: bytes
    behaviour: bytes | None


@dataclass
class EncodedTurn:
    """A turn ready to be written: everything that needs no database. `blobs` maps digests to contents."""

    observation_tokens: int
    action_tokens: int
    policy_version: int
    reward: float
    reward_parts: dict[str, float] | None
    pieces: list[Piece] = field(default_factory=list)
    source: bytes | None = None
    notes: dict[str, Any] | None = None
    calls: list[Row] = field(default_factory=list)
    blobs: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def digest(self) -> bytes:
        """Digest of all content of the turn."""
        return blobs.turn_digest(
            self.observation_tokens,
            self.action_tokens,
            self.policy_version,
            self.reward,
            self.reward_parts,
            [(p.tokens, p.behaviour) for p in self.pieces],
            self.source,
            self.notes,
            [call["body"] for call in self.calls],
        )

    def keep(self, content: bytes) -> bytes:
        """Adds a blob; returns its digest."""
        name = blobs.digest(content)
        self.blobs[name] = content
        return name


def encode_turn(turn: Turn) -> EncodedTurn:
    """Checks and encodes `turn`. Raises TokenError for bad ids, NonFiniteError for a number that is not finite."""
    observation, action = blobs.as_ids(turn.observation, "observation"), blobs.as_ids(turn.action, "action")
    behaviour = np.asarray(turn.behaviour, np.float32)
    if not np.isfinite(behaviour).all():
        raise NonFiniteError("a behaviour log-probability is not finite; the policy must report one for each sampled token")
    rewards = finite_parts({**turn.reward_parts, "reward": turn.reward})
    parts = {name: rewards[name] for name in turn.reward_parts} or None
    encoded = EncodedTurn(len(observation), len(action), int(turn.policy_version), rewards["reward"], parts)
    for ids, logp in ((observation, None), (action, behaviour)):
        for start in range(0, len(ids), blobs.SPAN_TOKENS):
            part = ids[start : start + blobs.SPAN_TOKENS]
            tokens = encoded.keep(blobs.encode_ids(part))
            kept = None if logp is None else encoded.keep(blobs.encode_behaviour(logp[start : start + blobs.SPAN_TOKENS]))
            encoded.pieces.append(Piece(part, tokens, kept))
    if turn.observation_source is not None:
        encoded.source = encoded.keep(b"s" + bytes(turn.observation_source))
    encoded.notes = _plain_notes(turn)
    encoded.calls = [_encode_call(encoded, call) for call in turn.tool_calls]
    return encoded


def _plain_notes(turn: Turn) -> dict[str, Any] | None:
    """The turn's notes as JSON gives them back, so that their digest is the same after reading."""
    try:
        notes: dict[str, Any] = json.loads(canonical(dict(turn.notes)))
    except (TypeError, ValueError) as error:
        raise StoreError(f"the notes of a turn cannot be stored as JSON ({error}); give plain values") from None
    return notes or None


def finite_parts(parts: dict[str, float]) -> dict[str, float]:
    """Rewards as floats. Raises NonFiniteError for one that is not finite."""
    return {str(name): finite(value, f"reward {name!r}") for name, value in parts.items()}


def finite(value: float, what: str) -> float:
    """A number as the databases give it back: SQLite knows no negative zero. Raises NonFiniteError for one that is not finite."""
    if not np.isfinite(value):
        raise NonFiniteError(f"{what} is {value}; record the episode as failed, with reward None")
    return float(value) + 0.0


def _encode_call(encoded: EncodedTurn, call: ToolCall) -> Row:
    body = {
        "name": call.name,
        "arguments": dict(call.arguments),
        "result": call.result,
        "error": call.error,
        "seconds": float(call.seconds),
    }
    try:
        content = b"c" + canonical(body).encode()
    except (TypeError, ValueError) as error:
        raise StoreError(f"tool call {call.name!r} cannot be stored as JSON ({error}); give plain values") from None
    failed = call.error is not None
    return {"name": call.name, "failed": failed, "seconds": float(call.seconds), "body": encoded.keep(content)}


def append(connection: Connection, trajectory: Row, run_id: int, turn: EncodedTurn) -> Row:
    """Places `turn` after the trajectory's last one. Returns the changed columns of its row."""
    index, position, branch_id = trajectory["turns"], trajectory["length"], trajectory["branch_id"]
    digest = turn.digest
    there = None if branch_id is None else _digest_at(connection, branch_id, index)
    if there is None or there != digest:
        if branch_id is None or there is not None:
            branch_id, found = _child(connection, run_id, branch_id, index, position, digest)
        else:
            found = False
        if not found:
            _write_turn(connection, trajectory, branch_id, turn, digest)
    length = position + turn.observation_tokens + turn.action_tokens
    return {"branch_id": branch_id, "turns": index + 1, "length": length}


def _digest_at(connection: Connection, branch_id: int, index: int) -> bytes | None:
    return connection.execute(select(TURNS.c.digest).where(TURNS.c.branch_id == branch_id, TURNS.c.turn == index)).scalar()


def _child(
    connection: Connection, run_id: int, parent: int | None, index: int, position: int, digest: bytes
) -> tuple[int, bool]:
    """The branch that leaves `parent` at turn `index` with a turn of this digest, and whether it was there already."""
    key = blobs.seal("key", [run_id, parent, index, digest.hex()])
    row = fetch(connection, BRANCHES, key=key)
    if row is not None:
        return row["id"], True
    values = {"run_id": run_id, "parent_id": parent, "fork_turn": index, "fork_position": position, "key": key}
    return insert_sealed(connection, BRANCHES, values)["id"], False


def _write_turn(connection: Connection, trajectory: Row, branch_id: int, turn: EncodedTurn, digest: bytes) -> None:
    _write_blobs(connection, turn.blobs)
    index, position = trajectory["turns"], trajectory["length"]
    spans, chain = _spans(connection, trajectory, branch_id, turn.pieces)
    values: Row = {
        "branch_id": branch_id,
        "turn": index,
        "start": position,
        "observation_tokens": turn.observation_tokens,
        "action_tokens": turn.action_tokens,
        "policy_version": turn.policy_version,
        "reward": turn.reward,
        "reward_parts": turn.reward_parts,
        "calls": len(turn.calls),
        "source": turn.source,
        "notes": turn.notes,
        "digest": digest,
        "chain": chain,
    }
    connection.execute(insert(TURNS).values(**values, seal=seal_of(TURNS, values)))
    if spans:
        connection.execute(insert(SPANS), spans)
    if turn.calls:
        rows = [{"branch_id": branch_id, "turn": index, "call": i, **call} for i, call in enumerate(turn.calls)]
        connection.execute(insert(CALLS), rows)


def _spans(connection: Connection, trajectory: Row, branch_id: int, pieces: Sequence[Piece]) -> tuple[list[Row], bytes]:
    """Span rows of the turn at the trajectory's end, and the chain digest after it."""
    position = trajectory["length"]
    mark, tail = _chain_end(connection, trajectory)
    rows: list[Row] = []
    for piece in pieces:
        made, mark, tail = blobs.marks(mark, tail, piece.ids)
        stop = position + len(piece.ids)
        row: Row = {"branch_id": branch_id, "start": position, "stop": stop}
        row |= {"tokens": piece.tokens, "behaviour": piece.behaviour, "marks": b"".join(made) or None}
        rows.append({**row, "seal": seal_of(SPANS, row)})
        position = stop
    return rows, blobs.chain(mark, tail)


def _chain_end(connection: Connection, trajectory: Row) -> tuple[bytes, TokenArray]:
    """The last mark before the trajectory's end, and the ids since."""
    position = trajectory["length"]
    last = position - position % blobs.MARK_EVERY
    if position == 0:
        return blobs.EMPTY_CHAIN, np.zeros(0, np.int32)
    spans = read_spans(connection, lineage_of(connection, trajectory), max(last - 1, 0), position)
    mark = spans[0].mark_at(last) if last else blobs.EMPTY_CHAIN
    ids = np.concatenate([span.ids[max(last - span.start, 0) :] for span in spans])
    return mark, ids


def _write_blobs(connection: Connection, contents: dict[bytes, bytes]) -> None:
    """Keeps the blobs that are not there yet. They are locked until the commit, so that `gc` cannot take them."""
    if not contents:
        return
    names = sorted(contents)  # one order for all writers: no deadlocks
    query = select(BLOBS.c.digest).where(BLOBS.c.digest.in_(names))
    there = {bytes(name) for name in connection.execute(query.with_for_update(read=True, key_share=True)).scalars()}
    rows = [{"digest": name, "data": blobs.compress(contents[name])} for name in names if name not in there]
    if rows:
        make = sqlite_insert if connection.dialect.name == "sqlite" else postgresql_insert
        connection.execute(make(BLOBS).on_conflict_do_nothing(), rows)


def digest_at(connection: Connection, trajectory: Row, index: int) -> bytes | None:
    """Digest of turn `index` of a trajectory."""
    for stretch in lineage_of(connection, trajectory).stretches:
        if stretch.first_turn <= index < stretch.end_turn:
            return _digest_at(connection, stretch.branch_id, index)
    return None


def fork(connection: Connection, parent: Row, turns: int) -> Row:
    """Columns of a trajectory that begins with the parent's first `turns` turns."""
    if not 0 <= turns <= parent["turns"]:
        raise ConfigError(f"the parent has {parent['turns']} turns, cannot begin with {turns} of them")
    for stretch in lineage_of(connection, parent).stretches:
        if stretch.first_turn < turns <= stretch.end_turn:
            where = (TURNS.c.branch_id == stretch.branch_id, TURNS.c.turn == turns - 1)
            row = checked(TURNS, connection.execute(select(TURNS).where(*where)).mappings().one())
            length = row["start"] + row["observation_tokens"] + row["action_tokens"]
            return {"branch_id": stretch.branch_id, "turns": turns, "length": length}
    return {"branch_id": None, "turns": 0, "length": 0}


def load(connection: Connection, trajectory: Row) -> Trajectory:
    """A finished trajectory from its checked row."""
    lineage = lineage_of(connection, trajectory)
    if trajectory["stop_reason"] is None:
        raise StoreError(f"trajectory {lineage.name} is still open; finish it, or read it with read_tokens and turns")
    stored = list(read_turns(connection, lineage))
    spans = read_spans(connection, lineage, 0, lineage.length, behaviour=True)
    length = lineage.length
    behaviour = np.full(length, np.nan, np.float32)
    for span in spans:
        if span.behaviour is not None:
            behaviour[span.start : span.stop] = span.behaviour
    mask, version = np.zeros(length, np.bool_), np.full(length, -1, np.int32)
    for turn in stored:
        action = slice(turn.row["start"] + turn.row["observation_tokens"], turn.stop)
        mask[action], version[action] = True, turn.row["policy_version"]
        if np.isnan(behaviour[action]).any():
            raise damaged_turn(lineage.name, turn.row["turn"], "a behaviour log-probability is missing")
    return Trajectory(
        trajectory_id=lineage.name,
        tokens=concatenated([span.ids for span in spans], np.int32),
        action_mask=mask,
        behaviour=behaviour,
        policy_version=version,
        turn_ends=tuple(turn.stop for turn in stored),
        turn_rewards=tuple(turn.row["reward"] for turn in stored),
        reward=trajectory["reward"],
        stop_reason=StopReason(trajectory["stop_reason"]),
        weight=trajectory["weight"],
        turn_notes=tuple(turn.row["notes"] or {} for turn in stored),
    )


def turns(connection: Connection, trajectory: Row) -> list[Turn]:
    """All turns of a trajectory, open or finished, from its checked row."""
    lineage = lineage_of(connection, trajectory)
    stored = list(read_turns(connection, lineage))
    spans = read_spans(connection, lineage, 0, lineage.length, behaviour=True)
    ids = concatenated([span.ids for span in spans], np.int32)
    logp = {span.start: span.behaviour for span in spans}
    return [_turn(connection, lineage.name, turn, ids, logp) for turn in stored]


def _turn(
    connection: Connection, name: str, stored: StoredTurn, ids: TokenArray, logp: dict[int, LogpArray | None]
) -> Turn:
    row, border = stored.row, stored.row["start"] + stored.row["observation_tokens"]
    try:
        source = None if row["source"] is None else blob(connection, row["source"])[1:]
        calls = tuple(read_call(connection, call) for call in stored.calls)
    except CorruptionError as error:
        raise damaged_turn(name, row["turn"], str(error)) from None
    kept = [logp[start] for start, _, behaviour in stored.spans if behaviour is not None]
    return Turn(
        observation=ids[row["start"] : border],
        action=ids[border : stored.stop],
        behaviour=concatenated(kept, np.float32),
        policy_version=row["policy_version"],
        reward=row["reward"],
        reward_parts=row["reward_parts"] or {},
        tool_calls=calls,
        observation_source=source,
        notes=row["notes"] or {},
    )
