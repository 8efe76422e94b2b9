"""Ours and TRL's GRPOTrainer on one configuration: `python -m benchmarks.against_trl examples/against_trl.toml`.

Idea: both begin with the same adapter and get the same tasks, prompts (asserted token by token), rewards, sampling budget and
settings; both are evaluated on the same held-out tasks by the same code, before and after. Ours is the ordinary run in the
configuration's folder. TRL runs in a process of its own (`trl_grpo.py`), under the interpreter that $LONGSTRAW_TRL_PYTHON names
where this one has no trl==1.16.0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from longstraw_agents import config as toml
from longstraw_agents.commands import parse_settings
from longstraw_agents.episodes import World, make_registered
from longstraw_agents.errors import ConfigError
from longstraw_agents.evaluation import outcomes
from longstraw_agents.loop import Loop, RunConfig
from longstraw_agents.scores import Outcome, gain_points, score
from longstraw_agents.terminal import Terminal
from longstraw_agents.trainer.advantages import AdvantageConfig
from longstraw_agents.trainer.loss import LossConfig
from longstraw_agents.trainer.models import load_adapter, save_adapter

ROOT = Path(__file__).resolve().parents[1]


def train_with_trl(loop: Loop, updates: int, deadline: float | None = None) -> dict[str, Any]:
    """Train the loop's adapter by TRL on the tasks of the loop's first `updates` updates, or until a Unix time; TRL's report.

    The loop must be untrained. Its model, version and policy are then what TRL made.
    """
    config, folder = loop.config, loop.config.run.folder
    rows = []
    for task in (task for update in range(1, updates + 1) for task in loop.tasks(update)):
        messages = World(make_registered, task).reset().messages
        shown = [{"role": message.role, "content": message.content} for message in messages]
        ids = loop.tokenizer.apply_chat_template(shown, add_generation_prompt=True)["input_ids"]
        assert list(ids) == loop.renderer.first(messages).ids.tolist(), "both trainers must read the same prompt"
        rows.append({"prompt": shown, "task_seed": task.seed})
    save_adapter(loop.model, folder / "first")
    settings = {
        "model": loop.model.base_model.model.config.name_or_path, "dtype": config.model.dtype, "device": config.model.device,
        "adapter": str(folder / "first"), "out": str(folder / "last"), "seed": config.run.seed, "updates": updates,
        "learning_rate": config.trainer.optimizer.learning_rate, "tasks": config.tasks.groups, "samples": config.tasks.samples,
        "max_tokens": config.collect.max_action_tokens, "deadline": deadline, "rows": rows,
        "env": config.tasks.env, "options": {"split": "train", **config.tasks.options},
    }  # fmt: skip
    (folder / "trl.json").write_text(json.dumps(settings))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    python = os.environ.get("LONGSTRAW_TRL_PYTHON", sys.executable)
    command = [python, str(ROOT / "benchmarks" / "trl_grpo.py"), str(folder / "trl.json")]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    report: dict[str, Any] = json.loads((folder / "last" / "report.json").read_text())
    load_adapter(loop.model, folder / "last")
    loop.trainer.version = updates
    loop.policy.refresh(updates)
    return report


def require_alike(config: RunConfig) -> None:
    """Raises ConfigError where the configuration asks for what `trl_grpo.py` does not tell TRL."""
    if config.trainer.loss != LossConfig() or config.trainer.advantage != AdvantageConfig():
        raise ConfigError("trainer.loss or trainer.advantage is set; the comparison is of plain GRPO: leave both out")
    if config.warm_start.updates or config.collect.tree is not None:
        raise ConfigError("warm_start.updates or collect.tree is set; TRL's trainer has neither: leave both out")


def evaluated(loop: Loop, name: str) -> list[list[Outcome]]:
    """The episodes of a stored evaluation, sampled where there are such, by task."""
    (row,) = [row for row in loop.store.evaluations(loop.run_id) if row.name == name]
    mode = row.metrics.get("sampled") or row.metrics["greedy"]
    return outcomes(loop.store, mode["groups"])


def train_ours(config: RunConfig) -> tuple[list[list[Outcome]], list[list[Outcome]], float]:
    """The ordinary run; its episodes before and after, and the seconds of its updates."""
    with Loop(config, Terminal()) as loop:
        loop.run()
        took = sum(phase["seconds"] for name, phase in loop.phases.as_dict().items() if name not in ("load", "evaluate"))
        return evaluated(loop, "before"), evaluated(loop, "after"), took


def train_theirs(config: RunConfig) -> tuple[list[list[Outcome]], float]:
    """TRL's episodes afterwards, and the seconds of its updates."""
    with Loop(replace(config, run=replace(config.run, name="trl", folder=config.run.folder / "trl")), Terminal()) as loop:
        report = train_with_trl(loop, config.run.updates)
        loop.evaluate("trl")
        return evaluated(loop, "trl"), report["seconds"]


@click.command()
@click.argument("configuration", type=click.Path(exists=True, path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="As of longstraw run.")
def main(configuration: Path, settings: tuple[str, ...]) -> None:
    """Train as CONFIGURATION says, by ours and by TRL, and print both held-out successes."""
    config = toml.load(configuration, RunConfig, parse_settings(settings))
    require_alike(config)
    before, ours, seconds = train_ours(config)
    theirs, their_seconds = train_theirs(config)
    for name, episodes, took in (("untrained", before, ""), ("ours", ours, seconds), ("TRL", theirs, their_seconds)):
        click.echo(f"{name:<10} {score('sampled', episodes)}" + (f"   {took:.0f} s" if took else ""))
    difference, (low, high) = gain_points(theirs, ours)
    click.echo(f"ours minus TRL: {difference:+.1f} points [{low:+.1f}, {high:+.1f}] over tasks")


if __name__ == "__main__":
    main()
