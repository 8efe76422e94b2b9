"""Care for a store: upgrade, check, stats, gc, copy, export, import."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from longstraw_agents.errors import ConfigError
from longstraw_agents.terminal import json_option, write_json

if TYPE_CHECKING:
    from longstraw_agents.storage.chat import ChatFormat


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


FORMATS = ("jsonl", "parquet", "sft", "preferences", "atif")


@db.command("export")
@click.argument("url")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--run", "run_id", required=True, metavar="RUN", help="The run, such as r1.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="jsonl", show_default=True)
@click.option("--tokenizer", metavar="NAME", help="For sft, preferences and atif: folder or hub name of the model's tokenizer.")
@click.option("--least-reward", type=float, help="For sft: leave trajectories with less out.")
@json_option
def export(
    url: str, path: Path, run_id: str, form: str, tokenizer: str | None, least_reward: float | None, json_path: Path | None
) -> None:
    """Write a run to a file: exactly (jsonl, parquet), or as text for other tools (sft, preferences, atif: a folder)."""
    from longstraw_agents.storage import Store, chat, interchange

    with Store.open(url, create=False) as store:
        if form in ("jsonl", "parquet"):
            count = getattr(interchange, f"export_{form}")(store, run_id, path)
        elif tokenizer is None:
            raise click.UsageError(f"--format {form} needs --tokenizer")
        elif form == "sft":
            count = chat.export_sft(store, run_id, path, _chat_format(tokenizer), least_reward=least_reward)
        elif form == "preferences":
            count = chat.export_preferences(store, run_id, path, _chat_format(tokenizer))
        else:
            count = chat.export_atif(store, run_id, path, _chat_format(tokenizer), tokenizer)
    click.echo(f"{count} {'pairs' if form == 'preferences' else 'trajectories'} -> {path}")
    write_json(json_path, {"count": count})


@db.command("import")
@click.argument("url")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--format", "form", type=click.Choice(("jsonl", "parquet", "atif")), default="jsonl", show_default=True)
@click.option("--name", default="import", show_default=True, help="The new run's name.")
@json_option
def import_(url: str, paths: tuple[Path, ...], form: str, name: str, json_path: Path | None) -> None:
    """Read exported files into new runs of a store: one run a file, or one for all ATIF documents."""
    from longstraw_agents.storage import Store, chat, interchange

    with Store.open(url) as store:
        if form == "atif":
            runs = [chat.import_atif(store, paths, name)]
        else:
            runs = [getattr(interchange, f"import_{form}")(store, path, name) for path in paths]
    click.echo(f"imported as {', '.join(runs)}")
    write_json(json_path, {"runs": runs})


def _chat_format(name: str) -> ChatFormat:
    """ChatML with the ids and the text of a tokenizer."""
    from transformers import AutoTokenizer

    from longstraw_agents.cache import SMOLLM2
    from longstraw_agents.storage.chat import ChatFormat
    from longstraw_agents.trainer.models import smollm2_folder

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder() if name == SMOLLM2 else name)
    start, end = (tokenizer.convert_tokens_to_ids(text) for text in ("<|im_start|>", "<|im_end|>"))
    if start is None or end is None or start == tokenizer.unk_token_id:
        raise ConfigError(f"the tokenizer {name} has no <|im_start|> and <|im_end|>; only ChatML is understood")
    return ChatFormat(start, end, tokenizer.decode)
