"""Processes killed or stopped in each phase of an update: named, resumed, nothing applied twice or lost.

    python benchmarks/parallel_faults.py [--trials "1 capture 1 kill,..."] [--record]

A tiny model's groups are collected once. Each trial trains one update on a copy of that run in two processes, one of which dies
("kill": SIGKILL) or stops for good ("hang", with a timeout of 20 s) when it enters a phase; then the same command runs again,
with another number of processes in every second trial. What counts as a fault: the process is not named; there is not exactly
one committed step of version 1; a group was used by no step, or the optimizer made more than one; with two processes again, the
adapter is not bit for bit that of an undisturbed run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
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

TRIALS = (
    "1 capture 1 kill,1 replay 1 kill,1 reverse 1 kill,0 step 1 kill,0 checkpoint 1 kill,0 commit 1 kill,1 checkpoint 1 kill,"
    "1 reverse 1 hang"
)
HANG_TIMEOUT = 20.0


def train(file: Path, processes: int, trial: str | None = None) -> tuple[bool, str]:
    """`longstraw train FILE` in some processes; whether it succeeded, and what was said."""
    code = (
        "import sys; from longstraw_agents.launch import launch; "
        f"launch([sys.executable, '-m', 'tests.parallel_run', 'train', {str(file)!r}], {processes}, grace=15)"
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


def faults_of(trial: str, said: str, failed: bool, resumed: bool, now: dict[str, Any], adapter: str | None) -> list[str]:
    """What went wrong in a trial. adapter: the undisturbed run's, or None where the numbers of processes differ."""
    rank, _, _, how = trial.split()
    named = f"process {rank} of 2 " + ("hung" if how == "hang" else "was killed by SIGKILL")
    checks = {
        "the trial did not fail": failed, "the process was not named": named in said, "the run did not go on": resumed,
        "not exactly one step": now["steps"] == [(1, 0, 1)] and now["version"] == 1,
        "a group was not used once": now["used"] == ["1", "1"],
        "other weights": adapter is None or now["adapter"] == adapter,
    }  # fmt: skip
    return [what for what, fine in checks.items() if not fine]


def attempt(base: Path, number: int, trial: str, plain: str) -> dict[str, Any]:
    """One trial and what came of it; every second one goes on in one process."""
    folder, again = base / str(number), (2, 1)[number % 2]
    file = copy_of(base / "source", folder, HANG_TIMEOUT if trial.endswith("hang") else 300.0)
    started = time.monotonic()
    fine, said = train(file, 2, trial)
    seconds = time.monotonic() - started
    committed = bool(outcome(folder)["steps"])  # the process died after the step was kept
    resumed = committed or train(file, again)[0]
    faults = faults_of(trial, said, not fine, resumed, outcome(folder), plain if committed or again == 2 else None)
    found = {"trial": trial, "resumed_with": again, "seconds": round(seconds, 1), "faults": faults}
    print(json.dumps(found), said[-2000:] if faults else "", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", default=TRIALS, help='comma-separated "RANK PHASE COUNT HOW" of tests/parallel_run.py')
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "source").mkdir()
        prepare(base / "source", letters.make_model(base / "model"))
        train(copy_of(base / "source", base / "plain"), 2)
        plain = outcome(base / "plain")["adapter"]
        with ThreadPoolExecutor(options.jobs) as pool:
            numbered = enumerate(options.trials.split(","))
            seen = list(pool.map(lambda pair: attempt(base, *pair, plain), numbered))
    total = sum(len(entry["faults"]) for entry in seen)
    if options.record:
        figures.record("parallel.applied_twice_or_lost", total, trials=len(seen), extra={"trials": seen})


if __name__ == "__main__":
    main()
