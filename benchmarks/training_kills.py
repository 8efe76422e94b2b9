"""SIGKILL in training at random points: what must hold afterwards, a hundred times on one run.

    python benchmarks/training_kills.py --record [--trials 100] [--seed 0]

A child goes on with the run (collect, train, commit, again) until it is killed after a random time; then another looks at what is
left. A fault is: the newest complete step does not load or is not what was written; steps have a gap, or versions do not follow
each other; the optimizer's own count differs from the version (a step applied twice, or lost); a group served two steps; more
than one update was made again. Every trial begins from what the one before it left.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from longstraw_agents import figures
from longstraw_agents.checkpoints import check_step
from longstraw_agents.loop import Loop, RunConfig
from longstraw_agents.storage import Store

sys.path.insert(0, str(figures.ROOT / "tests"))
import letters

fork = multiprocessing.get_context("fork")


def train_until_killed(config: RunConfig, begun: Path) -> None:
    """The child: update after update; the number of each is written down before it begins."""
    torch.set_num_threads(1)
    with Loop(config) as loop:
        while True:
            with open(begun, "a") as file:
                file.write(f"{loop.done + 1}\n")
            loop.collect()
            loop.train()


def faults_of(config: RunConfig, begun: Path) -> list[str]:
    """What is wrong with what the killed child left."""
    found = []
    with Store.open(str(config.run.folder / "store.sqlite")) as store:
        run_id = store.runs()[0].run_id
        steps = store.steps(run_id)
        if [step.step for step in steps] != list(range(1, len(steps) + 1)):
            found.append(f"steps {[step.step for step in steps]}")
        versions = [0, *(step.last_version for step in steps)]
        if [step.first_version for step in steps] != versions[:-1]:
            found.append("versions do not follow each other")
        used = [group for step in steps for group in step.group_ids]
        if len(used) != len(set(used)):
            found.append("a group served two steps")
        if steps:
            folder = check_step(config.run.folder / "steps", steps[-1].step, steps[-1].files)
            saved = torch.load(folder / "optimizer.pt", weights_only=True)
            if saved["steps"] != steps[-1].last_version:
                found.append(f"the optimizer counts {saved['steps']} steps, the version is {steps[-1].last_version}")
    numbers = [int(line) for line in begun.read_text().split()] if begun.exists() else []
    made_again = sum(later <= earlier for earlier, later in zip(numbers, numbers[1:], strict=False))
    jumps = [pair for pair in zip(numbers, numbers[1:], strict=False) if pair[1] - pair[0] not in (0, 1)]
    if jumps:
        found.append(f"updates began out of order: {jumps}")
    return found if made_again <= 1 else [*found, f"{made_again} updates were made again"]


def look(config: RunConfig, begun: Path, result: multiprocessing.SimpleQueue) -> None:  # type: ignore[type-arg]
    """A fresh process: torch's threads of a killed child must not matter, and a load error is a fault like any other."""
    try:
        result.put(faults_of(config, begun))
    except Exception as error:
        result.put([f"{type(error).__name__}: {error}"])


def trial(config: RunConfig, scratch: Path, seconds: float) -> list[str]:
    """Run a child for some seconds, kill it, and look. `begun` keeps the last update of the trial before as its first line."""
    begun = scratch / "begun"
    last = begun.read_text().split()[-1:] if begun.exists() else []
    begun.write_text("".join(f"{number}\n" for number in last))
    child = fork.Process(target=train_until_killed, args=(config, begun))
    child.start()
    time.sleep(seconds)
    alive = child.is_alive()
    os.kill(child.pid or 0, signal.SIGKILL) if alive else None
    child.join()
    queue = fork.SimpleQueue()
    looker = fork.Process(target=look, args=(config, begun, queue))
    looker.start()
    found = queue.get()
    looker.join()
    return found if alive else [*found, f"the child ended by itself with status {child.exitcode}"]


def main() -> None:
    """All trials; the figure is the number of trials with a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write operate.training_kill_faults")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="longstraw-kills-"))
    rng, bad = random.Random(arguments.seed), 0
    try:
        maker = fork.Process(target=letters.make_model, args=(scratch / "model",))
        maker.start()
        maker.join()
        config = letters.letters_config(str(scratch / "model"), scratch / "run")
        config = replace(config, run=replace(config.run, updates=10**6))
        for number in range(arguments.trials):
            found = trial(config, scratch, rng.uniform(0.5, 4.0))
            bad += bool(found)
            print(f"trial {number + 1}: {found or 'good'}, update {(scratch / 'begun').read_text().split()[-1:]}", flush=True)
    finally:
        shutil.rmtree(scratch)
    print(f"{bad} of {arguments.trials} trials with a fault")
    if arguments.record:
        figures.record("operate.training_kill_faults", bad, "trials", trials=arguments.trials)


if __name__ == "__main__":
    main()
