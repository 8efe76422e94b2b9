"""Processes killed or stopped in each phase of an update: named, resumed, nothing applied twice or lost.

    python benchmarks/parallel_faults.py [--trials "1 capture 1 kill 2,..."] [--results FILE] [--record]

A tiny model's groups are collected once. Each trial trains one update on a copy of that run in two processes, one of which dies
("kill": SIGKILL) or stops for good ("hang", timeout 20 s) when it enters a phase; then the same command runs again, with
two processes or one. What counts as a fault: the run did not end within the stated time, or without naming the process; there is
not exactly one committed step of version 1; a group was used by no step, or the optimizer made more than one; the adapter is not
bit for bit that of an undisturbed run with as many processes as made the step.

Trials that lie in `--results` from earlier calls are kept, so that they can be run in several short calls; `--record` writes the
figure over all of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import letters  # noqa: E402

from longstraw_agents import config as toml  # noqa: E402
from longstraw_agents import figures  # noqa: E402
from longstraw_agents.loop import Loop, RunConfig, RunSettings, TaskSettings  # noqa: E402
from longstraw_agents.storage import Store  # noqa: E402
from longstraw_agents.trainer.models import LoraSettings, ModelConfig  # noqa: E402
from longstraw_agents.trainer.ranks import Layout  # noqa: E402

PHASES = ("capture", "replay", "reverse", "step", "checkpoint")
#: "RANK PHASE COUNT HOW" of tests/parallel_run.py, and with how many processes the run goes on.
TRIALS = (
    *(f"1 {phase} 1 kill 2" for phase in PHASES), *(f"0 {phase} 1 kill 1" for phase in PHASES), "0 commit 1 kill 2",
    "1 reverse 1 hang 2", "0 capture 1 hang 1", "1 step 1 hang 1",
)  # fmt: skip
HANG_TIMEOUT = 20.0
GRACE = 10.0
#: Seconds from the fault to the end of the run: the others' last word (or the timeout and two beats of the watch), then the
#: launcher stops what is left.
WITHIN = {"kill": GRACE + 10, "hang": HANG_TIMEOUT + GRACE + 10}


def train(file: Path, processes: int, trial: str | None = None) -> tuple[bool, str]:
    """`longstraw train FILE` in some processes; whether it succeeded, and what was said."""
    code = (
        "import sys; from longstraw_agents.launch import launch; "
        f"launch([sys.executable, '-m', 'tests.parallel_run', 'train', {str(file)!r}], {processes}, grace={GRACE})"
    )
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    if trial is not None:
        environment["LONGSTRAW_TRIAL"] = trial
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=1200)
    return done.returncode == 0, done.stdout + done.stderr


def prepare(folder: Path, model: str) -> None:
    """A run with one update's groups collected and none trained on, and its configuration file."""
    config = RunConfig(
        run=RunSettings(folder=folder / "run", updates=1), tasks=TaskSettings(env="tests/Letters-v0", groups=2, samples=4),
        model=ModelConfig(name=model, adapter=LoraSettings(rank=4)), parallel=Layout(),
    )  # fmt: skip
    with Loop(config) as loop:
        loop.collect()
    (folder / "config.toml").write_text(toml.dump(config), encoding="utf-8")


def copy_of(source: Path, target: Path, timeout: float = 300.0) -> Path:
    """The prepared run in another folder, with another timeout."""
    shutil.copytree(source, target)
    text = (target / "config.toml").read_text(encoding="utf-8").replace(str(source / "run"), str(target / "run"))
    text = text.replace("timeout = 300.0", f"timeout = {timeout}")
    (target / "config.toml").write_text(text, encoding="utf-8")
    return target / "config.toml"


def outcome(folder: Path) -> dict[str, Any]:
    """What the run has committed."""
    with Store.open(str(folder / "run" / "store.sqlite")) as store:
        (run,) = store.runs()
        steps = [(step.step, step.first_version, step.last_version) for step in store.steps(run.run_id)]
        used = sorted(str(group.step) for group in store.groups(run.run_id, purpose="train"))
    step = folder / "run" / "steps" / "000001"
    adapter = step / "adapter_model.safetensors"
    digest = hashlib.sha256(adapter.read_bytes()).hexdigest() if adapter.exists() else None
    version = json.loads((step / "trainer.json").read_text())["version"] if adapter.exists() else None
    return {"steps": steps, "used": used, "version": version, "adapter": digest}


def faults_of(trial: str, said: str, seconds: float, resumed: bool, now: dict[str, Any], adapter: str | None) -> list[str]:
    """What went wrong in a trial. adapter: the undisturbed run's."""
    rank, _, _, how, _ = trial.split()
    named = f"process {rank} of 2 " + ("hung" if how == "hang" else "was killed by SIGKILL")
    checks = {
        "not noticed within the stated time": seconds <= WITHIN[how], "the process was not named": named in said,
        "the run did not go on": resumed, "not exactly one step": now["steps"] == [(1, 0, 1)] and now["version"] == 1,
        "a group was not used once": now["used"] == ["1", "1"], "other weights": now["adapter"] == adapter,
    }  # fmt: skip
    return [what for what, fine in checks.items() if not fine]


def attempt(base: Path, number: int, trial: str, plain: dict[int, str | None]) -> dict[str, Any]:
    """One trial and what came of it. plain: the adapters of undisturbed runs, by number of processes."""
    arming, again = trial.rsplit(" ", 1)
    folder = base / str(number)
    file = copy_of(base / "source", folder, HANG_TIMEOUT if arming.endswith("hang") else 300.0)
    fine, said = train(file, 2, arming)
    begun = re.search(r"trial begins at ([\d.]+)", said)
    seconds = time.time() - float(begun[1]) if begun and not fine else float("inf")
    committed = bool(outcome(folder)["steps"])  # the process died after the step was kept
    resumed = committed or train(file, int(again))[0]
    faults = faults_of(trial, said, seconds, resumed, outcome(folder), plain[2 if committed else int(again)])
    found = {"trial": trial, "seconds_to_end": round(seconds, 1), "committed_before": committed, "faults": faults}
    print(json.dumps(found), said[-2000:] if faults else "", flush=True)
    return found


def record(seen: list[dict[str, Any]]) -> None:
    """Write the figure over all trials."""
    slowest = {
        how: max((entry["seconds_to_end"] for entry in seen if entry["trial"].split()[3] == how), default=None) for how in WITHIN
    }
    total = sum(len(entry["faults"]) for entry in seen)
    extra = {"stated_seconds": WITHIN, "slowest_seconds": slowest, "trials": seen}
    command = "python benchmarks/parallel_faults.py --record"
    figures.record("parallel.applied_twice_or_lost", total, command=command, trials=len(seen), extra=extra)


def run(trials: list[str], jobs: int) -> list[dict[str, Any]]:
    """Collect a run's groups, train on them undisturbed with two processes and with one, and make the trials on copies."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "source").mkdir()
        prepare(base / "source", letters.make_model(base / "model"))
        plain = {}
        for processes in (2, 1):
            train(copy_of(base / "source", base / f"plain{processes}"), processes)
            plain[processes] = outcome(base / f"plain{processes}")["adapter"]
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(lambda pair: attempt(base, *pair, plain), enumerate(trials)))


def main() -> None:
    """See the module's head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", default=",".join(TRIALS), help="comma-separated, as in TRIALS; none only records")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--results", type=Path, help="a file that keeps the trials of several calls")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    kept = json.loads(options.results.read_text()) if options.results and options.results.exists() else []
    trials = [trial for trial in options.trials.split(",") if trial]
    seen = [entry for entry in kept if entry["trial"] not in trials] + (run(trials, options.jobs) if trials else [])
    if options.results:
        options.results.write_text(json.dumps(seen, indent=1) + "\n")
    if options.record:
        record(seen)


if __name__ == "__main__":
    main()
