"""Care for a store: upgrade, check, stats, gc, copy, export, import."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from longstraw_agents.terminal import json_option, write_json


@click.group()
def db() -> None:
    """Care for a store. URL is the path of a SQLite file, or an SQLAlchemy URL such as postgresql://USER@HOST/NAME."""


@db.command()
@click.argument("url")
@json_option
def upgrade(url: str, json_path: Path | None) -> None:
    """Bring the store's schema to this version's."""
    from longstraw_agents.storage import admin

    before, after = admin.upgrade_store(url)
    click.echo(f"schema {after}: nothing to do" if before == after else f"schema {before} -> {after}")
    write_json(json_path, {"before": before, "after": after})


@db.command()
@click.argument("url")
@json_option
def check(url: str, json_path: Path | None) -> None:
    """Read all of the store and list what is damaged; exit status 1 if anything is."""
    from longstraw_agents.storage import Store, admin

    with Store.open(url, create=False) as store:
        problems = admin.check(store)
    for problem in problems:
        click.echo(f"{problem.where}: {problem.what}")
    click.echo(f"{len(problems)} problems" if problems else "all of it is right")
    write_json(json_path, {"problems": [asdict(problem) for problem in problems]})
    if problems:
        raise click.exceptions.Exit(1)


@db.command()
@click.argument("url")
@json_option
def stats(url: str, json_path: Path | None) -> None:
    """Count what the store holds, and its bytes."""
    from longstraw_agents.storage import Store

    with Store.open(url, create=False) as store:
        found = asdict(store.stats())
    for name, value in found.items():
        click.echo(f"{name:14} {value:>16,}")
    write_json(json_path, found)


@db.command()
@click.argument("url")
@click.option("--compact", is_flag=True, help="Give the space back to the file system; needs as much room again meanwhile.")
@click.option("--delete-run", "runs", multiple=True, metavar="RUN", help="First delete this run; may be given several times.")
@json_option
def gc(url: str, compact: bool, runs: tuple[str, ...], json_path: Path | None) -> None:
    """Delete blobs that nothing refers to."""
    from longstraw_agents.storage import Store, admin

    with Store.open(url, create=False) as store:
        for run in runs:
            store.delete_run(run)
        collected = admin.gc(store, compact=compact)
    click.echo(f"{collected.blobs} blobs, {collected.bytes:,} bytes collected")
    write_json(json_path, asdict(collected))


@db.command()
@click.argument("source")
@click.argument("target")
@json_option
def copy(source: str, target: str, json_path: Path | None) -> None:
    """Copy a whole store into an empty database, such as SQLite to PostgreSQL."""
    from longstraw_agents.storage import admin

    counts = admin.copy(source, target)
    click.echo(", ".join(f"{count} {name}" for name, count in counts.items() if count) or "the store is empty")
    write_json(json_path, counts)
