"""Outlines: what a trajectory looks like without its tokens.

Idea: turns say where actions are, chain digests say how far two histories agree. Both are a few bytes a turn, so a tree of long
trajectories is built from outlines, and tokens are read only around the place where two of them part.

Vocabulary
    checkpoint   a position whose chain digest is stored: each mark, and each turn's end. Two trajectories agree before a common
                 checkpoint if and only if its digests are equal
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, select

from longstraw_agents.errors import CorruptionError, StoreError
from longstraw_agents.storage import blobs
from longstraw_agents.storage.reading import Stretch, damaged_turn, lineage_of
from longstraw_agents.storage.rows import Row, checked
from longstraw_agents.storage.schema import SpanTable, TurnTable
from longstraw_agents.types import StopReason

SPANS, TURNS = SpanTable.__table__, TurnTable.__table__
Positions = npt.NDArray[np.int64]
Chains = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Outline:
    """A finished trajectory without tokens.

    turn_ends as in `Trajectory`; turn_starts and action_starts [turns]: a turn's action is [action_start, turn_end).
    checkpoints [C] int64 ascending, the last equal to `length`; chains [C, 2] uint64: the digests there, as two numbers each.
    """

    trajectory_id: str
    length: int
    turn_ends: tuple[int, ...]
    action_starts: Positions
    turn_rewards: tuple[float, ...]
    reward: float | None
    stop_reason: StopReason
    weight: float
    checkpoints: Positions
    chains: Chains

    @property
    def action_positions(self) -> Positions:
        """Positions that the policy sampled, ascending; made anew at each call."""
        counts = np.asarray(self.turn_ends, np.int64) - self.action_starts
        skipped = self.action_starts - np.cumsum(counts) + counts  # where a turn's action starts, less the actions before it
        return np.repeat(skipped, counts) + np.arange(counts.sum())


Branches = dict[Stretch, tuple[list[tuple[int, int, int, float, bytes]], tuple[Positions, Chains]]]


def read_outline(connection: Connection, trajectory: Row, known: Branches) -> Outline:
    """The outline of a finished trajectory from its checked row; `known` keeps what trajectories share.

    Raises StoreError while it is open, CorruptionError where its rows have gaps.
    """
    lineage = lineage_of(connection, trajectory)
    if trajectory["stop_reason"] is None:
        raise StoreError(f"trajectory {lineage.name} is still open; only finished ones have an outline")
    ends: list[int] = []
    actions: list[int] = []
    rewards: list[float] = []
    turn_chains: list[bytes] = []
    marked: list[tuple[Positions, Chains]] = []
    position = 0
    for stretch in lineage.stretches:
        if stretch not in known:
            known[stretch] = _turns(connection, stretch), _marks(connection, stretch, lineage.name)
        turns, marks = known[stretch]
        marked.append(marks)
        for start, observation, action, reward, chain in turns:
            if start != position:
                raise damaged_turn(lineage.name, len(ends), f"it starts at {start}, not at {position}")
            position = start + observation + action
            actions.append(start + observation)
            ends.append(position)
            rewards.append(reward)
            turn_chains.append(chain)
    if position != lineage.length or len(ends) != trajectory["turns"]:
        raise damaged_turn(lineage.name, len(ends), "its row is missing")
    marked.append((np.asarray(ends, np.int64), _numbers(b"".join(turn_chains))))
    positions = np.concatenate([part[0] for part in marked])
    kept, first = np.unique(positions, return_index=True)
    return Outline(
        trajectory_id=lineage.name,
        length=position,
        turn_ends=tuple(ends),
        action_starts=np.asarray(actions, np.int64),
        turn_rewards=tuple(rewards),
        reward=trajectory["reward"],
        stop_reason=StopReason(trajectory["stop_reason"]),
        weight=trajectory["weight"],
        checkpoints=kept,
        chains=np.concatenate([part[1] for part in marked])[first],
    )


def _turns(connection: Connection, stretch: Stretch) -> list[tuple[int, int, int, float, bytes]]:
    names = ("start", "observation_tokens", "action_tokens", "reward", "chain")
    inside = (TURNS.c.branch_id == stretch.branch_id, TURNS.c.turn >= stretch.first_turn, TURNS.c.turn < stretch.end_turn)
    rows = connection.execute(select(TURNS).where(*inside).order_by(TURNS.c.turn)).mappings()
    return [tuple(row[name] for name in names) for row in (checked(TURNS, found) for found in rows)]


def _marks(connection: Connection, stretch: Stretch, name: str) -> tuple[Positions, Chains]:
    """The marks of a stretch: every multiple of MARK_EVERY in (start, stop]."""
    inside = (SPANS.c.branch_id == stretch.branch_id, SPANS.c.start >= stretch.start, SPANS.c.start < stretch.stop)
    query = select(SPANS).where(*inside, SPANS.c.marks.is_not(None)).order_by(SPANS.c.start)
    chains = _numbers(b"".join(checked(SPANS, row)["marks"] for row in connection.execute(query).mappings()))
    first = stretch.start // blobs.MARK_EVERY + 1
    positions = np.arange(first, stretch.stop // blobs.MARK_EVERY + 1, dtype=np.int64) * blobs.MARK_EVERY
    if len(chains) != len(positions):
        raise CorruptionError(
            f"trajectory {name}: {len(positions)} marks belong to [{stretch.start}, {stretch.stop}), {len(chains)} were found"
        )
    return positions, chains


def _numbers(digests: bytes) -> Chains:
    """Digests one after the other as pairs of numbers, to compare many at once."""
    if len(digests) % blobs.DIGEST_BYTES:
        raise CorruptionError(f"{len(digests)} bytes are no whole number of digests; restore the store from a copy")
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)
