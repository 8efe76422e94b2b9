"""An exact update against conventional training of the same batch, on CPU: time, peak memory, inputs run.

A group of 8 branches of 256 sampled tokens on a shared prompt of 2,000 (synthetic token ids: neither time nor memory depends on
what they say), SmolLM2-135M-Instruct with its real weights, LoRA r = 8 on all linear layers, float32, GRPO without KL.

    time      ours, exact: one `Trainer.update`. Conventional: transformers + PEFT, sdpa, no activation checkpointing, logits only
              on loss positions, at the batch size that is fastest for it per member (`--batch-sizes` are tried, the whole batch
              is run at the best). Both skip a scoring pass of their own (ratio 1 on the first step). Medians over `--repeats`.
    memory    peak resident memory of one update in a fresh process, minus that process's peak before it, for G = 2 and G = 8
    inputs    how many inputs the shared node ran, for G = 2 and G = 8 (counted by the replay)
    trl       one optimizer step of TRL's GRPOTrainer on the same tokens, in the environment that `--trl PYTHON` names

    python benchmarks/update.py --record          # all but trl, 10 to 20 minutes on 2 cores
    python benchmarks/update.py --only trl --trl TRL_ENVIRONMENT/bin/python --record

Figures go to docs/figures.json, everything that was measured to docs/results/update.json, part by part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import long_shapes
from longstraw_agents import figures
from longstraw_agents.phases import peak_mib, reset_peak
from longstraw_agents.trainer import comparison
from longstraw_agents.trainer.loss import LossConfig, coefficients, make_batch
from longstraw_agents.trainer.models import LoraSettings, ModelConfig, load_model, smollm2_folder
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.update import Trainer, TrainerConfig
from longstraw_agents.types import Group

PREFIX, BRANCH, COMMAND = 2000, 256, "python benchmarks/update.py --record"
RESULTS = figures.ROOT / "docs" / "results" / "update.json"


def make_group(size: int) -> Group:
    """`size` trajectories that share PREFIX tokens and have BRANCH sampled ones each; rewards 0, 1, 0, 1, ..."""
    return long_shapes.make_group(PREFIX, BRANCH, size, vocabulary=49152)


def make_model() -> torch.nn.Module:
    """SmolLM2 with LoRA; B random, so that no gradient is trivially zero."""
    model, _ = load_model(ModelConfig(adapter=LoraSettings(rank=8)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def trainer(model: torch.nn.Module) -> Trainer:
    """Ours; a learning rate so small that repeats run the same weights within rounding."""
    loss = LossConfig(mismatch_cap=None)
    return Trainer(model, TrainerConfig(loss=loss, optimizer=OptimizerConfig(learning_rate=1e-12)))


def conventional(model: torch.nn.Module, group: Group, batch_size: int) -> None:
    """Forward and backward of the whole sequences, `batch_size` members at a time; gradients accumulate."""
    advantages = [np.full(BRANCH, 1.0 if t.reward else -1.0) for t in group.trajectories]
    count = len(group.trajectories) * BRANCH
    old = torch.zeros(count)
    batch = make_batch([(group, advantages)], old)
    c = coefficients(LossConfig(mismatch_cap=None), old, batch).logp.split(batch_size * BRANCH)
    for first, part in zip(range(0, len(group.trajectories), batch_size), c, strict=True):
        tokens = torch.as_tensor(np.stack([t.tokens for t in group.trajectories[first : first + batch_size]])).long()
        logits = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=BRANCH).logits.float()
        logp = logits.log_softmax(-1).gather(-1, tokens[:, -BRANCH:, None]).reshape(-1)
        (logp * part).sum().backward()


def measure_time(repeats: int, sizes: list[int]) -> dict[str, Any]:
    """Seconds of ours and of conventional training, alternating in one process, and how far the gradients differ."""
    model, group = make_model(), make_group(8)
    per_member = {}
    for size in sizes:
        started = time.perf_counter()
        conventional(model, Group("part", group.task, group.trajectories[:size]), size)
        per_member[size] = (time.perf_counter() - started) / size
    best = min(per_member, key=lambda size: per_member[size])
    ours, theirs = [], []
    for _ in range(repeats):
        model.zero_grad()
        started = time.perf_counter()
        conventional(model, group, best)
        theirs.append(time.perf_counter() - started)
        started = time.perf_counter()
        trainer(model).update([group])
        ours.append(time.perf_counter() - started)
    print(f"conventional seconds per member by batch size: {per_member}")
    return {
        "ours": statistics.median(ours), "conventional": statistics.median(theirs), "batch_size": best,
        "seconds_per_member": per_member, "repeats": repeats,
    }  # fmt: skip


def gradient_difference(size: int = 2) -> float:
    """Global relative difference of our gradient from the conventional one, so that the two times are of the same thing."""
    model, group = make_model(), make_group(size)
    conventional(model, group, 1)
    reference = comparison.gradients(model)
    model.zero_grad()
    subject = trainer(model)
    subject.stepper.step = lambda: 0.0  # type: ignore[method-assign]  # leave the gradients in place
    subject.update([group])
    scale = float(np.std([0.0, 1.0], ddof=1)) * 2  # conventional above used advantages of -1 and 1
    ours = {name: grad * scale for name, grad in comparison.gradients(model).items()}
    return comparison.compare(ours, reference).global_relative


def measure_memory(size: int) -> dict[str, float]:
    """In this process: the peak of one update above the peak of the loaded model, in MiB, and the shared node's inputs."""
    subject, group = trainer(make_model()), make_group(size)
    reset_peak()
    base = peak_mib()
    receipt = subject.update([group])
    return {
        "mib": peak_mib() - base,
        "root_inputs": receipt.inputs["root_capture"] + receipt.inputs["root_reverse"],
    }


def in_fresh_process(size: int) -> dict[str, float]:
    """`measure_memory` in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--memory-of", str(size)], capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def measure_trl(python: str, steps: int, batch_size: int) -> dict[str, Any]:
    """Seconds per optimizer step of TRL's trainer on the tokens of `make_group(8)`, and the process's peak memory in MiB."""
    group = make_group(8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.json"
        settings = {
            "model": str(smollm2_folder()), "prompt": group.trajectories[0].tokens[:PREFIX].tolist(),
            "completions": [t.tokens[PREFIX:].tolist() for t in group.trajectories], "batch_size": batch_size, "steps": steps,
            "device": "cpu", "dtype": "float32", "attention": "sdpa", "checkpointing": False, "out": folder,
        }  # fmt: skip
        path.write_text(json.dumps(settings))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([python, str(Path(__file__).with_name("trl_update.py")), str(path)], check=True, env=environment)
        report: dict[str, Any] = json.loads(path.with_suffix(".report.json").read_text())
    return {"trl": statistics.median(report["seconds"]), "batch_size": batch_size} | report


def report_memory(repeats: int, record: Any) -> dict[str, Any]:
    """Measure, print and record the memory of G = 2 and G = 8."""
    runs = {size: [in_fresh_process(size) for _ in range(repeats)] for size in (2, 8)}
    median = {size: statistics.median(run["mib"] for run in of) for size, of in runs.items()}
    ratio, inputs = median[8] / median[2], runs[8][0]["root_inputs"] / runs[2][0]["root_inputs"]
    print(f"peak above the model: G=2 {median[2]:.1f} MiB, G=8 {median[8]:.1f} MiB, ratio {ratio:.3f}; inputs ratio {inputs}")
    record("main.peak_memory_ratio_g8_over_g2", ratio, "ratio", COMMAND, trials=repeats, extra={"mib": median})
    record("main.root_inputs_run_ratio_g8_over_g2", inputs, "ratio", COMMAND, trials=repeats)
    return {str(size): of for size, of in runs.items()}


def report_time(repeats: int, sizes: list[int], record: Any) -> dict[str, Any]:
    """Measure, print and record the time of ours and of conventional training."""
    difference = gradient_difference()
    times = measure_time(repeats, sizes) | {"gradient_difference": difference}
    speedup = times["conventional"] / times["ours"]
    print(f"ours {times['ours']:.1f} s, conventional {times['conventional']:.1f} s: {speedup:.2f} times; "
          f"gradients differ by {difference:.1e}")  # fmt: skip
    record("main.update_speedup_exact_cpu", speedup, "times", COMMAND, trials=repeats, extra=times)
    return times


def main() -> None:
    """Parse the options, run the parts asked for, and print, record or write what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write docs/figures.json and docs/results/update.json")
    parser.add_argument("--only", choices=["time", "memory", "trl"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2], help="conventional's; a member takes 5 GB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter of an environment that has trl==1.16.0")
    parser.add_argument("--json", help="write all numbers to this file")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps(measure_memory(options.memory_of)))
        return
    if options.only == "trl" and not options.trl:
        parser.error("--only trl needs --trl PYTHON, the interpreter of an environment that has trl==1.16.0")
    record = figures.record if options.record else lambda *args, **kwargs: None
    out: dict[str, Any] = {}
    if options.only in (None, "memory"):
        out["memory"] = report_memory(options.repeats, record)
    if options.only in (None, "time"):
        out["time"] = report_time(options.repeats, options.batch_sizes, record)
    if options.trl:
        out["trl"] = measure_trl(options.trl, options.repeats, 1)
        print(f"TRL's step, members one at a time: {out['trl']['trl']:.1f} s")
    if options.record:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(known | out, indent=1) + "\n")
    if options.json:
        Path(options.json).write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
