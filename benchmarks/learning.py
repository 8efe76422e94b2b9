"""Does training make agents better, and as well as the tool one would otherwise use? `python benchmarks/learning.py --help`.

    trl     ours and TRL's GRPOTrainer: same model, adapter, tasks, samples and learning rate; held-out success of both
    exact   exact gradients and detached ones, on a task whose reward depends on reading the prompt
    tree    groups that part late with node credit, against flat groups at about as many sampled tokens, five turns an episode

All run on Calls (`calls.py`): a question, a tool call for the item it asks for, or several in turn. By default a tiny model is
taught here to call the tool for any item, right about every other time, so that a run takes minutes on a CPU; `--model`
smollm2-135m-instruct, or a folder, takes a real one. Arms differ in nothing but what is compared; each seed draws its own
tasks, samples and adapter.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
import tokenizers
import torch
import transformers
from calls import ENV_ID, call_of

from longstraw_agents import figures
from longstraw_agents.collection import CollectConfig
from longstraw_agents.envs.lookup import TRAIN_ITEMS
from longstraw_agents.episodes import World, make_registered
from longstraw_agents.evaluation import EvaluateSettings, outcomes
from longstraw_agents.forking import TreeConfig
from longstraw_agents.loop import Loop, RunConfig, RunSettings, TaskSettings
from longstraw_agents.rendering import ChatML
from longstraw_agents.statistics import compare, mean_interval
from longstraw_agents.trainer.advantages import AdvantageConfig
from longstraw_agents.trainer.models import LoraSettings, ModelConfig, load_adapter, save_adapter
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.replay import ReplayConfig
from longstraw_agents.trainer.update import TrainerConfig
from longstraw_agents.types import Task

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ITEMS = 8  # of the tiny model's tasks
RIGHT = 0.4  # how often the tiny model's teacher names the item of the question


def episodes(tokenizer: Any, seeds: range, questions: int) -> list[list[tuple[str, list[int]]]]:
    """Of each training task its turns: the item asked for, and the ids of the observation that asks."""
    renderer, found = ChatML(tokenizer), []
    for seed in seeds:
        env: Any = make_registered(Task(ENV_ID, seed))
        rendered = renderer.first(env.reset(seed=seed, options=task_options(questions) | {"split": "train"})[1]["messages"])
        turns = []
        for item in env.unwrapped.items:
            turns.append((item, rendered.ids.tolist()))
            action = np.array([*tokenizer(call_of(item))["input_ids"], *renderer.stop_ids], dtype=np.int32)
            rendered = renderer.following(action, env.step(call_of(item))[4]["messages"])
        found.append(turns)
    return found


def task_options(questions: int) -> dict[str, int]:
    """The tiny model's tasks."""
    return {"items": ITEMS, "questions": questions}


def tiny_model(folder: Path, questions: int) -> Path:
    """A Llama of 0.1 million parameters with a tokenizer of its own that calls the tool for some item of the eight."""
    if (folder / "model.safetensors").exists():
        return folder
    env: Any = make_registered(Task(ENV_ID, 0))
    messages = [m for seed in range(20) for m in env.reset(seed=seed, options={"items": ITEMS})[1]["messages"]]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    bytes_of = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    learner = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=bytes_of, show_progress=False)
    backend.train_from_iterator([m.content for m in messages] + [call_of(item) for item in TRAIN_ITEMS[:ITEMS]], learner)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(settings)
    _teach(model, tokenizer, questions)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _teach(model: Any, tokenizer: Any, questions: int, steps: int = 400) -> None:
    """Supervised calls: first of the question's item, so that the model learns to read it, then right with probability RIGHT."""
    rng, shown = np.random.default_rng(0), episodes(tokenizer, range(1000, 1064), questions)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for step in range(steps):
        right = 1.0 if step < 0.7 * steps else RIGHT
        rows = []
        for index in rng.integers(len(shown), size=16):
            ids, labels = [], []
            for item, observation in shown[index]:
                said = item if rng.random() < right else str(rng.choice(TRAIN_ITEMS[:ITEMS]))
                action = [*tokenizer(call_of(said))["input_ids"], tokenizer.eos_token_id]
                ids += observation + action
                labels += [-100] * len(observation) + action
            rows.append((ids, labels))
        width = max(len(ids) for ids, _ in rows)
        ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
        labels_BT = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
        model(input_ids=ids_BT, labels=labels_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def configuration(
    model: str, folder: Path, seed: int, updates: int, rate: float, gradient: Literal["exact", "detached"] = "exact"
) -> RunConfig:
    """The settings that all arms share."""
    tiny = Path(model).exists()
    dtype = "float32" if tiny else "bfloat16"
    return RunConfig(
        run=RunSettings(name="learning", folder=folder, updates=updates, seed=seed),
        tasks=TaskSettings(env=ENV_ID, options=task_options(1) if tiny else {}, groups=4, samples=8),
        model=ModelConfig(name=model, dtype=dtype, adapter=LoraSettings(rank=8, alpha=16.0), seed=seed),
        collect=CollectConfig(max_action_tokens=24, max_trajectory_tokens=512),
        trainer=TrainerConfig(replay=ReplayConfig(gradient), optimizer=OptimizerConfig(learning_rate=rate)),
        evaluate=EvaluateSettings(tasks=48 if tiny else 24, samples=2, greedy=False),
    )


def kept(arm: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """An arm's result is kept in its run's folder, so that a benchmark that was stopped goes on with the next arm."""

    @functools.wraps(arm)
    def run(config: RunConfig, *arguments: Any) -> dict[str, Any]:
        path = config.run.folder / "result.json"
        if not path.exists():
            result = arm(config, *arguments)
            path.write_text(json.dumps(result))
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    return run


@kept
def run_ours(config: RunConfig) -> dict[str, Any]:
    """A whole run: held-out success by task, rewards by update, seconds and memory of collection and training."""
    with Loop(config) as loop:
        report = loop.run()
        groups = {row.name: row.metrics["sampled"]["groups"] for row in loop.store.evaluations(loop.run_id)}
        tasks = {name: _successes(loop, of_name) for name, of_name in groups.items()}
        returns = {name: _returns(loop, of_name) for name, of_name in groups.items()}
    phases = report["phases"]
    return {
        "success": report["evaluations"]["after"]["sampled"]["success"],
        "before": report["evaluations"]["before"]["sampled"]["success"],
        "seconds": sum(phases[name]["seconds"] for name in ("collect", "read", "train", "commit")),
        "peak_mib": max(phase["peak_mib"] for phase in phases.values()),
        "sampled": report["sampler"]["sampled"],
        "rewards": [row["reward"] for row in report["updates"]],
        "tasks": tasks["after"],
        "returns": returns["after"],
    }


def _successes(loop: Loop, groups: list[str]) -> list[float]:
    """The share of successes of each task."""
    return [float(np.mean([episode.success for episode in task])) for task in outcomes(loop.store, groups)]


def _returns(loop: Loop, groups: list[str]) -> list[float]:
    """The mean return of each task."""
    return [float(np.mean([episode.reward or 0.0 for episode in task])) for task in outcomes(loop.store, groups)]


@kept
def run_trl(config: RunConfig, python: str) -> dict[str, Any]:
    """The same with TRL, in its own interpreter; its adapter is evaluated as ours is."""
    folder = config.run.folder
    idle = replace(config, run=replace(config.run, updates=0))
    with Loop(idle) as loop:
        save_adapter(loop.model, folder / "first")
        rows = []
        for update in range(1, config.run.updates + 1):
            for task in loop.tasks(update):
                messages = World(make_registered, task).reset().messages
                shown = [{"role": message.role, "content": message.content} for message in messages]
                ids = loop.tokenizer.apply_chat_template(shown, add_generation_prompt=True)["input_ids"]
                assert list(ids) == loop.renderer.first(messages).ids.tolist(), "both trainers must read the same prompt"
                rows.append({"prompt": shown, "task_seed": task.seed, "items": task.options.get("items", 0)})
        model = loop.model.base_model.model.config.name_or_path
    settings = {
        "model": model, "dtype": config.model.dtype, "adapter": str(folder / "first"), "out": str(folder / "last"),
        "seed": config.run.seed, "learning_rate": config.trainer.optimizer.learning_rate, "updates": config.run.updates,
        "tasks": config.tasks.groups, "samples": config.tasks.samples, "max_tokens": config.collect.max_action_tokens,
        "rows": rows,
    }  # fmt: skip
    (folder / "trl.json").write_text(json.dumps(settings))
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([python, str(root / "benchmarks" / "trl_grpo.py"), str(folder / "trl.json")], check=True, env=environment)
    report: dict[str, Any] = json.loads((folder / "last" / "report.json").read_text())
    with Loop(idle) as loop:
        load_adapter(loop.model, folder / "last")
        loop.policy.refresh(1)
        report["success"] = loop.evaluate("trl")["sampled"].success
        (row,) = [row for row in loop.store.evaluations(loop.run_id) if row.name == "trl"]
        report["tasks"] = _successes(loop, row.metrics["sampled"]["groups"])
    return report


def show(label: str, seed: int, result: dict[str, Any]) -> None:
    """One line of the table."""
    rewards = result["rewards"]
    click.echo(
        f"seed {seed}  {label:<12} held-out success {result['success']:6.1%}   reward {rewards[0]:.3f} to {rewards[-1]:.3f}   "
        f"{result['seconds']:7.1f} s  {result['peak_mib']:7.0f} MiB"
    )


def points(first: dict[str, Any], last: dict[str, Any], words: str, of: str = "tasks") -> float:
    """Points of held-out success (or of return) that `last` is above `first`, printed with the interval over tasks."""
    found = compare(first[of], last[of])
    low, high = found.interval
    click.echo(f"        {words}, paired by task: {100 * found.difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]")
    return 100 * found.difference


def conclude(figure: str, differences: list[float], command: str, record: bool, trials: dict[str, Any]) -> None:
    """Prints the mean difference over seeds with its Student interval, and records it where asked."""
    mean, (low, high) = mean_interval(differences)
    click.echo(f"{figure}: {mean:+.1f} points [{low:+.1f}, {high:+.1f}] over {len(differences)} seeds")
    if record:
        extra = {"interval": [low, high], **trials}
        figures.record(figure, round(mean, 2), unit="points", command=command, trials=differences, extra=extra)


def _model(name: str, folder: Path, questions: int = 1) -> str:
    return str(tiny_model(folder / f"tiny-{questions}", questions)) if name == "tiny" else name


OPTIONS = [
    click.option("--model", default="tiny", show_default=True, help="tiny, smollm2-135m-instruct, or a folder."),
    click.option("--folder", type=click.Path(path_type=Path), default=Path("runs/learning"), show_default=True),
    click.option("--seeds", default=3, show_default=True),
    click.option("--updates", default=40, show_default=True),
    click.option("--rate", default=2e-3, show_default=True, help="Learning rate of all arms."),
    click.option("--record", is_flag=True, help="Write the result into docs/figures.json."),
]


def options(command: Any) -> Any:
    """The options that both experiments share."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.group()
def main() -> None:
    """Learning experiments."""


@main.command()
@options
@click.option("--python", required=True, help="Interpreter of an environment with trl==1.16.0, gymnasium and sqlalchemy.")
def trl(model: str, folder: Path, seeds: int, updates: int, rate: float, record: bool, python: str) -> None:
    """Ours against TRL's GRPOTrainer."""
    name, differences, trials = _model(model, folder), [], []
    for seed in range(seeds):
        ours = run_ours(configuration(name, folder / f"exact-{seed}", seed, updates, rate))
        theirs = run_trl(configuration(name, folder / f"trl-{seed}", seed, updates, rate), python)
        show("ours", seed, ours)
        show("trl", seed, theirs)
        differences.append(points(theirs, ours, "ours minus theirs"))
        trials.append({"seed": seed, "ours": ours, "trl": theirs})
    arguments = f"--model {model} --seeds {seeds} --updates {updates} --rate {rate}"
    command = f"python benchmarks/learning.py trl {arguments} --python TRL_PYTHON"
    conclude("learn.trl_difference_points", differences, command, record, {"model": model, "runs": trials})


@main.command()
@options
def exact(model: str, folder: Path, seeds: int, updates: int, rate: float, record: bool) -> None:
    """Exact gradients against detached ones."""
    name, differences, trials = _model(model, folder), [], []
    for seed in range(seeds):
        arms = {
            gradient: run_ours(configuration(name, folder / f"{gradient}-{seed}", seed, updates, rate, gradient))
            for gradient in ("exact", "detached")
        }
        for gradient, result in arms.items():
            show(gradient, seed, result)
        differences.append(points(arms["detached"], arms["exact"], "exact minus detached"))
        trials.append({"seed": seed, **arms})
    command = f"python benchmarks/learning.py exact --model {model} --seeds {seeds} --updates {updates} --rate {rate}"
    conclude("learn.exact_minus_detached_points", differences, command, record, {"model": model, "runs": trials})


@main.command()
@options
@click.option("--questions", default=5, show_default=True, help="Turns of an episode.")
@click.option("--trunks", default=2, show_default=True, help="Members of a tree group that are sampled whole.")
@click.option("--members", default=13, show_default=True, help="Of a tree group: 2 whole, 11 from a fork on.")
def tree(
    model: str, folder: Path, seeds: int, updates: int, rate: float, record: bool, questions: int, trunks: int, members: int
) -> None:
    """Late-branching groups with node credit against flat ones, compared by return: all of it comes at the end."""
    name, differences, trials = _model(model, folder, questions), [], []
    for seed in range(seeds):
        flat = configuration(name, folder / f"flat-{seed}", seed, updates, rate)
        flat = replace(flat, tasks=replace(flat.tasks, options={**flat.tasks.options, "questions": questions}))
        branched = replace(
            flat,
            run=replace(flat.run, folder=folder / f"tree-{seed}"),
            tasks=replace(flat.tasks, samples=members),
            collect=replace(flat.collect, tree=TreeConfig(trunks=trunks)),
            trainer=replace(flat.trainer, advantage=AdvantageConfig(credit="node")),
        )
        arms = {"flat": run_ours(flat), "tree": run_ours(branched)}
        for arm, result in arms.items():
            show(arm, seed, result)
            click.echo(f"        {arm}: {result['sampled']:,} tokens sampled, evaluation included")
        differences.append(points(arms["flat"], arms["tree"], "tree minus flat, return", "returns"))
        trials.append({"seed": seed, **arms})
    command = f"python benchmarks/learning.py tree --model {model} --seeds {seeds} --updates {updates} --rate {rate}"
    conclude("learn.tree_minus_flat_points", differences, command, record, {"model": model, "runs": trials})


if __name__ == "__main__":
    main()
