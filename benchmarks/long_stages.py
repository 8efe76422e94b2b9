"""Stages of `long_context.py` that need no other side: the longest contexts, peak memory, states in host memory."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.long_runs import STARTED, OutOfTimeError, Progress, clear, say, timed, timed_once, trainer
from benchmarks.long_shapes import DEVICE, SHAPES, build, make_group
from longstraw_agents.errors import UpdateStoppedError
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import comparison, kernels
from longstraw_agents.trainer.journal import JournalConfig
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.receipt import versions
from longstraw_agents.trainer.replay import Engine, ReplayConfig

Save = Callable[[dict[str, Any]], None]

#: Peaks to measure: shape, prompt, response, G, chunk. The planner may be fitted to the first two; the others it never sees.
PEAKS = (
    ("smollm2_135m", 131072, 512, 2, 16384),
    ("hybrid_1024", 65536, 512, 2, 8192),
    ("llama_768", 262144, 512, 4, 8192),
    ("qwen3_2048", 65536, 256, 2, 4096),
    ("qwen3_1024", 131072, 1024, 2, 16384),
    ("hybrid_1536", 131072, 512, 4, 4096),
)
FITTED = ("smollm2_135m", "hybrid_1024")


def stage_positions(options: argparse.Namespace, save: Save) -> dict[str, Any]:
    """One update at `--context` positions: finished, or how far it came by the deadline, or why it ended.

    With `--journal` it ends at the deadline with a checkpoint, and the same command goes on from there.
    """
    shape, name = SHAPES[options.model], options.model
    config = shape.make(options.scale)
    if shape.kind == "GlmMoeDsaForCausalLM":
        torch.set_float32_matmul_precision("high")  # index scores: products of bfloat16 numbers are exact in TF32
    say(f"building {name} ({options.scale})")
    model = build(name, torch.bfloat16, options.scale)
    weights = sum(p.nbytes for p in model.parameters())
    placement = shape.placement(options.gradient, not options.no_outputs)
    placement = replace(placement, place=options.place or placement.place)
    result: dict[str, Any] = {
        "model": name, "scale": options.scale, "gradient": options.gradient, "context": options.context, "finished": False,
        "response": options.response, "group": options.group, "chunk": options.chunk, "pack": options.pack,
        "place": placement.place, "outputs": placement.outputs, "weight_bytes": weights,
    }  # fmt: skip
    say(f"{weights / 1e9:.2f} GB of weights; a short update first: kernels are compiled")
    make = lambda journal=None: trainer(
        model, options.gradient, options.chunk, options.pack, placement=placement, journal=journal
    )  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    make().update([make_group(min(4096, options.context // 2), options.response, 2, config.vocab_size)])
    with torch.no_grad():  # a process that goes on with a journal must begin with the same weights
        for p, values in zip(trained, before, strict=True):
            p.copy_(values)
    prompt = options.context - options.response
    group = make_group(prompt, options.response, options.group, config.vocab_size)
    subject = make(journal_of(options))
    deadline = None if options.journal else options.deadline  # a journal stops at its own border
    watch = Progress(subject.engine, prompt, deadline, lambda report: save(result | report), options.every)
    say(f"{options.gradient} update at {options.context:,} positions begins")
    try:
        receipt, measured = timed(lambda subject=subject: subject.update([group]))
    except OutOfTimeError as stop:
        say(str(stop))
        return result | stop.report
    except UpdateStoppedError as stop:
        say(str(stop))
        return result | watch.report() | {"stopped": str(stop), "journal": subject.journal.report()}
    except torch.OutOfMemoryError as error:
        say(f"out of memory: {error}")
        return result | watch.report() | {"error": str(error)[:2000]}
    watch.close()
    result |= measured | {
        "finished": True, "by_kind": dict(receipt.seconds), "inputs": dict(receipt.inputs), "phases": receipt.phases,
        "state_bytes": receipt.state_bytes, "kernels": receipt.setting["kernels"], "flips": dict(receipt.flips),
        "gradient_norm": receipt.steps[0].gradient_norm, "versions": versions(("torch", "transformers", "peft")),
        "receipt": receipt.to_dict(),
    }  # fmt: skip
    say(f"finished in {measured['seconds']} s")
    if options.journal:
        result |= {"journal": receipt.journal, "seconds_of_all_pieces": sum(receipt.seconds.values())}
        subject.settle()
    save(result)
    del subject, watch
    alone = attention_seconds(config, prompt, options.chunk)
    if alone is not None:
        result |= {"kernel_alone_seconds": alone, "capture_fraction_of_kernel_rate": alone / receipt.seconds["capture"]}
    return result


def journal_of(options: argparse.Namespace) -> JournalConfig | None:
    """The journal that `--journal`, `--piece-seconds` and `--deadline` ask for."""
    if options.journal is None:
        return None
    left = None if options.deadline is None else max(0.0, options.deadline - (time.perf_counter() - STARTED))
    return JournalConfig(options.journal, options.piece_seconds, left)


def attention_seconds(config: Any, length: int, chunk: int) -> float | None:
    """What the chosen kernel alone takes for a capture of `length` inputs: every 8th chunk is timed, all are summed.

    None where no bottom-right kernel is there, or attention does not read the whole prefix.
    """
    if DEVICE.type != "cuda" or hasattr(config, "index_topk"):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    new = lambda count, length: torch.randn(1, length, count, size, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
    q = new(config.num_attention_heads, chunk)
    k, v = new(config.num_key_value_heads, length), new(config.num_key_value_heads, length)
    kernel = kernels.choose(q, k, v)
    if kernel is None or not kernel.bottom_right:
        return None
    stops = list(range(chunk, length + 1, chunk))
    sampled = stops[::8] + stops[-1:]
    seconds = [timed_once(lambda s=s: kernel.forward(q, k[:, :, :s], v[:, :, :s], True, 0.1)) for s in sampled]
    return float(np.interp(stops, sampled, seconds).sum()) * sum(kind == "full_attention" for kind in types)


def stage_peaks(options: argparse.Namespace, save: Save) -> dict[str, Any]:
    """The peak of allocated memory of exact and detached updates, with all that a forecast of it needs to know."""
    runs: list[dict[str, Any]] = []
    found = {"fitted": list(FITTED), "versions": versions(("torch", "transformers", "peft")), "runs": runs}
    for name, prompt, response, size, chunk in PEAKS:
        if options.scale == "tiny":
            prompt, response, chunk = prompt // 256, 16, chunk // 128
        model = build(name, torch.bfloat16, options.scale)
        vocabulary = SHAPES[name].make(options.scale).vocab_size
        for gradient in ("exact", "detached"):
            pack = size * response
            make = lambda model=model, gradient=gradient, chunk=chunk, pack=pack: trainer(model, gradient, chunk, pack)
            make().update([make_group(min(4096, prompt), response, 2, vocabulary)])
            group = make_group(prompt, response, size, vocabulary)
            clear()
            before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
            receipt, measured = timed(lambda make=make, group=group: make().update([group]))
            runs.append(
                {
                    "shape": name, "scale": options.scale, "gradient": gradient, "prompt": prompt, "response": response,
                    "group": size, "chunk": chunk, "pack": pack, "outputs": gradient == "exact", "before_bytes": before,
                    "phases": receipt.phases, "state_bytes": receipt.state_bytes, "kernels": receipt.setting["kernels"],
                    "by_kind": dict(receipt.seconds), "fitted": name in FITTED, **measured,
                }
            )  # fmt: skip
            say(json.dumps({key: runs[-1][key] for key in ("shape", "gradient", "seconds", "peak_gib")}))
            save(found)
        del model, make
    return found


def stage_paged(options: argparse.Namespace, save: Save) -> dict[str, Any]:
    """One float32 gradient with states on the device, and again in host memory under a budget below the states' size."""
    length, chunk, page = (2048, 256, 300) if options.scale == "tiny" else (98304, 1024, 4096)
    model = build("wide_state", torch.float32, options.scale)
    tree = segment(make_group(length, 128, 2, SHAPES["wide_state"].make(options.scale).vocab_size).trajectories)
    c = torch.full((len(tree.entry_node),), 1 / len(tree.entry_node), device=DEVICE)
    total = torch.cuda.get_device_properties(DEVICE).total_memory if DEVICE.type == "cuda" else 0
    gradients: dict[str, dict[str, Tensor]] = {}
    result: dict[str, Any] = {"length": length, "chunk": chunk, "page": page, "dtype": "float32"}
    for place in ("device", "host"):
        budget = int(0.9 * result["device"]["state_bytes"]["state"]) if place == "host" else total
        clear()
        if DEVICE.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(budget / total)
        replay = Engine(model, ReplayConfig(chunk=chunk, pack=256, placement=Placement(place, page=page))).open(tree)
        _, measured = timed(lambda replay=replay: replay.backward(c))
        gradients[place] = {n: g.cpu() for n, g in comparison.gradients(model).items()}
        model.zero_grad()
        result[place] = measured | {"budget_bytes": budget, "state_bytes": replay.state.nbytes()}
        say(f"{place}: {result[place]}")
        save(result)
        del replay
    if DEVICE.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    d = comparison.compare(gradients["host"], gradients["device"])
    return result | {"relative_difference": d.global_relative, "worst": d.worst, "worst_name": d.worst_name}
