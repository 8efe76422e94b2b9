"""Base weights in host memory against weights on the device: the same gradient, memory and seconds side by side.

One model (`--model`, cut to `--layers`; random bfloat16 weights, LoRA r = 8), one tree: `--prompt` shared tokens and `--group`
branches of `--response`. The exact gradient is computed on the device `--trials` times after a first time that is not counted,
then the layers' weights move to host memory and it is computed as often again. Reported: whether the gradients are the same to
the bit, and how far two runs on the device are apart (some kernels add in no fixed order); peak memory; seconds, by kind of run;
bytes copied, and the rate of copying alone.

`--scale tiny` runs the same code on a small model of the same kind on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.long_runs import say, timed
from benchmarks.long_shapes import DEVICE, SHAPES, make_group, with_adapters
from longstraw_agents.segmenter import PrefixTree, segment
from longstraw_agents.trainer import comparison, kernels
from longstraw_agents.trainer.offload import Offload, offload
from longstraw_agents.trainer.receipt import versions
from longstraw_agents.trainer.replay import Engine, ReplayConfig


def build(name: str, layers: int, scale: str) -> nn.Module:
    """The shape cut to its first layers, with a small vocabulary, on the device."""
    shape = SHAPES[name]
    config = shape.make(scale)
    if scale == "full":
        changed = config.to_dict() | dict(num_hidden_layers=layers, vocab_size=32768)
        changed |= {"layer_types": config.layer_types[:layers]} if getattr(config, "layer_types", None) else {}
        config = type(config)(**changed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if scale == "full" else torch.float32)
    torch.manual_seed(0)
    try:
        with torch.device(DEVICE):
            model = getattr(transformers, shape.kind)(config)
    finally:
        torch.set_default_dtype(before)
    return with_adapters(model)


def gradient(model: nn.Module, tree: PrefixTree, config: ReplayConfig) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of the mean log-probability, on the CPU, and seconds by kind of run; weights are digested anew."""
    work = Engine(model, config).open(tree)
    work.score()
    count = len(tree.entry_node)
    work.backward(torch.full((count,), 1 / count, device=DEVICE))
    found = {name: grad.cpu() for name, grad in comparison.gradients(model).items()}
    model.zero_grad()
    return found, {kind: round(float(seconds), 3) for kind, seconds in work.seconds.items()}


def measured(model: nn.Module, tree: PrefixTree, config: ReplayConfig, trials: int) -> tuple[list[dict[str, Tensor]], Any]:
    """The gradients of each trial, and what each cost."""
    gradients, costs = [], []
    for _ in range(trials):
        (found, by_kind), cost = timed(lambda: gradient(model, tree, config))
        gradients.append(found)
        costs.append(cost | {"by_kind": by_kind})
        say(str(costs[-1]))
    return gradients, costs


def copy_rate(held: Offload) -> float:
    """GB/s of copying all layers to the device, one after another, while nothing else runs; the second time counts."""
    for _ in range(2):
        started = time.perf_counter()
        for layer in range(len(held.layer_bytes)):
            held.copy_of(layer).wait()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return sum(held.layer_bytes) / seconds / 1e9


def main() -> None:
    """Run it and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hybrid_27b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=65536)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--group", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=16384)
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--scale", default="full", choices=["full", "tiny"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = build(given.model, given.layers, given.scale)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tree = segment(make_group(given.prompt, given.response, given.group, vocabulary).trajectories)
    config = ReplayConfig(
        chunk=given.chunk, pack=given.group * given.response, logit_piece=1024,
        placement=SHAPES[given.model].placement("exact"),
    )  # fmt: skip
    say("once, not counted")
    gradient(model, tree, config)
    say("weights on the device")
    resident, of_resident = measured(model, tree, config, given.trials)
    held = offload(model, DEVICE)
    say("weights in host memory")
    rate = copy_rate(held)
    held.copied = 0
    hosted, of_hosted = measured(model, tree, config, given.trials)
    apart = lambda left, right: comparison.compare(left, right).global_relative
    report = {
        "settings": {key: str(value) for key, value in vars(given).items()} | {"layers_made": len(held.layer_bytes)},
        "versions": versions(), "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "kernels": kernels.chosen(), "layer_gib": [round(size / 2**30, 4) for size in held.layer_bytes],
        "gradient": {
            "same_bits": all(torch.equal(resident[0][name], hosted[0][name]) for name in resident[0]),
            "same_bits_on_the_device": all(torch.equal(resident[0][name], resident[-1][name]) for name in resident[0]),
            "relative_difference": apart(hosted[0], resident[0]),
            "relative_difference_on_the_device": apart(resident[-1], resident[0]),
        },
        "device_weights": of_resident, "host_weights": of_hosted,
        "copied_gib_a_trial": round(held.copied / given.trials / 2**30, 3), "copy_gb_per_second": round(rate, 2),
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
