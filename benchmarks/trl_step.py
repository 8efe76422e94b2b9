"""One optimizer step of ours beside one of TRL's GRPOTrainer, the same tokens, one GPU: the longest context that was run on both.

SmolLM2-135M with its real weights in bfloat16, LoRA r = 8 on all linear layers, G members that share a prompt, no scoring pass on
either side. TRL: sdpa attention, activation checkpointing, members one at a time, the step of `trl_update.py`. Ours: detached and
exact. Both run a short step first; the step that is timed includes forward, backward and optimizer.

    python benchmarks/trl_step.py --smollm2 FOLDER --tokens 131072 --out trl_step.json
    python benchmarks/trl_step.py --from trl_step.json --record
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.long_runs import timed, trainer
from benchmarks.long_shapes import DEVICE, build, make_group
from longstraw_agents import figures
from longstraw_agents.types import Group


def run_trl(options: argparse.Namespace, group: Group) -> dict[str, Any]:
    """Seconds of TRL's steps on the group's tokens (the first includes what libraries set up), and its peak memory in MiB."""
    prompt = options.tokens - options.response
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.json"
        settings = {
            "model": str(options.smollm2), "prompt": group.trajectories[0].tokens[:prompt].tolist(),
            "completions": [t.tokens[prompt:].tolist() for t in group.trajectories], "batch_size": 1, "steps": options.trl_steps,
            "device": DEVICE.type, "dtype": "bfloat16", "attention": "sdpa", "checkpointing": True, "out": folder,
        }  # fmt: skip
        path.write_text(json.dumps(settings))
        subprocess.run([options.python, str(Path(__file__).with_name("trl_update.py")), str(path)], check=True)
        report: dict[str, Any] = json.loads(path.with_suffix(".report.json").read_text())
    return report


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Ours in both modes, then TRL in a process of its own, after ours has let its memory go."""
    model = build("smollm2_135m", torch.bfloat16, weights=options.smollm2)
    vocabulary = model.config.vocab_size
    group = make_group(options.tokens - options.response, options.response, options.group, vocabulary)
    short = make_group(1024, 64, 2, vocabulary)
    found: dict[str, Any] = {"tokens": options.tokens, "group": options.group, "provenance": figures.provenance()}
    for gradient in ("detached", "exact"):
        trainer(model, gradient, options.chunk, options.pack, score=False).update([short])
        subject = trainer(model, gradient, options.chunk, options.pack, score=False)
        _, found[gradient] = timed(lambda subject=subject: subject.update([group]))
        print(json.dumps({gradient: found[gradient]}), flush=True)
    del model, subject
    torch.cuda.empty_cache()
    found["trl"] = run_trl(options, group)
    found["ratio"] = {mode: found["trl"]["seconds"][-1] / found[mode]["seconds"] for mode in ("detached", "exact")}
    print(json.dumps({"trl": found["trl"], "ratio": found["ratio"]}), flush=True)
    return found


def main() -> None:
    """Measure, or record what a file holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2's weights and tokenizer")
    parser.add_argument("--python", default=sys.executable, help="interpreter of an environment that has trl==1.16.0")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=16384)
    parser.add_argument("--pack", type=int, default=4096)
    parser.add_argument("--trl-steps", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("trl_step.json"))
    parser.add_argument("--from", dest="results", type=Path, help="run nothing: record what this file holds")
    parser.add_argument("--record", action="store_true", help="write gpu.trl_step_ratio into docs/figures.json")
    options = parser.parse_args()
    found = json.loads(options.results.read_text()) if options.results else measure(options)
    if not options.results:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.record:
        ratio = found["ratio"]["exact"]
        figures.record("gpu.trl_step_ratio", ratio, "times", trials=1, extra=found, measured=found["provenance"])


if __name__ == "__main__":
    main()
