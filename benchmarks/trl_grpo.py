"""TRL's GRPOTrainer on the tasks that `against_trl.py` writes: `python benchmarks/trl_grpo.py SETTINGS.json`.

A process of its own, and an environment of its own where trl==1.16.0 is not installed beside ours. The rewards come from the
same environment as ours. The adapter that it starts from is given as a folder, so both trainers begin with the same weights.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import torch
import transformers
import trl
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import longstraw_agents.envs  # noqa: F401  registers the environments


class Grade:
    """The environment's reward of each completion on its task. As in ours, one that was cut before its end token is never acted
    upon: without this a policy learns the call and not to stop, which the held-out tasks then give nothing for."""

    __name__ = "grade"

    def __init__(self, end: int, env: str, options: dict[str, Any]) -> None:
        """end: the token that ends an action; env: a gymnasium id; options: of its reset."""
        self.end, self.env, self.options = end, env, options

    def __call__(
        self, completions: list[list[dict[str, str]]], completion_ids: list[list[int]], task_seed: list[int], **_: object
    ) -> list[float]:
        rewards = []
        for completion, ids, seed in zip(completions, completion_ids, task_seed, strict=True):
            env = gymnasium.make(self.env, disable_env_checker=True)
            env.reset(seed=seed, options=self.options)
            rewards.append(float(env.step(completion[0]["content"])[1]) if ids[-1] == self.end else 0.0)
            env.close()
        return rewards


class Deadline(TrainerCallback):  # type: ignore[misc]
    """Stops the training after the first update that ends past the deadline, if any, and notes when each one ended."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self.ended: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop when the time is up."""
        self.ended.append(time.time())
        control.should_training_stop = control.should_training_stop or (
            self.deadline is not None and time.time() > self.deadline
        )


def config_of(settings: dict[str, Any]) -> GRPOConfig:
    """Our run's settings in TRL's words."""
    return GRPOConfig(
        output_dir=settings["out"], use_cpu=settings["device"] == "cpu", bf16=False, seed=settings["seed"], report_to="none",
        save_strategy="no", learning_rate=settings["learning_rate"], lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=0.0, max_grad_norm=1.0, per_device_train_batch_size=settings["tasks"] * settings["samples"],
        gradient_accumulation_steps=1, num_generations=settings["samples"], max_completion_length=settings["max_tokens"],
        max_steps=settings["updates"], temperature=1.0, top_p=1.0, top_k=0, beta=0.0, loss_type="grpo", scale_rewards="group",
        shuffle_dataset=False, gradient_checkpointing=False, logging_steps=1, disable_tqdm=True,
    )  # fmt: skip


def main(path: Path) -> None:
    """Train as the settings say; the adapter and report.json go to their `out`."""
    settings = json.loads(path.read_text())
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"]))
    model = PeftModel.from_pretrained(model, settings["adapter"], is_trainable=True)
    watch = Deadline(settings["deadline"])
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, args=config_of(settings), callbacks=[watch],
        reward_funcs=Grade(tokenizer.eos_token_id, settings["env"], settings["options"]),
        train_dataset=Dataset.from_list(settings["rows"]),
    )  # fmt: skip
    started = time.time()
    trainer.train()
    seconds = time.time() - started
    model.save_pretrained(settings["out"])
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    rows = [
        {"update": index + 1, "reward": reward, "seconds": at - started}
        for index, (reward, at) in enumerate(zip(rewards, watch.ended, strict=False))
    ]
    report = {
        "seconds": seconds, "updates": rows, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "gpu_peak_mib": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0,
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
    }  # fmt: skip
    (Path(settings["out"]) / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
