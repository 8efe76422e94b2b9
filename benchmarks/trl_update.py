"""One optimizer step of TRL's GRPOTrainer on a given batch: `python benchmarks/trl_update.py SETTINGS.json`.

Idea: TRL is compared on training alone, so the sampled tokens are handed to it by a rollout function instead of being generated;
what is timed is its step on them (forward, backward, optimizer), from the first micro-batch to the end of the step. Runs in an
environment of its own that has trl==1.16.0; settings and report are the JSON that `update.py --trl` writes and reads.

    settings   model (folder), prompt (token ids), completions (one list of token ids per member), batch_size, steps, device,
               dtype, attention (an implementation's name in transformers), checkpointing, out (folder)
    report     seconds (one per step), peak_mib (resident on the CPU, allocated on a GPU)
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    """Seconds of every optimizer step, its micro-batches included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the watch when nothing is pending on a GPU."""
        self.started = self.now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the watch when the step's last kernel has run."""
        self.seconds.append(self.now() - self.started)

    @staticmethod
    def now() -> float:
        """Seconds, after everything queued on the GPU."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def build(settings: dict[str, Any], times: StepTimes) -> GRPOTrainer:
    """The trainer: LoRA r = 8 on all linear layers, members of one group in micro-batches, no KL term, no scoring pass."""
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=getattr(torch, settings["dtype"]), attn_implementation=settings["attention"]
    ).to(settings["device"])
    completions = settings["completions"]
    size, batch = len(completions), settings["batch_size"]

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[list[Any]]]:
        ids = [completions[index % size] for index in range(len(prompts))]
        logprobs = [[-1.0] * len(of) for of in ids]
        return {"prompt_ids": [settings["prompt"]] * len(ids), "completion_ids": ids, "logprobs": logprobs}

    def grade(completions: list[str], **_: Any) -> list[float]:
        return [float(index % 2) for index in range(len(completions))]

    config = GRPOConfig(
        output_dir=settings["out"], use_cpu=settings["device"] == "cpu", bf16=False, report_to="none", save_strategy="no",
        learning_rate=1e-12, per_device_train_batch_size=batch, gradient_accumulation_steps=size // batch, num_generations=size,
        max_completion_length=max(map(len, completions)), max_steps=settings["steps"], beta=0.0, loss_type="grpo",
        gradient_checkpointing=settings["checkpointing"], logging_steps=1000, disable_tqdm=True,
    )  # fmt: skip
    return GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=grade, args=config, rollout_func=rollout, callbacks=[times],
        train_dataset=Dataset.from_list([{"prompt": "given"}] * settings["steps"]),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip


def main(path: Path) -> None:
    """Run the steps and write the report beside the settings."""
    settings = json.loads(path.read_text())
    times = StepTimes()
    build(settings, times).train()
    if settings["device"] == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    else:
        peak = torch.cuda.max_memory_allocated() / 2**20
    path.with_suffix(".report.json").write_text(json.dumps({"seconds": times.seconds, "peak_mib": peak}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
