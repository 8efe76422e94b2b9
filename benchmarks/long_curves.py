"""The stage `curves` of `long_context.py`: seconds, peak memory and the share of the kernel's own rate by length and by G.

Ours in both modes at every length, and for every G at one of them; conventional with torch's attention and with our kernel up to
`--conventional-to` prompt tokens, one member run and multiplied by G, for its members run one after another. All in one process
on one device, each after a short run of the same kind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.long_conventional import conventional_member, with_our_kernel
from benchmarks.long_runs import say, timed, trainer
from benchmarks.long_shapes import DEVICE, SHAPES, build, make_group
from benchmarks.long_stages import attention_seconds
from longstraw_agents.trainer.receipt import versions

GROUP = 8
SIZES = (2, 32)  # beside GROUP, at one length


def stage_curves(options: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """See the module's head. `tokens_per_second` counts the tokens of all trajectories, shared ones once each."""
    config = SHAPES[options.model].make(options.scale)
    lengths = [int(length) for length in options.lengths.split(",")]
    model = build(options.model, torch.bfloat16, options.scale)
    attentions = {"same kernel": with_our_kernel(), "default": "sdpa"}
    runs: list[dict[str, Any]] = []
    found: dict[str, Any] = {
        "model": options.model, "response": options.response, "chunk": options.chunk, "pack": options.pack, "runs": runs,
        "versions": versions(("torch", "transformers", "peft")),
    }  # fmt: skip

    def add(run: dict[str, Any]) -> None:
        tokens = run["group"] * (run["prompt"] + options.response)
        runs.append(run | {"tokens_per_second": tokens / run["seconds"]})
        say(json.dumps({key: run[key] for key in ("side", "gradient", "attention", "prompt", "group", "seconds", "peak_gib")}))
        save(found)

    warm = make_group(min(4096, lengths[0]), options.response, 2, config.vocab_size)
    for gradient in ("detached", "exact"):
        trainer(model, gradient, options.chunk, options.pack).update([warm])
    for attention in attentions.values():
        conventional_member(model, warm.trajectories[0], attention)
    for prompt in lengths:
        for gradient in ("detached", "exact"):
            for size in (GROUP, *(SIZES if prompt == options.memory_prompt else ())):
                add(_ours(model, config, options, prompt, size, gradient))
        if prompt <= options.conventional_to:
            for label, attention in attentions.items():
                add(_conventional(model, config, options, prompt, attention) | {"attention": label})
    return found | {"device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"}


def _ours(model: nn.Module, config: Any, options: argparse.Namespace, prompt: int, size: int, gradient: str) -> dict[str, Any]:
    """One update of a group of `size`."""
    group = make_group(prompt, options.response, size, config.vocab_size)
    subject = trainer(model, gradient, options.chunk, options.pack)
    receipt, measured = timed(lambda: subject.update([group]))
    alone = attention_seconds(config, prompt, options.chunk)
    return measured | {
        "side": "ours", "gradient": gradient, "attention": None, "prompt": prompt, "group": size,
        "by_kind": dict(receipt.seconds),
        "fraction_of_kernel_rate": None if alone is None else alone / receipt.seconds["capture"],
    }  # fmt: skip


def _conventional(model: nn.Module, config: Any, options: argparse.Namespace, prompt: int, attention: str) -> dict[str, Any]:
    """One member, run and multiplied."""
    group = make_group(prompt, options.response, 1, config.vocab_size)
    run = conventional_member(model, group.trajectories[0], attention)
    return {
        "side": "conventional", "gradient": None, "prompt": prompt, "group": GROUP, "members_run": 1,
        "seconds": GROUP * run["seconds"], "peak_gib": max(run["score"]["peak_gib"], run["train"]["peak_gib"]),
        "by_kind": {kind: GROUP * run[kind]["seconds"] for kind in ("score", "train")}, "fraction_of_kernel_rate": None,
    }  # fmt: skip
