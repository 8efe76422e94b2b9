"""What the store costs: bytes and seconds, beside JSON lines and Parquet of the same data in the same run.

    python benchmarks/storage.py [--record] [--folder F] [append] [shared] [tree] [range] [peers]

Turns of 2,000 tokens (1,800 observation, 200 action) of English prose in SmolLM2's ids; SQLite with synchronous=FULL, PostgreSQL
with its defaults (fsync on). Sizes are files', after closing. The faults are in benchmarks/storage_faults.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from prose import prose
from sqlalchemy import text

from longstraw_agents import figures
from longstraw_agents.storage import Store
from longstraw_agents.types import StopReason, Task, Turn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from store_server import PostgreSQL

TOKENS, ACTION = 2000, 200
TASK = Task("benchmark", 0)
Record = Callable[..., None]


def turn_at(position: int, random: np.random.Generator | None = None, length: int = TOKENS, action: int = ACTION) -> Turn:
    """A turn of prose from `position`; random log-probabilities, or zeros, whose blob is shared, to leave them out."""
    ids = prose(length, position)
    logp = np.zeros(action, np.float32) if random is None else -random.random(action).astype(np.float32)
    return Turn(ids[: length - action], ids[length - action :], logp, 0)


def begin(store: Store, size: int = 8) -> str:
    """A group of a new run."""
    return store.add_group(store.create_run("benchmark", {}), TASK, size)


def fill(store: Store, trajectory: str, turns: int, first: int = 0, offset: int = 0) -> None:
    """Appends `turns` turns of prose without log-probabilities."""
    for index in range(first, first + turns):
        store.append_turn(trajectory, index, turn_at(offset + index * TOKENS))


@contextmanager
def hurried(path: Path) -> Iterator[Store]:
    """A store that is being prepared: without waiting for the disk. It is opened anew for what is measured."""
    from sqlalchemy import event

    with Store.open(str(path)) as store:
        event.listen(store.database.engine, "connect", lambda connection, record: connection.execute("PRAGMA synchronous=OFF"))
        store.database.engine.dispose()
        yield store


def append_ratio(url: str, pairs: int) -> dict[str, float]:
    """Medians of `pairs` interleaved appends to a trajectory of 4,000,000 tokens and to trajectories of 4,000."""
    with Store.open(url) as store:
        assert store.database.sqlite is False or _synchronous(store) == 2, "synchronous must be FULL"
        prepared = bool(store.runs())  # it holds the long trajectory already
        group = begin(store, size=pairs + 1)
        long = "t1" if prepared else store.add_trajectory(group, 0)
        if not prepared:
            fill(store, long, 2000)
        random = np.random.default_rng(0)
        seconds: dict[str, list[float]] = {"long": [], "short": []}
        for pair in range(pairs):
            short = store.add_trajectory(group, pair + 1)
            fill(store, short, 2, offset=pair * 7919 + 1)
            calls = {"long": (long, 2000 + pair), "short": (short, 2)}
            for name in ("long", "short") if pair % 2 else ("short", "long"):
                turn = turn_at(int(random.integers(10**6)), random)
                started = time.perf_counter()
                store.append_turn(*calls[name], turn)
                seconds[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(of) for name, of in seconds.items()}
    return {"ratio": medians["long"] / medians["short"], **{f"{name}_ms": 1e3 * m for name, m in medians.items()}}


def _synchronous(store: Store) -> int:
    with store.database.engine.connect() as connection:
        return connection.execute(text("PRAGMA synchronous")).scalar_one()


def measure_append(folder: Path, kept: Path, record: Record, pairs: int, databases: list[str]) -> None:
    """store.append_ratio.*"""
    for name in databases:
        server = PostgreSQL() if name == "postgresql" else None
        try:
            if server is None:
                url = str(folder / "append.sqlite")
                shutil.copy(_long(kept), url)
            else:
                url = server.url("append")
            extra = {key: round(value, 3) for key, value in append_ratio(url, pairs).items()}
            record(f"store.append_ratio.{name}", extra["ratio"], "", trials=pairs, extra=extra)
        finally:
            if server is not None:
                server.close()


def _long(kept: Path) -> Path:
    """A store with one trajectory, t1, of 4,000,000 tokens."""
    path = kept / "range.sqlite"
    if not path.exists():
        part = path.with_suffix(".part")
        with hurried(part) as store:
            fill(store, store.add_trajectory(begin(store), 0), 2000)
        part.rename(path)
    return path


def measure_shared(folder: Path, record: Record) -> None:
    """store.shared_bytes_ratio and store.bytes_per_token, with the bytes of log-probabilities beside them."""
    sizes = {}
    for members in (1, 8):
        path = folder / f"shared{members}.sqlite"
        with hurried(path) as store:
            group = begin(store)
            for member in range(members):
                trajectory = store.add_trajectory(group, member)
                fill(store, trajectory, 1000)
                store.append_turn(trajectory, 1000, turn_at(10**6 + member * 5021))
                store.finish_trajectory(trajectory, StopReason.ANSWERED, 1.0, {})
        sizes[members] = path.stat().st_size
    record("store.shared_bytes_ratio", sizes[8] / sizes[1], "", extra={"one": sizes[1], "eight": sizes[8]})

    path, turns = folder / "bytes.sqlite", 2000
    with hurried(path) as store:
        trajectory = store.add_trajectory(begin(store), 0)
        fill(store, trajectory, turns)
        store.finish_trajectory(trajectory, StopReason.ANSWERED, 1.0, {})
    size = path.stat().st_size
    with_logp = folder / "logp.sqlite"
    with hurried(with_logp) as store:
        trajectory, random = store.add_trajectory(begin(store), 0), np.random.default_rng(0)
        for index in range(500):
            store.append_turn(trajectory, index, turn_at(index * TOKENS, random))
    with hurried(folder / "plain.sqlite") as store:
        fill(store, store.add_trajectory(begin(store), 0), 500)
    logp = (with_logp.stat().st_size - (folder / "plain.sqlite").stat().st_size) / (500 * ACTION)
    extra = {"file": size, "tokens": turns * TOKENS, "bytes_per_log_probability": round(logp, 2)}
    record("store.bytes_per_token", size / (turns * TOKENS), "bytes", extra=extra)


TREE = """
import sys, time
from longstraw_agents.storage import Store
from longstraw_agents.store_tree import stored_tree
def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
with Store.open(sys.argv[1]) as store:
    names = [row.trajectory_id for row in store.trajectories("g1")]
    open("/proc/self/clear_refs", "w").write("5")  # the peak from here on
    before = kilobytes("VmRSS")
    started, busy = time.perf_counter(), time.process_time()
    stored = stored_tree(store, names)
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    peak = (kilobytes("VmHWM") - before) / 1024
print(seconds, peak, stored.source.tokens_read, len(stored.tree.nodes), busy)
"""


def measure_tree(folder: Path, record: Record) -> None:
    """store.tree_seconds and .tree_peak_mb: eight trajectories of 2,000,000 tokens, late branches, different turn borders."""
    path = folder / "tree.sqlite"
    if not path.exists():
        _write_tree(path, 2_000_000)
    found = []
    for _ in range(7):  # fresh processes
        answer = subprocess.run([sys.executable, "-c", TREE, str(path)], check=True, capture_output=True, text=True).stdout
        found.append([float(value) for value in answer.split()])
    seconds, peak, tokens, nodes, busy = (statistics.median(column) for column in zip(*found, strict=True))
    extra = {"tokens_read": int(tokens), "nodes": int(nodes), "seconds": [round(row[0], 3) for row in found]}
    extra |= {"processor_seconds": round(busy, 3), "load": round(os.getloadavg()[0], 1)}
    record("store.tree_seconds", seconds, "s", trials=len(found), extra=extra)
    record("store.tree_peak_mb", peak, "MB", trials=len(found))


def _write_tree(path: Path, length: int) -> None:
    part = path.with_suffix(".part")
    with hurried(part) as store:
        group = begin(store)
        for member in range(8):
            trajectory, shared = store.add_trajectory(group, member), length - 100_000 + 12_000 * member
            tokens = np.concatenate([prose(shared), np.roll(prose(length - shared, shared), member + 1)])
            position, turns = 0, 0
            while position < length:
                stop = min(position + 1800 + 7 * member + 37 * turns % 300, length)
                border = stop - (stop - position) // 10
                turn = Turn(tokens[position:border], tokens[border:stop], np.zeros(stop - border, np.float32), 0)
                store.append_turn(trajectory, turns, turn)
                position, turns = stop, turns + 1
            store.finish_trajectory(trajectory, StopReason.ANSWERED, 1.0, {})
            assert turns >= 1000, turns
    part.rename(path)


def measure_range(folder: Path, record: Record) -> None:
    """store.range_read_ms: 4,096 tokens at random places of 4,000,000."""
    path, trajectory = _long(folder), "t1"
    milliseconds = []
    with Store.open(str(path)) as store:
        for start in np.random.default_rng(0).integers(0, 4_000_000 - 4096, 300):
            started = time.perf_counter()
            ids = store.read_tokens(trajectory, int(start), int(start) + 4096)
            milliseconds.append(1e3 * (time.perf_counter() - started))
            assert np.array_equal(ids, prose(4096, int(start)))
    record(
        "store.range_read_ms",
        statistics.median(milliseconds),
        "ms",
        trials=len(milliseconds),
        extra={"p99": round(float(np.percentile(milliseconds, 99)), 2), "load": round(os.getloadavg()[0], 1)},
    )


def measure_peers(folder: Path, record: Record) -> None:
    """One trajectory of 1,000,000 tokens in the store, as JSON lines, and as Parquet: bytes, append, range read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    turns = [turn_at(index * TOKENS, np.random.default_rng(index)) for index in range(500)]
    rows = [{name: getattr(t, name).tolist() for name in ("observation", "action", "behaviour")} for t in turns]
    ours, lines, parquet = folder / "peer.sqlite", folder / "peer.jsonl", folder / "peer.parquet"
    spent = {"ours": [], "jsonl": [], "parquet": []}
    with Store.open(str(ours)) as store:
        trajectory = store.add_trajectory(begin(store), 0)
        for index, turn in enumerate(turns):
            started = time.perf_counter()
            store.append_turn(trajectory, index, turn)
            spent["ours"].append(time.perf_counter() - started)
    with open(lines, "w") as file:
        for row in rows:
            started = time.perf_counter()
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
            spent["jsonl"].append(time.perf_counter() - started)
    table = pa.Table.from_pylist(rows)
    for _ in range(3):  # a Parquet file cannot grow: an append writes it anew
        started = time.perf_counter()
        pq.write_table(table, parquet, compression="zstd")
        spent["parquet"].append(time.perf_counter() - started)

    def read_ours(start: int) -> None:
        store.read_tokens(trajectory, start, start + 4096)

    def read_lines(start: int) -> None:
        with open(lines) as file:
            wanted = [json.loads(line) for i, line in enumerate(file) if start // TOKENS <= i <= (start + 4096) // TOKENS]
        assert wanted

    def read_parquet(start: int) -> None:
        pq.read_table(parquet, columns=["observation", "action"]).slice(start // TOKENS, 4).to_pylist()

    reads = {}
    with Store.open(str(ours)) as store:
        for name, read in (("ours", read_ours), ("jsonl", read_lines), ("parquet", read_parquet)):
            times = []
            for start in np.random.default_rng(0).integers(0, 990_000, 20):
                started = time.perf_counter()
                read(int(start))
                times.append(time.perf_counter() - started)
            reads[name] = 1e3 * statistics.median(times)
    size = {name: path.stat().st_size for name, path in (("ours", ours), ("jsonl", lines), ("parquet", parquet))}
    print(f"{'':10}{'bytes':>12}{'append ms':>12}{'range ms':>12}")
    for name in size:
        print(f"{name:10}{size[name]:>12,}{1e3 * statistics.median(spent[name]):>12.2f}{reads[name]:>12.2f}")
    for name in ("jsonl", "parquet"):
        extra = {
            "bytes": size[name],
            "ours": size["ours"],
            "append_ms": round(1e3 * statistics.median(spent[name]), 2),
            "range_ms": round(reads[name], 2),
            "ours_append_ms": round(1e3 * statistics.median(spent["ours"]), 2),
            "ours_range_ms": round(reads["ours"], 2),
        }
        record(f"store.{name}_bytes_over_ours", size[name] / size["ours"], "", extra=extra)


def main() -> None:
    """Runs what is named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["append", "shared", "tree", "range", "peers"])
    parser.add_argument("--record", action="store_true", help="write the figures to docs/figures.json")
    parser.add_argument("--pairs", type=int, default=1000, help="pairs of appends")
    parser.add_argument("--databases", default="sqlite,postgresql", help="of append")
    parser.add_argument("--folder", type=Path, help="keep the stores of tree and range there, and use them again")
    arguments = parser.parse_args()

    def record(figure: str, value: float, unit: str, trials: int = 1, extra: dict | None = None) -> None:
        print(f"{figure}: {value:.4g} {unit} {extra or ''}", flush=True)
        if arguments.record:
            pairs = f"--pairs {arguments.pairs} " if part == "append" else ""
            command = f"python benchmarks/storage.py --record {pairs}{part}"  # whatever else was run, and where stores are kept
            figures.record(figure, value, unit, trials=trials, extra=extra, command=command)

    with tempfile.TemporaryDirectory(prefix="longstraw-storage-") as name:
        folder = Path(name)
        kept = arguments.folder or folder
        kept.mkdir(parents=True, exist_ok=True)
        parts = {
            "append": lambda: measure_append(folder, kept, record, arguments.pairs, arguments.databases.split(",")),
            "shared": lambda: measure_shared(folder, record),
            "tree": lambda: measure_tree(kept, record),
            "range": lambda: measure_range(kept, record),
            "peers": lambda: measure_peers(folder, record),
        }
        for part in arguments.parts:
            parts[part]()


if __name__ == "__main__":
    main()
