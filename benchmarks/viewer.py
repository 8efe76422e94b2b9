"""How long the viewer's pages take in Chromium, on 10,000 trajectories and on one of 2,000,000 tokens.

    python benchmarks/viewer.py [--record] [--folder F]

A page's time is from the request to the browser's load event: the server's work, the transfer, style and script. Five visits
each, the median counts; the first visit to a fresh server is reported beside it. The stores are made once and kept in F.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright
from prose import prose
from sqlalchemy import event

from longstraw_agents import figures
from longstraw_agents.storage import Store, admin, browse
from longstraw_agents.trainer.credit import packed
from longstraw_agents.types import StopReason, Task, ToolCall, Turn

GROUPS, MEMBERS, TURNS, OF_STEP = 1250, 8, 3, 8
VISITS = 5


@contextmanager
def hurried(path: Path) -> Iterator[Store]:
    """A store that is being prepared: without waiting for the disk."""
    with Store.open(str(path)) as store:
        event.listen(store.database.engine, "connect", lambda connection, record: connection.execute("PRAGMA synchronous=OFF"))
        store.database.engine.dispose()
        yield store


def turn_at(position: int, observation: int, action: int) -> Turn:
    """A turn of prose with log-probabilities and a call."""
    ids = prose(observation + action, position)
    logp = -np.random.default_rng(position).exponential(0.7, action).astype(np.float32)
    calls = [ToolCall("look", {"at": position}, result="found " * 20, seconds=0.1)]
    return Turn(ids[:observation], ids[observation:], logp, 0, reward=0.1, tool_calls=calls)


def make_many(path: Path) -> None:
    """10,000 trajectories in groups of eight, and a step with a receipt for every eight groups."""
    with hurried(path) as store:
        run = store.create_run("many", {"model": {"name": "smollm2-135m-instruct"}})
        waiting: list[str] = []
        for number in range(GROUPS):
            group = store.add_group(run, Task("longstraw/Lookup-v0", number), MEMBERS)
            for member in range(MEMBERS):
                name = store.add_trajectory(group, member)
                for index in range(TURNS):
                    shared = index < 1 + member % 2  # half of them part after the first turn
                    position = number * 911 + index * 83 + (0 if shared else member * 17 + 5)
                    store.append_turn(name, index, turn_at(position, 120, 30))
                reward = float((member * 7 + number) % 10) / 10
                store.finish_trajectory(name, StopReason.ANSWERED, reward, {"answer": reward}, success=reward > 0.5)
            waiting.append(group)
            if len(waiting) == OF_STEP:
                commit(store, run, (number + 1) // OF_STEP, waiting)
                waiting = []


def commit(store: Store, run: str, step: int, groups: list[str]) -> None:
    """A step whose receipt is as large as a real one's, numbers of single tokens included."""
    names = [row.trajectory_id for group in groups for row in store.trajectories(group)]
    spans = [[120, 150, 0.5], [270, 300, 0.5], [420, 450, -0.5]]
    metrics = {"kl_old": 1 / step, "clip_fraction": 0.1, "entropy": 1 / step, "mismatch_kl": 0.001}
    receipt = {
        "first_version": step - 1, "last_version": step, "gradient": "exact", "groups": groups,
        "inputs": {"capture": 9, "replay": 9},
        "collected": {"reward": step / 200, "success": step / 200, "tokens": 28800, "reward_parts": {"answer": step / 200}},
        "steps": [{"version": step, "loss": 0.1, "gradient_norm": 1.0, "learning_rate": 1e-3, "metrics": metrics}],
        "tokens": {"trajectories": 28800, "loss": 5760, "tree_targets": 12000},
        "phases": {name: {"seconds": 1.5, "peak_mib": 900.0} for name in ("segment", "score", "replay", "step")},
        "credit": dict.fromkeys(names, spans), "log_ratio": dict.fromkeys(names, packed(np.linspace(-0.1, 0.1, 90))),
    }  # fmt: skip
    store.commit_step(run, step=step, first_version=step - 1, last_version=step, group_ids=groups, files={}, receipt=receipt)


def make_long(path: Path) -> None:
    """A group of four that share 1,900,000 tokens and end at 2,000,000, and a turn with an observation of 1,000,000."""
    with hurried(path) as store:
        run = store.create_run("long", {"model": {"name": "smollm2-135m-instruct"}})
        group = store.add_group(run, Task("longstraw/DocumentSearch-v0", 0), 5)
        for member in range(4):
            name = store.add_trajectory(group, member)
            for index in range(1000):
                position = index * 2000 + (0 if index < 950 else member * 977 + 1)
                store.append_turn(name, index, turn_at(position, 1800, 200))
            store.finish_trajectory(name, StopReason.ANSWERED, float(member), {})
        name = store.add_trajectory(group, 4)
        store.append_turn(name, 0, turn_at(0, 1_000_000, 200))
        store.finish_trajectory(name, StopReason.ANSWERED, 0.0, {})


def pages_of_many(store: Store) -> list[str]:
    """Every page on the store of 10,000."""
    counts = browse.counts(store)["r1"]
    assert counts.trajectories == GROUPS * MEMBERS, counts
    return [
        "/", "/runs/r1", "/runs/r1?from=100", "/runs/r1/groups", "/runs/r1/groups?order=newest&from=1200",
        "/runs/r1/groups?step=9",
        "/runs/r1/receipts", "/runs/r1/receipts/100", "/groups/g600", "/trajectories/t5000", "/trajectories/t5000?colour=ratio",
        "/trajectories/t5000/tokens?form=table", "/compare?run=r1&run=r1", "/search?q=zebulun&in=r1",
        "/search?q=nowhere+at+all&in=r1",
    ]  # fmt: skip


def pages_of_long(store: Store) -> list[str]:
    """Every page on the trajectory of 2,000,000 tokens."""
    assert store.trajectory("t1").length == 2_000_000
    colours = [f"/trajectories/t1?turn=980&colour={name}" for name in ("mask", "log-probability", "advantage", "ratio")]
    return [
        "/groups/g1", "/trajectories/t1", "/trajectories/t1?position=1000000", *colours, "/trajectories/t5",
        "/trajectories/t1/tokens?start=1999000&colour=log-probability", "/trajectories/t1/tokens?start=1000000&form=table",
        "/trajectories/t5/tokens?start=700000", "/search?q=zebulun&in=t1",
    ]  # fmt: skip


@contextmanager
def served(path: Path) -> Iterator[str]:
    """The address of `longstraw view` on a store, in a process of its own."""
    command = [sys.executable, "-m", "longstraw_agents.cli", "view", str(path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0].rstrip("/")
    finally:
        process.terminate()
        process.wait()


def visit(tab: Page, address: str) -> float:
    """Milliseconds from the request to the load event. Raises RuntimeError for an answer that is no page."""
    started = time.perf_counter()
    answer = tab.goto(address, wait_until="load")
    milliseconds = 1e3 * (time.perf_counter() - started)
    if answer is None or answer.status != 200:
        raise RuntimeError(f"{address} answers {answer and answer.status}")
    return milliseconds


def measure(path: Path, pages: list[str], tab: Page) -> dict[str, tuple[float, float]]:
    """(median, first) of each page's visits."""
    found = {}
    with served(path) as address:
        for page in pages:
            times = [visit(tab, address + page) for _ in range(VISITS)]
            found[page] = statistics.median(times), times[0]
            print(f"{found[page][0]:8.0f} ms, first {times[0]:6.0f}  {page}", flush=True)
    return found


def main() -> None:
    """Make the stores where they are missing, visit all pages, and record the slowest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write operate.view_page_ms")
    kept = Path(tempfile.gettempdir()) / "longstraw-viewer"
    parser.add_argument("--folder", type=Path, default=kept, help="where the stores are kept")
    parser.add_argument("--only-make", action="store_true", help="make the stores and stop")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    stores = {"many": (make_many, pages_of_many), "long": (make_long, pages_of_long)}
    paths = {name: arguments.folder / f"{name}.sqlite" for name in stores}
    for name, (make, _) in stores.items():
        if not paths[name].exists():
            make(paths[name].with_suffix(".part"))
            paths[name].with_suffix(".part").rename(paths[name])
        admin.upgrade_store(str(paths[name]))  # one that was kept may be of an older schema
    if arguments.only_make:
        return
    found: dict[str, tuple[float, float]] = {}
    with sync_playwright() as running:
        tab = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"]).new_page()
        for name, (_, pages) in stores.items():
            with Store.open(str(paths[name]), create=False) as store:
                asked = pages(store)
            found |= measure(paths[name], asked, tab)
    slowest = max(found, key=lambda page: found[page][0])
    first = max(found, key=lambda page: found[page][1])
    extra = {"page": slowest, "pages": len(found), "slowest_first_visit_ms": round(found[first][1]), "first_visit_page": first}
    extra["load"] = round(os.getloadavg()[0], 1)  # what else the machine did meanwhile
    print(f"slowest: {found[slowest][0]:.0f} ms, {slowest}; slowest first visit: {found[first][1]:.0f} ms, {first}")
    if arguments.record:
        figures.record("operate.view_page_ms", found[slowest][0], "ms", trials=VISITS, extra=extra)


if __name__ == "__main__":
    main()
