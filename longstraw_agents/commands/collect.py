"""Collect the next update's groups into the store, without training."""

from __future__ import annotations

from pathlib import Path

import click

from longstraw_agents.commands import open_loop, run_options, workers_option
from longstraw_agents.terminal import json_option, write_json


@click.command()
@run_options
@workers_option
@json_option
def collect(configuration: Path, settings: tuple[str, ...], json_path: Path | None) -> None:
    """Collect the groups of the next update of CONFIG.toml, or what is missing of them. `longstraw train` uses them."""
    with open_loop(configuration, settings) as loop:
        group_ids = loop.collect()
        held = loop.collected(group_ids)
        loop.terminal.row({"update": loop.done + 1} | {key: value for key, value in held.items() if key != "stop_reasons"})
        write_json(json_path, {"update": loop.done + 1, "groups": group_ids} | held)
