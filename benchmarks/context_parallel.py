"""Several GPUs of one host: the context-parallel update against the one-GPU update.

    python benchmarks/context_parallel.py --nproc 2 [--stages parity,bfloat16,identical,scaling,fits] [--record]

Stages, each of which appends its numbers to `--out` as soon as it has them:

    parity      float32 gradients at 16,384 tokens, all processes against one: SmolLM2-135M's shape and a small hybrid
    bfloat16    bfloat16 at 16,384 tokens: all processes' error and conventional training's own, against conventional float32
    identical   ten steps on two groups; the weights of all processes are compared bit by bit after each
    scaling     one update at 1,048,576 tokens on one GPU and on all: seconds by kind of run, peak memory, traffic, idle time.
                `--one-gpu detached` leaves the one-GPU reverse pass out (six minutes); `none` leaves out the one-GPU run
    fits        the largest context that fits, exact and detached: the peak grows in a straight line with the context, so it is
                measured at two lengths, and the length at which it would reach 97 % of the GPU's memory is then run. What is run
                is the end of the path: all states are there (copies of the first chunk's), and the last chunk is replayed

Weights are random; LoRA r = 8 on all linear layers. NCCL on GPUs, gloo where there are none (to try the script out:
`--model tiny --tokens 512 --context 4096 --chunk 256`).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import long_context
import torch
import transformers
from long_context import CONFIGS, build, make_group, timed
from torch import Tensor

from longstraw_agents.launch import launch
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import comparison, conventional
from longstraw_agents.trainer.loss import LossConfig
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.ranks import Layout, Ranks, join, leave
from longstraw_agents.trainer.reduction import require_same, sum_gradients
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.trainer.state import Run
from longstraw_agents.trainer.update import Trainer, TrainerConfig
from longstraw_agents.types import Group, Trajectory

CONFIGS["hybrid_small"] = lambda: (
    transformers.Qwen3_5ForCausalLM,
    transformers.Qwen3_5TextConfig(
        vocab_size=32768, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64,
        linear_value_head_dim=64, max_position_embeddings=2**23,
    ),
)  # fmt: skip


def gradient(name: str, dtype: torch.dtype, group: Group, c: Tensor, config: ReplayConfig, ranks: Ranks) -> dict[str, Tensor]:
    """The gradient of sum(c * logp) by our engine on these processes, in float32."""
    model = build(name, dtype)
    tree = segment(group.trajectories)
    Engine(model, config, ranks).open(tree).backward(c.to(ranks.device))
    sum_gradients([(n, p) for n, p in model.named_parameters() if p.requires_grad], ranks)
    return {n: g.float() for n, g in comparison.gradients(model).items()}


def inputs_of(options: argparse.Namespace, name: str) -> tuple[Group, Tensor]:
    """A group of two at `--tokens`, and random coefficients for its loss tokens."""
    response = min(256, options.tokens // 4)
    group = make_group(options.tokens - response, response, 2, CONFIGS[name]()[1].vocab_size)
    return group, torch.randn(2 * response, generator=torch.Generator().manual_seed(0)) / response


def difference(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Any]:
    """Worst parameter and global relative error."""
    d = comparison.compare(ours, reference)
    return {"worst": d.worst, "worst_name": d.worst_name, "global": d.global_relative, "cosine": d.cosine}


def stage_parity(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """All processes against process 0 alone, both ours, in float32."""
    found: dict[str, Any] = {}
    for name in options.parity_models.split(","):
        group, c = inputs_of(options, name)
        config = ReplayConfig(chunk=options.parity_chunk, pack=options.parity_chunk)
        ours, measured = timed(lambda: gradient(name, torch.float32, group, c, config, ranks))  # noqa: B023
        found[name] = {"tokens": options.tokens, **measured}
        if ranks.number == 0:
            alone, measured = timed(lambda: gradient(name, torch.float32, group, c, config, Ranks()))  # noqa: B023
            found[name] |= difference(ours, alone) | {"one_gpu": measured}
    return found


def stage_bfloat16(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Errors against conventional float32: ours on all processes, and conventional bfloat16."""
    found: dict[str, Any] = {}
    for name in options.parity_models.split(","):
        group, c = inputs_of(options, name)
        config = ReplayConfig(chunk=options.parity_chunk, pack=options.parity_chunk)
        ours = gradient(name, torch.bfloat16, group, c, config, ranks)
        if ranks.number == 0:
            reference, low = (theirs(name, dtype, group.trajectories, c) for dtype in (torch.float32, torch.bfloat16))
            own, usual = difference(ours, reference), difference(low, reference)
            found[name] = {"ours": own, "conventional": usual, "over_conventional": own["global"] / usual["global"]}
    return found


def theirs(name: str, dtype: torch.dtype, trajectories: tuple[Trajectory, ...], c: Tensor) -> dict[str, Tensor]:
    """Conventional training's gradient of the same loss, member by member, in float32."""
    model = build(name, dtype)
    conventional.backward(
        model, trajectories, lambda logp: (c.to(logp.device) * logp).sum(), in_series=True, checkpointing=True
    )  # fmt: skip
    return {n: g.float() for n, g in comparison.gradients(model).items()}


def make_trainer(options: argparse.Namespace, gradient: str, ranks: Ranks, model: Any, rate: float = 1e-9) -> Trainer:
    """A trainer with one scoring pass per step."""
    config = TrainerConfig(
        replay=ReplayConfig(gradient, chunk=options.chunk, pack=options.pack), loss=LossConfig(mismatch_cap=2.0),
        optimizer=OptimizerConfig(learning_rate=rate),
    )  # fmt: skip
    return Trainer(model, config, ranks=ranks)


def stage_identical(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Ten steps; `Trainer` compares digests after each and stops at the first difference."""
    model = build(options.model, torch.bfloat16)
    trainer = make_trainer(options, "exact", ranks, model, rate=1e-3)
    group, _ = inputs_of(options, options.model)
    norms = [trainer.update([group]).steps[0].gradient_norm for _ in range(10)]
    digest = require_same([(n, p) for n, p in model.named_parameters() if p.requires_grad], ranks, trainer.version)
    return {"steps": trainer.version, "digest": digest, "mismatches": 0, "gradient_norms": norms}


def stage_scaling(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """One update at `--context` tokens, G = 2: on process 0 alone, then on all."""
    model = build(options.model, torch.bfloat16)
    vocabulary = CONFIGS[options.model]()[1].vocab_size
    response = min(options.response, options.context // 8)
    group = make_group(options.context - response, response, 2, vocabulary)
    warm = make_group(4 * response, response, 2, vocabulary)
    found: dict[str, Any] = {"model": options.model, "context": options.context, "chunk": options.chunk}

    def run(gradient: str, ranks: Ranks) -> dict[str, Any]:
        make_trainer(options, gradient, ranks, model).update([warm])
        receipt, measured = timed(lambda: make_trainer(options, gradient, ranks, model).update([group]))
        return measured | {
            "by_kind": dict(receipt.seconds), "inputs": dict(receipt.inputs), "state_bytes": receipt.state_bytes,
            "gradient_norm": receipt.steps[0].gradient_norm, "ranks": receipt.ranks, "kernels": receipt.setting["kernels"],
        }  # fmt: skip

    def keep(label: str, result: dict[str, Any]) -> None:
        found[label] = result
        if ranks.number == 0:
            print(label, json.dumps(result), flush=True)

    keep("all", run(options.gradient, ranks))
    if options.one_gpu != "none" and ranks.number == 0:
        keep("one", run(options.one_gpu, Ranks()))
        one, every = found["one"]["by_kind"], found["all"]["by_kind"]
        found["speedup"] = {kind: one[kind] / every[kind] for kind in one if every.get(kind)}
        found["capture_fraction_of_linear"] = found["speedup"]["capture"] / ranks.world
        sent = sum(sum(rank["sent_bytes"].values()) for rank in found["all"]["ranks"])
        found["sent_bytes_per_input"] = sent / sum(found["all"]["inputs"].values())
    return found


def stage_fits(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Largest context by memory; see the module's head."""
    total = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 8.0
    found: dict[str, Any] = {"memory_gib": round(total, 1)}
    for gradient in ("exact", "detached"):
        lengths = [options.fit_context, 2 * options.fit_context]
        peaks = [end_of_path(options, gradient, ranks, length)["peak_gib"] for length in lengths]
        slope = max((peaks[1] - peaks[0]) / (lengths[1] - lengths[0]), 1e-9)
        largest = int(lengths[0] + (0.97 * total - peaks[0]) / slope) // options.chunk * options.chunk
        found[gradient] = {"measured": dict(zip(lengths, peaks, strict=True)), "largest": largest}
        if torch.cuda.is_available():
            found[gradient] |= end_of_path(options, gradient, ranks, largest)
        if ranks.number == 0:
            print(gradient, json.dumps(found[gradient]), flush=True)
    return found


def end_of_path(options: argparse.Namespace, gradient: str, ranks: Ranks, length: int) -> dict[str, float]:
    """Replay the last chunk of a path of `length` positions; seconds, and the highest peak of any process."""
    model = build(options.model, torch.bfloat16)
    engine = Engine(model, ReplayConfig(gradient, chunk=options.chunk, pack=options.pack), ranks)
    vocabulary = CONFIGS[options.model]()[1].vocab_size
    # The shared part's inputs are whole chunks: one token fewer than its tokens.
    tree = segment(make_group(length - options.chunk + 1, options.chunk, 2, vocabulary).trajectories)
    replay, root = engine.open(tree), tree.nodes[0]

    def run() -> None:
        stop = root.stop - 1
        with engine.attached(), torch.no_grad():
            engine.decode(root.tokens[None, : options.chunk], Run(0, options.chunk, 1, writes=True, gradient=False), replay.state)
        replay.state.collect()
        for layer in replay.state.layers:
            first = layer.export(0, options.chunk)
            for start in range(options.chunk, stop - options.chunk + 1, options.chunk):
                layer.adopt(start, start + options.chunk, first)
        leaf = tree.nodes[root.children[0]]
        c = torch.ones(len(tree.entry_node), device=engine.device)
        with engine.attached():
            replay._replay_leaves([leaf], replay._slots(c), None, replay._new_scores(False))

    _, measured = timed(run)
    return measured | {"peak_gib": max(ranks.gather_objects(measured["peak_gib"]))}


STAGES: dict[str, Callable[[argparse.Namespace, Ranks], dict[str, Any]]] = {
    "parity": stage_parity, "bfloat16": stage_bfloat16, "identical": stage_identical, "scaling": stage_scaling,
    "fits": stage_fits,
}  # fmt: skip


def work(options: argparse.Namespace) -> None:
    """One process of the run."""
    ranks = join(Layout(cp=options.nproc, timeout=3600), long_context.DEVICE.type)
    found: dict[str, Any] = {
        "processes": ranks.world, "torch": torch.__version__, "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }  # fmt: skip
    for stage in options.stages.split(","):
        started = time.perf_counter()
        found[stage] = STAGES[stage](options, ranks) | {"stage_seconds": round(time.perf_counter() - started, 1)}
        if ranks.number == 0:
            options.out.write_text(json.dumps(found, indent=1, default=str) + "\n")
            print(stage, json.dumps(found[stage], default=str), flush=True)
        gc.collect()
    leave(ranks)
    if options.record and ranks.number == 0:
        record(found, options)


def record(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the figures that were measured."""
    from longstraw_agents.figures import record as write

    command = f"python benchmarks/context_parallel.py --nproc {options.nproc} --record"
    about = {key: found[key] for key in ("processes", "torch", "transformers", "device")}
    if "parity" in found:
        worst = {name: entry["worst"] for name, entry in found["parity"].items() if isinstance(entry, dict)}
        write("parallel.gpu.float32_parity", max(worst.values()), command=command, extra=about | {"worst": worst})
    if "capture_fraction_of_linear" in found.get("scaling", {}):
        scaling = found["scaling"]
        value, extra = scaling["capture_fraction_of_linear"], about | {"speedup": scaling["speedup"]}
        write("parallel.gpu.capture_fraction_of_linear", value, command=command, extra=extra)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--stages", default="parity,bfloat16,identical,scaling")
    parser.add_argument("--out", type=Path, default=Path("context_parallel.json"))
    parser.add_argument("--model", default="smollm2_135m", choices=CONFIGS)
    parser.add_argument("--parity-models", default="smollm2_135m,hybrid_small")
    parser.add_argument("--parity-chunk", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--gradient", default="exact", choices=["exact", "detached"])
    parser.add_argument("--one-gpu", default="detached", choices=["exact", "detached", "none"])
    parser.add_argument("--context", type=int, default=1048576)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=16384)
    parser.add_argument("--pack", type=int, default=4096)
    parser.add_argument("--fit-context", type=int, default=524288)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
    else:
        launch([sys.executable, __file__, "--worker", *sys.argv[1:]], options.nproc)


if __name__ == "__main__":
    main()
