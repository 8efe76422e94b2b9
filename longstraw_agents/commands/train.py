"""Train on the store's complete, unused groups: one update, committed as a step."""

from __future__ import annotations

from pathlib import Path

import click

from longstraw_agents.commands import nproc_option, open_loop, run_options
from longstraw_agents.terminal import json_option, write_json


@click.command()
@run_options
@nproc_option
@json_option
def train(configuration: Path, settings: tuple[str, ...], json_path: Path | None) -> None:
    """Make one update of CONFIG.toml on the groups that the store holds, and commit the step."""
    with open_loop(configuration, settings) as loop:
        receipt = loop.train()
        loop.terminal.say(f"step {loop.done} committed; its files lie in {loop.step_folder}")
        write_json(json_path, receipt)
