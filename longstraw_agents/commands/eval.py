"""Evaluate a run's newest weights on held-out tasks, greedily and sampled."""

from __future__ import annotations

from pathlib import Path

import click

from longstraw_agents.commands import open_loop, run_options
from longstraw_agents.terminal import json_option, write_json


@click.command("eval")
@run_options
@click.option("--name", default=None, help="Name of the evaluation in the store; by default the number of updates done.")
@json_option
def eval(configuration: Path, settings: tuple[str, ...], name: str | None, json_path: Path | None) -> None:
    """Evaluate the newest weights of CONFIG.toml on its held-out tasks. The same name again shows the stored result."""
    with open_loop(configuration, settings) as loop:
        scores = loop.evaluate(name or f"update {loop.done}")
        for score in scores.values():
            loop.terminal.say(str(score))
        write_json(json_path, {mode: score.as_dict() for mode, score in scores.items()})
