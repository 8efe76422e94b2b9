"""Faults: what the store keeps through kills, crashes, power cuts, a full disk, many writers and flipped bits.

    python benchmarks/storage_faults.py [--record] [--scale 0.1] [sqlite_kill] [postgresql_kill] [postgresql_restart] [power_cut]
        [migration_kill] [disk_full] [writers_sqlite] [writers_postgresql] [bit_flips]

The longest, disk_full and bit_flips, may be run in parts: `--part 2/4 --results FOLDER` does the second of four and keeps its
result in FOLDER; the last of them reports and records all.

Each figure counts faults (lost, half, double, untyped) and must be 0. The workload is benchmarks/storage_workload.py: what it
writes is known beforehand, and it acknowledges each call that returned. SIGKILL cannot see what was not synced, so power cuts
are simulated from a log of all writes and syncs: what was not synced when the power went is dropped, or not, or torn; the same
with synchronous=OFF must lose something, or the simulation is blind.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import event
from storage_flips import bit_flips
from storage_power import cut, read_log
from storage_workload import MEMBERS, TURNS, contents, damage, faults, groups_of, to_file, work

from longstraw_agents import figures
from longstraw_agents.errors import LongStrawError, StoreFullError
from longstraw_agents.storage import Store, StoreConfig, admin
from longstraw_agents.storage.database import Database
from longstraw_agents.storage.migrations import upgrade

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from store_made import write_old_store
from store_server import PostgreSQL

HERE = Path(__file__).resolve().parent
Result = tuple[list[str], int]  # what went wrong, and how often it was tried


def lines(path: Path) -> list[str]:
    """The acknowledgements in a file; a last line without its end was not written whole."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def child(action: Callable[[], int | None]) -> int:
    """Runs `action` in a fork; returns its process id. Its exit status is what it returns, 9 for an exception."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 9
    try:
        status = action() or 0
    except BaseException as error:  # the child must not run its parent's code
        print(f"child: {type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(status)


def finished(pid: int) -> int:
    """Waits for a child; its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def collect(url: str, name: str, groups: int, log: Path) -> None:
    """Opens the store and works; what a child does."""
    with Store.open(url) as store:
        work(store, name, groups, to_file(log))


def verify(url: str, name: str, log: Path, *, complete: int | None = None) -> list[str]:
    """The faults in a run; with `complete`, resumes it to that many groups first."""
    if complete is not None:
        collect(url, name, complete, log)
    with Store.open(url) as store:
        found = damage(store) + faults(store, name, lines(log))
        if complete is not None and sum(group.step is not None for group in groups_of(store, name)) != complete:
            found.append("lost: the run did not resume to its end")
    return found


def kills(url: str, folder: Path, count: int, longest: float) -> list[str]:
    """`count` SIGKILLs at random moments of a collection that goes on after each; every kill is followed by a look."""
    log, found, groups = folder / "acknowledged", [], 1000
    with Store.open(url):
        pass
    for trial in range(count):
        pid = child(lambda: collect(url, "kill", groups, log))
        time.sleep(random.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        finished(pid)
        found += _last_acknowledged(url, log)
        if trial % 25 == 24 or trial == count - 1:
            found += verify(url, "kill", log)
    with Store.open(url) as store:
        done = len(groups_of(store, "kill"))
    return found + verify(url, "kill", log, complete=done + 1)


def _last_acknowledged(url: str, log: Path) -> list[str]:
    """Whether the last acknowledged turn is there: cheap enough to ask after every kill."""
    turns = [line.split() for line in lines(log) if line.startswith("turn")]
    if not turns:
        return []
    _, group, member, index = turns[-1]
    with Store.open(url) as store:
        found = store.trajectories(groups_of(store, "kill")[int(group)].group_id)
        return [] if found[int(member)].turns > int(index) else [f"lost: {' '.join(turns[-1])}"]


def sqlite_kill(folder: Path, scale: float) -> Result:
    """300 kills of the collecting process on SQLite, ten stores."""
    found, trials = [], 0
    for number in range(10):
        place = folder / str(number)
        place.mkdir()
        count = max(1, int(30 * scale))
        found += kills(str(place / "store.sqlite"), place, count, 0.3)
        trials += count
    return found, trials


def postgresql_kill(folder: Path, scale: float) -> Result:
    """100 kills of the collecting process on PostgreSQL."""
    server = PostgreSQL()
    try:
        count = max(1, int(100 * scale))
        return kills(server.url("kill"), folder, count, 0.4), count
    finally:
        server.close()


def postgresql_restart(folder: Path, scale: float) -> Result:
    """30 immediate restarts of PostgreSQL under two collecting processes, to which no error may come."""
    server, count, stop = PostgreSQL(), max(1, int(30 * scale)), folder / "stop"
    try:
        url = server.url("restart")

        def endless(name: str) -> None:
            with Store.open(url) as store:
                groups = 1
                while not stop.exists():
                    work(store, name, groups, to_file(folder / name))
                    groups += 1

        with Store.open(url):
            pass
        pids = [child(lambda name=name: endless(name)) for name in ("one", "two")]
        for _ in range(count):
            time.sleep(random.uniform(0.2, 1.0))
            server.stop("immediate")
            time.sleep(random.uniform(0, 0.3))
            server.start()
        stop.touch()
        found = [f"an error reached process {i}" for i, pid in enumerate(pids) if finished(pid)]
        return found + [f for name in ("one", "two") for f in verify(url, name, folder / name)], count
    finally:
        server.close()


def writers(url: str, folder: Path, processes: int, groups: int) -> list[str]:
    """`processes` processes that collect into one store, and a reader throughout; no error may reach any of them."""
    stop = folder / "stop"

    def reader() -> int:
        reads = 0
        while not stop.exists():
            with Store.open(url) as store:
                for run in store.runs():
                    for group in store.groups(run.run_id, complete=True)[-2:]:
                        reads += len(store.load_group(group.group_id).trajectories)
        return 0 if reads else 8

    with Store.open(url):
        pass
    names = [f"writer {i}" for i in range(processes)]
    pids = {name: child(lambda name=name: collect(url, name, groups, folder / name)) for name in names}
    reading = child(reader)
    found = [f"an error reached {name}" for name, pid in pids.items() if finished(pid)]
    stop.touch()
    if finished(reading):
        found.append("an error reached the reader, or it read nothing")
    with Store.open(url) as store:
        found += damage(store)
        for name in names:
            found += faults(store, name, lines(folder / name))
            if sum(group.step is not None for group in groups_of(store, name)) != groups:
                found.append(f"lost: {name} did not finish")
    return found


def writers_sqlite(folder: Path, scale: float) -> Result:
    """8 processes on one SQLite file."""
    return writers(str(folder / "store.sqlite"), folder, 8, max(1, int(8 * scale))), 8


def writers_postgresql(folder: Path, scale: float) -> Result:
    """16 processes on one PostgreSQL database."""
    server = PostgreSQL()
    try:
        return writers(server.url("writers"), folder, 16, max(1, int(3 * scale))), 16
    finally:
        server.close()


def migration_kill(folder: Path, scale: float) -> Result:
    """A kill before each statement of the migrations, of an empty database and of a store of the first schema, on both databases;
    then they are run again."""
    server, found, trials = PostgreSQL(), [], 0
    try:
        for database, old in itertools.product(("sqlite", "postgresql"), (False, True)):
            statement, killed = 1, True
            while killed:
                url = str(folder / f"{old}{statement}.sqlite") if database == "sqlite" else server.url("migration")
                if old:
                    write_old_store(url)
                killed = finished(child(lambda url=url, n=statement: _migrate_and_die(url, n))) == -signal.SIGKILL
                where = f"{database}, {'the first schema' if old else 'empty'}, statement {statement}"
                found += [f"{where}: {fault}" for fault in _after_migration(url, old)]
                trials += killed
                statement += max(1, int(1 / scale))
    finally:
        server.close()
    return found, trials


def _migrate_and_die(url: str, statement: int) -> None:
    """Migrates a database; dies before the `statement`-th statement."""
    database = Database(url, StoreConfig(), create=True)
    count = 0

    def before(*_: object) -> None:
        nonlocal count
        count += 1
        if count == statement:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(database.engine, "before_cursor_execute", before)
    database.write(upgrade)
    database.close()


def _after_migration(url: str, old: bool) -> list[str]:
    """What is wrong once the migration has been run again: with what was there, and with what is written then."""
    found: list[str] = []
    try:
        admin.upgrade_store(url)
        with Store.open(url, create=False) as store:
            if old and [len(contents(store, f"g{n + 1}", n, found)) for n in (0, 1)] != [MEMBERS * (TURNS + 1)] * 2:
                found.append("lost: a turn of the old store")
            work(store, "after", 1, lambda line: None)
            return found + damage(store) + faults(store, "after", [])
    except LongStrawError as error:
        return [*found, str(error)]


def _shimmed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs this file again, with the disk shim under it."""
    shim = folder / "shim.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(shim), str(HERE / "disk_shim.c"), "-ldl", "-lpthread"], check=True)
    watched = folder / "disk"
    watched.mkdir(exist_ok=True)
    environment = {**os.environ, "LD_PRELOAD": str(shim), "SHIM_FOLDER": str(watched)}
    if "log" in arguments:
        environment["SHIM_LOG"] = str(folder / "log")
    command = [sys.executable, str(Path(__file__).resolve()), "--inside", *arguments, str(watched)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True)


def power_cut(folder: Path, scale: float) -> Result:
    """100 simulated power cuts; and as many with synchronous=OFF, which must lose something."""
    count, found = max(2, int(100 * scale)), []
    for setting in ("FULL", "OFF"):
        place = folder / setting
        place.mkdir()
        _shimmed(place, "log", setting)
        operations = read_log(place / "log", place / "disk")
        lost = []
        for trial in range(count):
            image = place / f"after{trial}"
            acknowledged = cut(operations, image, random.Random(trial))
            (image / "acknowledged").write_text("".join(f"{line}\n" for line in acknowledged))
            try:
                lost += verify(str(image / "store.sqlite"), "power", image / "acknowledged")
            except LongStrawError as error:
                lost.append(f"half: {error}")
            shutil.rmtree(image)
        print(f"power cuts with synchronous={setting}: {len(lost)} faults in {count}", flush=True)
        if setting == "FULL":
            found = lost
        elif not lost:
            found.append("the simulation sees no loss with synchronous=OFF: it is blind")
    return found, count


def disk_full(folder: Path, scale: float, part: slice = slice(None)) -> Result:
    """The disk is full from the Nth write on, N swept over the whole run: StoreFullError, then all goes on."""
    step = max(1, int(1 / scale))
    numbers = f"{1 + (part.start or 0) * step}:{step * (part.step or 1)}"
    output = _shimmed(folder, "sweep", numbers).stdout.strip().split("\n")
    return [line for line in output[:-1] if line], int(output[-1])


def inside(mode: str, setting: str, disk: Path) -> None:
    """What runs with the shim under it: a logged run, or the sweep over writes that fail."""
    if mode == "log":
        acknowledge = to_file(disk / "acknowledged")
        for groups in (1, 2, 4, 6):  # closing folds the log into the file: cuts there too
            with Store.open(str(disk / "store.sqlite")) as store:
                event.listen(store.database.engine, "connect", lambda c, r: c.execute(f"PRAGMA synchronous={setting}"))
                event.listen(store.database.engine, "connect", lambda c, r: c.execute("PRAGMA wal_autocheckpoint=50"))
                store.database.engine.dispose()
                work(store, "power", groups, acknowledge)
        return
    number, step = map(int, setting.split(":"))
    shim, trials = ctypes.CDLL(None), 0
    while True:
        place = disk / str(number)
        place.mkdir()
        log = disk.parent / f"acknowledged{number}"
        status = finished(child(lambda place=place, log=log, number=number: _on_full_disk(shim, place, log, number)))
        if status == 0:
            break
        trials += 1
        if status != 7:
            print(f"write {number}: the error was not StoreFullError (status {status})")
        try:
            for fault in verify(str(place / "store.sqlite"), "full", log, complete=1):
                print(f"write {number}: {fault}")
        except LongStrawError as error:
            print(f"write {number}: {error}")
        shutil.rmtree(place)
        number += step
    print(trials)


def _on_full_disk(shim: ctypes.CDLL, place: Path, log: Path, number: int) -> int:
    """7 if the full disk came as a StoreFullError, 0 if the run ended before the disk was full."""
    shim.shim_fail_from(ctypes.c_long(number))
    try:
        collect(str(place / "store.sqlite"), "full", 1, log)
    except StoreFullError:
        return 7
    finally:
        shim.shim_fail_from(ctypes.c_long(0))
    return 0


def in_parts(trial: Callable[..., Result], scale: float, part: str, results: Path | None) -> Result | None:
    """Does the K-th of N parts ("K/N") of a trial; all of its result once every part has one, else None."""
    number, parts = map(int, part.split("/"))
    folder = Path(tempfile.mkdtemp(prefix=f"longstraw-{trial.__name__}-"))
    every = slice(number - 1, None, parts)
    result = trial(folder, scale, every) if parts > 1 else trial(folder, scale)
    shutil.rmtree(folder, ignore_errors=True)
    if parts == 1 or results is None:
        return result
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{trial.__name__}-{number}-of-{parts}.json").write_text(json.dumps(result))
    done = [json.loads(file.read_text()) for file in results.glob(f"{trial.__name__}-*-of-{parts}.json")]
    return (sum((found for found, _ in done), []), sum(count for _, count in done)) if len(done) == parts else None


TRIALS: dict[str, Callable[..., Result]] = {
    "sqlite_kill": sqlite_kill,
    "postgresql_kill": postgresql_kill,
    "postgresql_restart": postgresql_restart,
    "power_cut": power_cut,
    "migration_kill": migration_kill,
    "disk_full": disk_full,
    "writers_sqlite": writers_sqlite,
    "writers_postgresql": writers_postgresql,
    "bit_flips": bit_flips,
}


def main() -> None:
    """Runs the named trials, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", nargs="*", default=list(TRIALS))
    parser.add_argument("--record", action="store_true", help="write the figures and their numbers of trials")
    parser.add_argument("--scale", type=float, default=1.0, help="the part of the trials that is run")
    parser.add_argument("--part", default="1/1", help="K/N: do the K-th of N parts of disk_full or bit_flips")
    parser.add_argument("--results", type=Path, help="where the results of parts are kept")
    parser.add_argument("--inside", nargs=3, metavar=("MODE", "SETTING", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments.inside[0], arguments.inside[1], Path(arguments.inside[2]))
        return
    multiprocessing.set_start_method("fork")
    random.seed(0)
    for name in arguments.trials:
        started = time.perf_counter()
        result = in_parts(TRIALS[name], arguments.scale, arguments.part, arguments.results)
        if result is None:
            print(f"{name}, part {arguments.part}: {time.perf_counter() - started:.0f} s", flush=True)
            continue
        found, trials = result
        figure = f"store.faults.{name}" + ("_missed" if name == "bit_flips" else "")
        seconds = time.perf_counter() - started
        print(f"{figure}: {len(found)} faults in {trials} trials, {seconds:.0f} s, SQLite {sqlite3.sqlite_version}", flush=True)
        for fault in found[:20]:
            print(f"  {fault}")
        if arguments.record:
            scale = "" if arguments.scale == 1 else f" --scale {arguments.scale:g}"
            command = f"python benchmarks/storage_faults.py --record{scale} {name}"
            figures.record(figure, len(found), "faults", command=command, trials=trials)


if __name__ == "__main__":
    main()
