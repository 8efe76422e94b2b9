"""Compare two evaluations of a run on the same tasks, and score them again under other options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from longstraw_agents.commands import parse_settings, run_options
from longstraw_agents.errors import StoreError
from longstraw_agents.terminal import json_option, write_json


@click.command()
@run_options
@click.argument("first")
@click.argument("last")
@click.option("--mode", type=click.Choice(["sampled", "greedy"]), default="sampled", show_default=True)
@click.option("--k", default=None, type=click.IntRange(min=1), help="Also pass@k, for k up to the samples of a task.")
@click.option(
    "--rescore", "changes", multiple=True, metavar="OPTION=VALUE",
    help="Score the stored episodes again in environments with this option changed; nothing is sampled. May be repeated.",
)  # fmt: skip
@json_option
def compare(
    configuration: Path, settings: tuple[str, ...], first: str, last: str, mode: str, k: int | None, changes: tuple[str, ...],
    json_path: Path | None,
) -> None:  # fmt: skip
    """Compare the evaluations FIRST and LAST of CONFIG.toml's run ("before", "after", "update 8", or what `longstraw eval` was
    told to call them), paired by task.

    No model is loaded: everything is in the store.
    """
    from longstraw_agents import config as toml
    from longstraw_agents.loop import RunConfig
    from longstraw_agents.scores import Outcome, score
    from longstraw_agents.statistics import compare as paired
    from longstraw_agents.statistics import mean_pass_at_k
    from longstraw_agents.storage import Store

    config = toml.load(configuration, RunConfig, parse_settings(settings))
    result: dict[str, Any] = {}
    means: dict[str, list[float]] = {}
    tasks: dict[str, list[Any]] = {}
    with Store.open(config.run.store or str(config.run.folder / "store.sqlite"), create=False) as store:
        for name in (first, last):
            run_id, groups = _groups(store, config.run.name, name, mode)
            asked = {row.group_id: row.task for row in store.groups(run_id, purpose="eval")}
            tasks[name] = [asked[group] for group in groups]
            of_tasks: list[list[Outcome]] = _outcomes(store, config, groups, changes)
            found = score(mode, of_tasks)
            valid = [[episode.success for episode in task if episode.reward is not None] for task in of_tasks]
            means[name] = [sum(task) / len(task) if task else 0.0 for task in valid]
            click.echo(f"{name:<12} {found}")
            result[name] = found.as_dict()
            if k is not None:
                value, (low, high) = mean_pass_at_k([task for task in valid if task], k)
                click.echo(f"{'':<12} pass@{k} {value:6.1%} [{low:.1%}, {high:.1%}]")
                result[name][f"pass@{k}"] = {"value": value, "interval": (low, high)}
    if tasks[first] != tasks[last]:
        raise StoreError(f"evaluations {first!r} and {last!r} are of different tasks; only the same tasks can be compared")
    difference = paired(means[first], means[last])
    low, high = difference.interval
    click.echo(
        f"difference   {100 * difference.difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}], p = "
        f"{difference.probability:.3g}; {difference.wins} tasks better, {difference.losses} worse, {difference.ties} alike"
    )
    write_json(json_path, result | {"difference": asdict(difference)})


def _groups(store: Any, run: str, name: str, mode: str) -> tuple[str, Sequence[str]]:
    """The run and the groups of one evaluation, in the order of its tasks; of the run itself, or of a run beside it."""
    known = []
    for found in (found for found in store.runs() if found.name == run or found.name.startswith(f"{run}/")):
        for row in store.evaluations(found.run_id):
            if row.name == name and mode in row.metrics:
                return found.run_id, row.metrics[mode]["groups"]
            known += [f"{row.name} ({each})" for each in ("sampled", "greedy") if each in row.metrics]
    raise StoreError(f"run {run!r} has no evaluation {name!r} in mode {mode!r}; it has {', '.join(known) or 'none'}")


def _outcomes(store: Any, config: Any, groups: Sequence[str], changes: Sequence[str]) -> Any:
    """As they were recorded, or scored again where options are changed."""
    from longstraw_agents.evaluation import outcomes

    if not changes:
        return outcomes(store, groups)
    from longstraw_agents.rendering import renderer_for
    from longstraw_agents.rescoring import rescore
    from longstraw_agents.trainer.models import load_tokenizer

    return rescore(store, renderer_for(load_tokenizer(config.model), config.rendering), groups, parse_settings(changes))
