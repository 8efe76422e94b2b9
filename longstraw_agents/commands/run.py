"""Run a configuration: collect, train and evaluate until its updates are done, or go on where it stopped."""

from __future__ import annotations

from pathlib import Path

import click

from longstraw_agents.commands import nproc_option, open_loop, run_options, workers_option
from longstraw_agents.terminal import json_option, write_json


@click.command()
@run_options
@workers_option
@nproc_option
@json_option
def run(configuration: Path, settings: tuple[str, ...], json_path: Path | None) -> None:
    """Run CONFIG.toml: collect, train and evaluate until its updates are done.

    A run that was stopped, by Ctrl-C or by a crash, goes on after its last complete step.
    """
    with open_loop(configuration, settings) as loop:
        write_json(json_path, loop.run())
        loop.terminal.say(loop.summary())
