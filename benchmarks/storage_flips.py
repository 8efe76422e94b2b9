"""Flipped bits: one bit of a store's file is flipped, and each call of the store's interface must give the right answer or raise
one of our errors.

A flip is missed if any call gives another answer, or raises another error. It is caught if a call raises ours, and harmless if
all answer as before. The other calls go on: what is not damaged stays readable. Bits in pages' empty space change nothing that
is read; positions are drawn from bytes that have something beside them.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from storage_workload import turn_of, work

from longstraw_agents.errors import LongStrawError
from longstraw_agents.storage import Outline, Store
from longstraw_agents.storage.migrations import require_current, revision_of
from longstraw_agents.types import StopReason, Task, Trajectory, Turn

Call = Callable[[Store], str]


def fill(store: Store) -> None:
    """Two runs: steps of one group and of two, evaluations, shared history, and an open trajectory."""
    work(store, "flips", 1, lambda line: None)
    other = store.create_run("other", {"note": "open"})
    for number in (7, 8):
        trajectory = store.add_trajectory(store.add_group(other, Task("fault", number), 1), 0)
        store.append_turn(trajectory, 0, turn_of(number, 0, 0))
        store.finish_trajectory(trajectory, StopReason.ANSWERED, 0.25, {"part": 0.5}, success=True)
    groups = [group.group_id for group in store.groups(other)]
    store.commit_step(other, step=4, first_version=0, last_version=2, group_ids=groups, files={"a": "b"}, receipt={"loss": 1.5})
    left = store.add_trajectory(store.add_group(other, Task("fault", 9), 1, purpose="eval"), 0)
    store.append_turn(left, 0, turn_of(9, 0, 0))
    for run in ("r1", other):
        store.add_evaluation(run, "heldout", 1, {"success": 0.5})


def calls_of(store: Store) -> dict[str, Call]:
    """Every reading call of the interface on a sound store's contents, by name; each gives all that it says as one text."""
    calls: dict[str, Call] = {"runs": lambda store: repr(store.runs())}
    for run in [row.run_id for row in store.runs()]:
        for read in (Store.groups, Store.steps, Store.latest_step, Store.evaluations, Store.open_trajectories):
            calls[f"{read.__name__} {run}"] = lambda store, read=read, run=run: repr(read(store, run))
        for group in [row.group_id for row in store.groups(run)]:
            rows = store.trajectories(group)
            calls[f"trajectories {group}"] = lambda store, group=group: repr(store.trajectories(group))
            for name, length in [(row.trajectory_id, row.length) for row in rows]:
                calls[f"trajectory {name}"] = lambda store, name=name: repr(store.trajectory(name))
                calls[f"turns {name}"] = lambda store, name=name: "".join(map(_turn, store.turns(name)))
                calls[f"tokens {name}"] = lambda store, name=name, n=length: store.read_tokens(name, 3, n).tobytes().hex()
            if all(row.stop_reason for row in rows):
                names = [row.trajectory_id for row in rows]
                calls[f"group {group}"] = lambda store, group=group: "".join(map(_whole, store.load_group(group).trajectories))
                calls[f"outlines {group}"] = lambda store, names=names: "".join(map(_outline, store.outlines(names)))
    return calls


def _turn(turn: Turn) -> str:
    arrays = (turn.observation, turn.action, turn.behaviour)
    rest = (turn.policy_version, turn.reward, turn.reward_parts, turn.tool_calls, turn.observation_source)
    return "".join(array.tobytes().hex() for array in arrays) + repr(rest)


def _whole(loaded: Trajectory) -> str:
    arrays = (loaded.tokens, loaded.action_mask, loaded.behaviour, loaded.policy_version)
    rest = (loaded.trajectory_id, loaded.turn_ends, loaded.turn_rewards, loaded.reward, loaded.stop_reason, loaded.weight)
    return "".join(array.tobytes().hex() for array in arrays) + repr(rest)


def _outline(outline: Outline) -> str:
    arrays = (outline.action_starts, outline.checkpoints, outline.chains)
    rest = (outline.trajectory_id, outline.turn_ends, outline.turn_rewards, outline.reward, outline.stop_reason, outline.weight)
    return "".join(array.tobytes().hex() for array in arrays) + repr(rest)


def outcome_of(store: Store, calls: dict[str, Call], expected: dict[str, str]) -> str:
    """What became of one flip: "harmless", "caught", "caught, names trajectory and turn", or "missed" with what went wrong."""
    try:
        require_current(store.database.read(revision_of))
    except LongStrawError:
        return "caught when it is opened"
    errors = []
    for name, call in calls.items():
        try:
            if call(store) != expected[name]:
                return f"missed: {name}: another answer"
        except LongStrawError as error:
            errors.append(str(error))
        except Exception as error:
            return f"missed: {name}: {type(error).__name__}: {error}"
    if not errors:
        return "harmless"
    named = any(re.search(r"trajectory t\d+, turn \d+", error) for error in errors)
    return "caught, names trajectory and turn" if named else "caught"


def _trial(arguments: tuple[str, list[tuple[int, int]]]) -> collections.Counter[str]:
    """Flips the given bits, one at a time; counts what came of it."""
    original, flips = arguments
    content = Path(original).read_bytes()
    counts: collections.Counter[str] = collections.Counter()
    folder = tempfile.mkdtemp(prefix="longstraw-flip-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    path = os.path.join(folder, "store.sqlite")
    shutil.copy(original, path)
    store = Store.open(path, create=False)  # kept for its compiled statements; its connections are made anew for each flip
    calls = calls_of(store)
    expected = {name: call(store) for name, call in calls.items()}
    for at, bit in flips:
        store.close()
        for name in os.listdir(folder):
            os.remove(os.path.join(folder, name))
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        Path(path).write_bytes(damaged)
        outcome = outcome_of(store, calls, expected)
        counts[f"{outcome} (byte {at}, bit {bit})" if outcome.startswith("missed") else outcome] += 1
    store.close()
    shutil.rmtree(folder)
    return counts


def bit_flips(folder: Path, scale: float, part: slice = slice(None)) -> tuple[list[str], int]:
    """10,000 flips, or a part of them."""
    path, count = folder / "store.sqlite", max(10, int(10_000 * scale))
    with Store.open(str(path)) as store:
        fill(store)
    content = np.frombuffer(path.read_bytes(), np.uint8)
    near = np.convolve((content != 0).astype(np.int32), np.ones(9, np.int32), mode="same") > 0
    random = np.random.default_rng(0)
    places = random.choice(np.flatnonzero(near), count)
    flips = [(int(at), int(bit)) for at, bit in zip(places, random.integers(0, 8, count), strict=True)]
    flips = flips[part]
    parts = [(str(path), flips[start : start + 100]) for start in range(0, len(flips), 100)]
    with multiprocessing.Pool(2) as pool:
        total = sum(pool.imap_unordered(_trial, parts), collections.Counter())
    for outcome, times in total.items():
        if not outcome.startswith("missed"):
            print(f"bit flips, {outcome}: {times}")
    return [outcome for outcome in total.elements() if outcome.startswith("missed")], len(flips)
