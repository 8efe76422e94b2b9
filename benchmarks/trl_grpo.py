"""TRL's GRPOTrainer on the tasks that `learning.py trl` writes: `python benchmarks/trl_grpo.py SETTINGS.json`.

Runs in an environment of its own that has trl==1.16.0; the rewards come from the same environment as ours. The adapter that it
starts from is given as a folder, so both trainers begin with the same weights.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import gymnasium
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.calls import ENV_ID


def grade(completions: list[list[dict[str, str]]], task_seed: list[int], items: list[int], **_: object) -> list[float]:
    """The environment's reward of each completion on its task."""
    rewards = []
    for completion, seed, count in zip(completions, task_seed, items, strict=True):
        env = gymnasium.make(ENV_ID)
        env.reset(seed=seed, options={"split": "train", "items": count})
        rewards.append(float(env.step(completion[0]["content"])[1]))
        env.close()
    return rewards


def main(path: Path) -> None:
    settings = json.loads(path.read_text())
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"]))
    model = PeftModel.from_pretrained(model, settings["adapter"], is_trainable=True)
    config = GRPOConfig(
        output_dir=settings["out"], use_cpu=True, bf16=False, seed=settings["seed"], report_to="none", save_strategy="no",
        learning_rate=settings["learning_rate"], lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
        max_grad_norm=1.0,
        per_device_train_batch_size=settings["tasks"] * settings["samples"], gradient_accumulation_steps=1,
        num_generations=settings["samples"], max_completion_length=settings["max_tokens"], max_steps=settings["updates"],
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, loss_type="grpo", scale_rewards="group", shuffle_dataset=False,
        gradient_checkpointing=False, logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=grade, args=config,
        train_dataset=Dataset.from_list(settings["rows"]),
    )  # fmt: skip
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    model.save_pretrained(settings["out"])
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    report = {"seconds": seconds, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "rewards": rewards}
    (Path(settings["out"]) / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
