"""Does training make agents better, and as well as the tool one would otherwise use? `python benchmarks/learning.py --help`.

    trl     ours and TRL's GRPOTrainer: same model, adapter, tasks, samples and learning rate; held-out success of both
    exact   exact gradients and detached ones, on a task whose reward depends on reading the prompt

Both run on OneCall (`onecall.py`): a question, a tool call for the item it asks for. By default a tiny model is trained here to
call the tool for any item, right about every other time, so that a run takes minutes on a CPU; `--model`
smollm2-135m-instruct, or a folder, takes a real one. Arms differ in nothing but what is compared; each seed draws its own
tasks, samples and adapter.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import tokenizers
import torch
import transformers
from onecall import ENV_ID, call_of

from longstraw_agents import figures
from longstraw_agents.collection import CollectConfig
from longstraw_agents.envs.lookup import TRAIN_ITEMS
from longstraw_agents.episodes import World, make_registered
from longstraw_agents.evaluation import EvaluateSettings, outcomes
from longstraw_agents.loop import Loop, RunConfig, RunSettings, TaskSettings
from longstraw_agents.rendering import ChatML
from longstraw_agents.scores import gain_points
from longstraw_agents.statistics import mean_interval
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


def prompts(renderer: ChatML | None, seeds: list[int]) -> list[Any]:
    """Of each training task: its item, and the prompt as messages, or as ids where a renderer is given."""
    found = []
    for seed in seeds:
        env = make_registered(Task(ENV_ID, seed))
        messages = env.reset(seed=seed, options={"split": "train", "items": ITEMS})[1]["messages"]
        found.append((env.unwrapped.item, messages if renderer is None else renderer.first(messages).ids))  # type: ignore[attr-defined]
    return found


def tiny_model(folder: Path) -> Path:
    """A Llama of 0.2 million parameters with a tokenizer of its own that calls the tool for some item of the eight."""
    if (folder / "model.safetensors").exists():
        return folder
    shown = prompts(None, list(range(20)))
    texts = [message.content for _, messages in shown for message in messages] + [call_of(item) for item in TRAIN_ITEMS[:ITEMS]]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    bytes_of = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    learner = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=bytes_of, show_progress=False)
    backend.train_from_iterator(texts, learner)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(settings)
    _teach(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _teach(model: Any, tokenizer: Any, steps: int = 400) -> None:
    """Supervised calls: first of the question's item, so that the model learns to read it, then right with probability RIGHT."""
    renderer, rng = ChatML(tokenizer), np.random.default_rng(0)
    shown = prompts(renderer, list(range(1000, 1064)))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for step in range(steps):
        right = 1.0 if step < 0.7 * steps else RIGHT
        rows = []
        for index in rng.integers(len(shown), size=16):
            item, ids = shown[index]
            said = item if rng.random() < right else str(rng.choice(TRAIN_ITEMS[:ITEMS]))
            rows.append((list(ids), [*tokenizer(call_of(said))["input_ids"], *renderer.stop_ids]))
        width = max(len(prompt) + len(action) for prompt, action in rows)
        ids = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in rows])
        labels = torch.tensor([[-100] * len(p) + a + [-100] * (width - len(p) - len(a)) for p, a in rows])
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def configuration(model: str, folder: Path, seed: int, updates: int, rate: float, gradient: str = "exact") -> RunConfig:
    """The settings that all arms share."""
    tiny = Path(model).exists()
    dtype = "float32" if tiny else "bfloat16"
    return RunConfig(
        run=RunSettings(name="learning", folder=folder, updates=updates, seed=seed),
        tasks=TaskSettings(env=ENV_ID, options={"items": ITEMS} if tiny else {}, groups=4, samples=8),
        model=ModelConfig(name=model, dtype=dtype, adapter=LoraSettings(rank=8, alpha=16.0), seed=seed),
        collect=CollectConfig(max_action_tokens=24, max_trajectory_tokens=512),
        trainer=TrainerConfig(replay=ReplayConfig(gradient), optimizer=OptimizerConfig(learning_rate=rate)),
        evaluate=EvaluateSettings(tasks=48 if tiny else 24, samples=2, greedy=False),
    )


def run_ours(config: RunConfig) -> dict[str, Any]:
    """A whole run; its report with the seconds and memory of collection and training, and outcomes by task."""
    with Loop(config) as loop:
        report = loop.run()
        rows = {row.name: outcomes(loop.store, row.metrics["sampled"]["groups"]) for row in loop.store.evaluations(loop.run_id)}
    phases = report["phases"]
    return {
        "success": report["evaluations"]["after"]["sampled"]["success"],
        "before": report["evaluations"]["before"]["sampled"]["success"],
        "seconds": sum(phases[name]["seconds"] for name in ("collect", "read", "train", "commit")),
        "peak_mib": max(phase["peak_mib"] for phase in phases.values()),
        "rewards": [row["reward"] for row in report["updates"]],
        "outcomes": rows,
    }


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
        rows_of = {row.name: row.metrics["sampled"]["groups"] for row in loop.store.evaluations(loop.run_id)}
        report["outcomes"] = {"after": outcomes(loop.store, rows_of["trl"])}
    return report


def show(label: str, seed: int, result: dict[str, Any]) -> None:
    """One line of the table."""
    rewards = result["rewards"]
    click.echo(
        f"seed {seed}  {label:<12} held-out success {result['success']:6.1%}   reward {rewards[0]:.3f} to {rewards[-1]:.3f}   "
        f"{result['seconds']:7.1f} s  {result['peak_mib']:7.0f} MiB"
    )


def conclude(figure: str, differences: list[float], command: str, record: bool, trials: dict[str, Any]) -> None:
    """Prints the mean difference over seeds with its Student interval, and records it where asked."""
    mean, (low, high) = mean_interval(differences)
    click.echo(f"{figure}: {mean:+.1f} points [{low:+.1f}, {high:+.1f}] over {len(differences)} seeds")
    if record:
        extra = {"interval": [low, high], **trials}
        figures.record(figure, round(mean, 2), unit="points", command=command, trials=differences, extra=extra)


def _model(name: str, folder: Path) -> str:
    return str(tiny_model(folder / "tiny")) if name == "tiny" else name


OPTIONS = [
    click.option("--model", default="tiny", show_default=True, help="tiny, smollm2-135m-instruct, or a folder."),
    click.option("--folder", type=click.Path(path_type=Path), default=Path("runs/learning"), show_default=True),
    click.option("--seeds", default=3, show_default=True),
    click.option("--updates", default=30, show_default=True),
    click.option("--rate", default=3e-3, show_default=True, help="Learning rate of all arms."),
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
        ours = run_ours(configuration(name, folder / f"ours-{seed}", seed, updates, rate))
        theirs = run_trl(configuration(name, folder / f"trl-{seed}", seed, updates, rate), python)
        show("ours", seed, ours)
        show("trl", seed, theirs)
        points, interval = gain_points(theirs.pop("outcomes")["after"], ours.pop("outcomes")["after"])
        click.echo(f"        ours minus theirs, paired by task: {points:+.1f} points [{interval[0]:+.1f}, {interval[1]:+.1f}]")
        differences.append(points)
        trials.append({"seed": seed, "ours": ours, "trl": theirs, "interval": interval})
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
        after = {gradient: result.pop("outcomes")["after"] for gradient, result in arms.items()}
        points, interval = gain_points(after["detached"], after["exact"])
        click.echo(f"        exact minus detached, paired by task: {points:+.1f} points [{interval[0]:+.1f}, {interval[1]:+.1f}]")
        differences.append(points)
        trials.append({"seed": seed, **arms, "interval": interval})
    command = f"python benchmarks/learning.py exact --model {model} --seeds {seeds} --updates {updates} --rate {rate}"
    conclude("learn.exact_minus_detached_points", differences, command, record, {"model": model, "runs": trials})


if __name__ == "__main__":
    main()
