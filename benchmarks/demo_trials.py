"""The demo as evidence: three seeds, and two controls that must not learn, or not succeed.

    python benchmarks/demo_trials.py --record [--folder runs/demo-trials] [--only seed-1]

Each trial is a run of its own that goes on where it stopped, so the script may be stopped and started again. Recorded: the lowest
gain of three seeds; the gain when an update's rewards are shuffled among its trajectories; and how far above chance the trained
models succeed when the tool returns random numbers.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from longstraw_agents import figures
from longstraw_agents.commands import quiet_libraries
from longstraw_agents.demo import CHANCE, demo_config, shuffled_rewards
from longstraw_agents.loop import Loop
from longstraw_agents.terminal import Terminal

SEEDS = (0, 1, 2)
COMMAND = "python benchmarks/demo_trials.py --record"


def seed_trial(folder: Path, seed: int) -> dict[str, Any]:
    """One seed of the demo, and its trained model under random tool results."""
    with Loop(demo_config(folder / f"seed-{seed}", seed), Terminal()) as loop:
        loop.run()
        loop.evaluate("random tools", {"tool_results": "random"})
        return trial_figures(loop)


def shuffled_trial(folder: Path, seed: int = 0) -> dict[str, Any]:
    """The demo with rewards shuffled among all trajectories of an update."""
    config = demo_config(folder / "shuffled", seed)
    with Loop(replace(config, run=replace(config.run, name="shuffled")), Terminal(), credit=shuffled_rewards(seed)) as loop:
        loop.run()
        return trial_figures(loop)


def trial_figures(loop: Loop) -> dict[str, Any]:
    """Gain with its interval, and every evaluation's success."""
    gain, interval = loop.gain("before", "after")
    greedy, _ = loop.gain("before", "after", "greedy")
    scores = loop.report()["evaluations"]
    return {
        "gain": round(gain, 2),
        "interval": [round(bound, 2) for bound in interval],
        "greedy_gain": round(greedy, 2),
        "success": {name: {mode: round(score["success"], 4) for mode, score in modes.items()} for name, modes in scores.items()},
    }


def record(trials: dict[str, dict[str, Any]]) -> None:
    """Write what was measured; a figure is written only when all its trials are there."""
    seeds = [trials[f"seed-{seed}"] for seed in SEEDS if f"seed-{seed}" in trials]
    if len(seeds) == len(SEEDS):
        gains = [trial["gain"] for trial in seeds]
        by_seed = {str(seed): trial for seed, trial in zip(SEEDS, seeds, strict=True)}
        figures.record("main.demo_gain_points", min(gains), "points", COMMAND, gains, by_seed)
        above = [100 * (trial["success"]["random tools"]["sampled"] - CHANCE) for trial in seeds]
        name = "main.demo_random_tools_success_over_chance_points"
        figures.record(name, max(above), "points", COMMAND, [round(points, 2) for points in above])
    if "shuffled" in trials:
        shuffled = trials["shuffled"]
        figures.record("main.demo_shuffled_reward_gain_points", shuffled["gain"], "points", COMMAND, [shuffled["gain"]], shuffled)


def main() -> None:
    """Run the trials that are asked for, print them, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the main.demo_* figures")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo-trials"))
    parser.add_argument("--only", help="one trial: seed-0, seed-1, seed-2 or shuffled")
    arguments = parser.parse_args()
    quiet_libraries()
    trials: dict[str, dict[str, Any]] = {}
    for name in [arguments.only] if arguments.only else [*(f"seed-{seed}" for seed in SEEDS), "shuffled"]:
        print(f"== {name}", flush=True)
        trials[name] = shuffled_trial(arguments.folder) if name == "shuffled" else seed_trial(arguments.folder, int(name[5:]))
        print(name, trials[name], flush=True)
    if arguments.record:
        record(trials)


if __name__ == "__main__":
    main()
