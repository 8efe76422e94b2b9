"""Evaluate a run's weights, those of any step, or another adapter, on held-out tasks of its or another environment."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from longstraw_agents.commands import open_loop, parse_settings, run_options
from longstraw_agents.errors import AdapterError, ConfigError
from longstraw_agents.terminal import json_option, write_json


@click.command("eval")
@run_options
@click.option("--name", default=None, help="Name of the evaluation in the store; by default it says what was evaluated.")
@click.option("--step", type=click.IntRange(min=0), help="The weights of this step (0: untrained) in place of the newest.")
@click.option("--adapter", type=click.Path(path_type=Path), help="The adapter in this folder (PEFT's format) in their place.")
@click.option("--env", default=None, help="Held-out tasks of this environment, with the options that --set gives.")
@click.option("--k", "ks", multiple=True, type=click.IntRange(min=1), help="Also pass@K, K up to evaluate.samples; repeatable.")
@json_option
def eval(
    configuration: Path, settings: tuple[str, ...], name: str | None, step: int | None, adapter: Path | None, env: str | None,
    ks: tuple[int, ...], json_path: Path | None,
) -> None:  # fmt: skip
    """Evaluate the newest weights of CONFIG.toml on its held-out tasks, or what the options name.

    The same name again shows the stored result. `longstraw compare` compares two evaluations of the same tasks by name.
    """
    from longstraw_agents.evaluation import outcomes
    from longstraw_agents.statistics import mean_pass_at_k

    if step is not None and adapter is not None:
        raise ConfigError("--step and --adapter both name weights; give one of them")
    chosen, adapter, label = _apart(configuration, settings, step, adapter, env)
    with open_loop(configuration, chosen) as loop:
        if adapter is not None:
            loop.use(adapter)
        name = name or label or f"update {loop.done}"
        scores = loop.evaluate(name)
        (row,) = [row for row in loop.store.evaluations(loop.run_id) if (row.name, row.policy_version) == (name, loop.version)]
        result: dict[str, Any] = {}
        for mode, score in scores.items():
            loop.terminal.say(f"{name}: {score}")
            result[mode] = score.as_dict()
            if mode != "sampled":
                continue
            episodes = outcomes(loop.store, row.metrics[mode]["groups"])
            valid = [[episode.success for episode in task if episode.reward is not None] for task in episodes]
            for k in ks:
                value, (low, high) = mean_pass_at_k([task for task in valid if task], k)
                loop.terminal.say(f"{name}: pass@{k} {value:6.1%} [{low:.1%}, {high:.1%}]")
                result[mode][f"pass@{k}"] = {"value": value, "interval": (low, high)}
        write_json(json_path, result)


def _apart(
    configuration: Path, settings: tuple[str, ...], step: int | None, adapter: Path | None, env: str | None
) -> tuple[list[str], Path | None, str | None]:
    """What is not the run's own is evaluated in a run beside it in the same store: the settings of that, the adapter, a name."""
    from longstraw_agents import config as toml
    from longstraw_agents.checkpoints import digest, step_folder
    from longstraw_agents.loop import RunConfig

    if step is None and adapter is None and env is None:
        return list(settings), None, None
    run = toml.load(configuration, RunConfig, parse_settings(settings)).run
    if step is None and adapter is None:
        steps = [int(path.name) for path in (run.folder / "steps").glob("*") if path.name.isdigit()]
        step = max(steps, default=0)
    if step:
        adapter = step_folder(run.folder / "steps", step)
    label = f"step {step}" if step is not None else f"adapter {adapter}"
    if adapter is not None and not (adapter / "adapter_model.safetensors").exists():
        raise AdapterError(f"{adapter} holds no adapter_model.safetensors; a run keeps the folders of its last steps (run.keep)")
    weights = "untrained" if adapter is None else digest(adapter / "adapter_model.safetensors")[:12]
    name = f"{run.name}/{weights}" + (f" on {env}" if env else "")
    values: dict[str, Any] = {
        "run.name": name, "run.folder": str(run.folder / "evaluations" / re.sub(r"[^\w.-]+", "-", name)),
        "run.store": run.store or str(run.folder / "store.sqlite"), "run.evaluate_every": 0, "guards.patience": 0,
    }  # fmt: skip
    others: list[str] = []
    if env is not None:
        values |= {"tasks.env": env}
        others, label = ["tasks.options={}"], f"{label} on {env}"  # the run's own are another environment's
    return [*others, *settings, *(f"{key}={json.dumps(value)}" for key, value in values.items())], adapter, label
