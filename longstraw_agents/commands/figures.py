"""Show every figure claimed, what falls short, and what was never measured."""

from __future__ import annotations

from pathlib import Path

import click

from longstraw_agents import figures as record_of
from longstraw_agents.terminal import json_option, write_json


@click.command()
@json_option
def figures(json_path: Path | None) -> None:
    """Show every figure claimed, what falls short, and what was never measured."""
    entries = record_of.read()
    click.echo(record_of.table(entries))
    write_json(json_path, {"entries": entries, "never_measured": record_of.never_measured(entries)})
