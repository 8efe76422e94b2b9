"""Flipped bits: one bit of a store's file is flipped, all of the store is read, and the answer must be right or a typed error.

Bits in pages' empty space change nothing that is read; positions are drawn from bytes that have something beside them, and flips
that changed nothing are counted apart. A flip is missed if an answer differs without an error, or an error is not ours.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
from storage_workload import to_file, work

from longstraw_agents.errors import LongStrawError
from longstraw_agents.storage import Store
from longstraw_agents.storage.migrations import require_current, revision_of


def everything(store: Store) -> list[str]:
    """All that the store's interface says, in a form to compare, as if it had just been opened."""
    require_current(store.database.read(revision_of))
    said = [repr(store.runs())]
    for run in store.runs():
        groups = store.groups(run.run_id)
        said += [repr(groups), repr(store.steps(run.run_id)), repr(store.evaluations(run.run_id))]
        said.append(repr(store.open_trajectories(run.run_id)))
        for group in groups:
            rows = store.trajectories(group.group_id)
            said.append(repr(rows))
            for row, loaded in zip(rows, store.load_group(group.group_id).trajectories, strict=True):
                arrays = (loaded.tokens, loaded.action_mask, loaded.behaviour, loaded.policy_version)
                rest = (loaded.turn_ends, loaded.turn_rewards, loaded.reward, loaded.stop_reason, loaded.weight)
                said += [array.tobytes().hex() for array in arrays] + [repr(rest)]
                said.append(repr([(t.observation.tolist(), t.tool_calls) for t in store.turns(row.trajectory_id)]))
                said.append(store.read_tokens(row.trajectory_id, 3, row.length).tobytes().hex())
    return said


def _trial(arguments: tuple[str, list[tuple[int, int]]]) -> collections.Counter[str]:
    """Flips the given bits, one at a time; counts what came of it."""
    original, flips = arguments
    content = Path(original).read_bytes()
    counts: collections.Counter[str] = collections.Counter()
    folder = tempfile.mkdtemp(prefix="longstraw-flip-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    path = os.path.join(folder, "store.sqlite")
    shutil.copy(original, path)
    store = Store.open(path, create=False)  # kept for its compiled statements; its connections are made anew for each flip
    expected = everything(store)
    for at, bit in flips:
        store.close()
        for name in os.listdir(folder):
            os.remove(os.path.join(folder, name))
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        Path(path).write_bytes(damaged)
        try:
            outcome = "harmless" if everything(store) == expected else f"missed: byte {at} bit {bit}: another answer"
        except LongStrawError as error:
            outcome = "caught, names trajectory and turn" if re.search(r"trajectory t\d+, turn \d+", str(error)) else "caught"
        except Exception as error:
            outcome = f"missed: byte {at} bit {bit}: {type(error).__name__}: {error}"
        counts[outcome] += 1
    store.close()
    shutil.rmtree(folder)
    return counts


def bit_flips(folder: Path, scale: float) -> tuple[list[str], int]:
    """10,000 flips."""
    path, count = folder / "store.sqlite", max(10, int(10_000 * scale))
    with Store.open(str(path)) as store:
        work(store, "flips", 1, to_file(folder / "acknowledged"))
        store.add_evaluation("r1", "heldout", 1, {"success": 0.5})
    content = np.frombuffer(path.read_bytes(), np.uint8)
    near = np.convolve((content != 0).astype(np.int32), np.ones(9, np.int32), mode="same") > 0
    random = np.random.default_rng(0)
    places = random.choice(np.flatnonzero(near), count)
    flips = [(int(at), int(bit)) for at, bit in zip(places, random.integers(0, 8, count), strict=True)]
    parts = [(str(path), flips[start : start + 250]) for start in range(0, count, 250)]
    with multiprocessing.Pool(2) as pool:
        total = sum(pool.imap_unordered(_trial, parts), collections.Counter())
    for outcome, times in total.items():
        if not outcome.startswith("missed"):
            print(f"bit flips, {outcome}: {times}")
    return [outcome for outcome in total.elements() if outcome.startswith("missed")], count
