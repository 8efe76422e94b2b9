"""One GPU, long contexts: exactness, speed against conventional training, memory, and the largest contexts.

Stages (`--stages a,b,...`), each of which says what it does, and writes its numbers to `--out` as soon as it has them:

    kernels     which attention kernel is chosen for each shape, and its own rate on 16,384 queries over 262,144 keys
    exactness   bfloat16 gradients at 32,768 tokens: ours and conventional's, each against conventional float32; SmolLM2's own
                weights where their folder is given (`--smollm2`)
    speed       524,288 prompt tokens, 512 response tokens, G = 8: ours detached and exact; conventional with its default
                attention and with our kernel, `--members` members run and multiplied. Both sides do one scoring pass
    memory      peak GPU memory of an exact update for G = 2, 8, 32
    positions   one update (`--model`, `--gradient`) at `--context` positions, with the capture's share of the kernel's own
                rate. `--deadline` seconds after its start it stops at a chunk's border and reports how far it came; with
                `--journal DIR` it leaves a checkpoint there, and the same command goes on with it
    peaks       peak memory of exact and detached updates on six shapes, for `longstraw plan`'s forecast to be held against
    curves      time, peak memory and the capture's share of the kernel's rate by length and by G, beside conventional
    paged       a gradient with states in host memory under a budget below their size, against the same on the device

Conventional: transformers + PEFT, activation checkpointing, members in series, logits only on the response, no KL. Weights are
random. Times are wall clock after synchronization. `--scale tiny` runs the same code on small models of the same kind on a CPU.
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

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.long_conventional import conventional_member, with_our_kernel
from benchmarks.long_curves import stage_curves
from benchmarks.long_exactness import stage_exactness
from benchmarks.long_runs import say, timed, timed_once, trainer
from benchmarks.long_shapes import DEVICE, SHAPES, build, make_group
from benchmarks.long_stages import Save, stage_paged, stage_peaks, stage_positions
from longstraw_agents import figures
from longstraw_agents.trainer import kernels


def stage_kernels(options: argparse.Namespace, save: Save) -> dict[str, Any]:
    """Chosen kernel and its rate, by (heads, key heads, size)."""
    found: dict[str, Any] = {}
    queries, keys = options.rate_queries, options.rate_keys
    for heads, key_heads, size in ((9, 3, 64), (8, 2, 256), (16, 8, 128)):
        new = lambda count, length, size=size: torch.randn(1, count, length, size, device=DEVICE, dtype=torch.bfloat16)
        q, k, v = new(heads, queries), new(key_heads, keys), new(key_heads, keys)
        kernel = kernels.choose(q, k, v)
        if kernel is None:
            found[f"{heads}/{key_heads}/{size}"] = {"kernel": "reference"}
            continue
        out, lse = kernel.forward(q, k, v, False, 0.1)
        seconds = _median(lambda kernel=kernel, q=q, k=k, v=v: kernel.forward(q, k, v, False, 0.1))
        back = _median(lambda kernel=kernel, q=q, k=k, v=v, out=out, lse=lse: kernel.backward(out, q, k, v, out, lse, False, 0.1))
        flops = 4 * heads * size * queries * keys
        found[f"{heads}/{key_heads}/{size}"] = {
            "kernel": kernel.name, "forward_tflops": round(flops / seconds / 1e12, 1),
            "backward_tflops": round(2.5 * flops / back / 1e12, 1),
            "passes_check": {k.name: kernels.passes_check(k, DEVICE, torch.bfloat16, heads, key_heads, size, size)
                             for k in kernels.KERNELS if k.supports(q, q, q)},
        }  # fmt: skip
    return found


def _median(work: Callable[[], Any], repeats: int = 5) -> float:
    work()
    return float(np.median([timed_once(work) for _ in range(repeats)]))


def stage_speed(options: argparse.Namespace, save: Save) -> dict[str, Any]:
    """See the module's head. Times of both sides in one process on one device."""
    name, found = options.model, {}
    model = build(name, torch.bfloat16, options.scale)
    vocabulary = SHAPES[name].make(options.scale).vocab_size
    warm = make_group(4096, 512, 2, vocabulary)
    for gradient in ("detached", "exact"):
        trainer(model, gradient, options.chunk, options.pack).update([warm])
    group = make_group(options.prompt, options.response, options.group, vocabulary)
    for gradient in ("detached", "exact"):
        subject = trainer(model, gradient, options.chunk, options.pack)
        receipt, measured = timed(lambda subject=subject: subject.update([group]))
        found[gradient] = measured | {"by_kind": dict(receipt.seconds), "inputs": dict(receipt.inputs)}
        found["kernels"] = receipt.setting["kernels"]
        say(json.dumps({gradient: found[gradient]}))
        save(found)
    own = with_our_kernel()
    for label, attention in (("same_kernel", own), ("default", "sdpa")):
        conventional_member(model, warm.trajectories[0], attention)
        runs = [conventional_member(model, t, attention) for t in group.trajectories[: options.members]]
        seconds = float(np.median([run["seconds"] for run in runs])) * options.group
        found[f"conventional_{label}"] = {"members_run": len(runs), "seconds_times_group": seconds, "runs": runs}
        say(json.dumps({label: found[f"conventional_{label}"]}))
        save(found)
        for gradient in ("detached", "exact"):
            found[f"speedup_{gradient}_{label}"] = seconds / found[gradient]["seconds"]
    return found


def stage_memory(options: argparse.Namespace, save: Save) -> dict[str, Any]:
    """Peak memory by group size."""
    name, peaks = options.model, {}
    model = build(name, torch.bfloat16, options.scale)
    for size in (2, 8, 32):
        group = make_group(options.memory_prompt, options.response, size, SHAPES[name].make(options.scale).vocab_size)
        subject = trainer(model, "exact", options.chunk, 2 * options.response)
        _, measured = timed(lambda subject=subject, group=group: subject.update([group]))
        peaks[size] = measured
        say(f"G = {size}: {measured}")
        save({"prompt": options.memory_prompt, "peaks": peaks})
    growth = {f"g2_g{size}_percent": 100 * (peaks[size]["peak_gib"] / peaks[2]["peak_gib"] - 1) for size in (8, 32)}
    return {"prompt": options.memory_prompt, "peaks": peaks} | growth


STAGES = {
    "kernels": stage_kernels, "exactness": stage_exactness, "speed": stage_speed, "memory": stage_memory,
    "positions": stage_positions, "peaks": stage_peaks, "paged": stage_paged, "curves": stage_curves,
}  # fmt: skip


def record(found: dict[str, Any]) -> None:
    """Write the figures of the stages that ran, here or where the result file comes from."""
    name = found["device"]

    def write(figure: str, value: float, unit: str, trials: int | None = None, extra: dict[str, Any] | None = None) -> None:
        figures.record(figure, value, unit, trials=trials, extra=extra, measured=found["provenance"])

    if found.get("scale", "full") != "full":
        raise SystemExit("the results are of tiny models: there is nothing to record")
    exactness = found.get("exactness", {})
    if models := {k: v for k, v in exactness.items() if isinstance(v, dict) and "over_conventional" in v}:
        worst = max(entry["over_conventional"] for entry in models.values())
        write("gpu.bfloat16_over_conventional", worst, "ratio", extra=models | {"device": name})
    for mode in ("detached", "exact"):
        for label, suffix in (("default", ""), ("same_kernel", "_same_kernel")):
            key = f"speedup_{mode}_{label}"
            if key in found.get("speed", {}):
                trials = found["speed"][f"conventional_{label}"]["members_run"]
                extra = {"device": name, "ours": found["speed"][mode], "theirs": found["speed"][f"conventional_{label}"]}
                write(f"gpu.update_speedup_{mode}{suffix}", found["speed"][key], "times", trials=trials, extra=extra)
    for size in (8, 32):
        if "memory" in found:
            value = found["memory"][f"g2_g{size}_percent"]
            write(f"gpu.peak_growth_g2_g{size}_percent", value, "%", extra=found["memory"] | {"device": name})
    if found.get("positions", {}).get("finished", "positions" in found):
        run = found["positions"]
        figure = f"gpu.positions_{run['gradient']}.{run['model']}"
        write(figure, run["context"], "positions", extra=run | {"device": name})
        if run["context"] == 2**20 and run["model"] == "smollm2_135m":
            fraction = run["capture_fraction_of_kernel_rate"]
            write("gpu.capture_fraction_of_kernel_rate", fraction, "fraction", extra={"device": name})


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="kernels,exactness,speed,memory")
    parser.add_argument("--out", type=Path, default=Path("long_context.json"))
    parser.add_argument("--scale", default="full", choices=["full", "tiny"], help="tiny: models of the same kind for a CPU")
    parser.add_argument("--model", default="smollm2_135m", choices=SHAPES)
    parser.add_argument("--gradient", default="exact", choices=["exact", "detached"])
    parser.add_argument("--chunk", type=int, default=16384)
    parser.add_argument("--pack", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=524288)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--context", type=int, default=1048576)
    parser.add_argument("--no-outputs", action="store_true", help="keep no attention outputs of captured chunks")
    parser.add_argument("--deadline", type=float, help="seconds after which an update stops at a chunk's border")
    parser.add_argument("--journal", type=Path, help="folder: an update that stops at --deadline goes on at the next call")
    parser.add_argument("--piece-seconds", type=float, default=300.0, help="seconds between two checkpoints of the journal")
    parser.add_argument("--place", choices=["device", "host"], help="where states lie, in place of the shape's own choice")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two lines of progress")
    parser.add_argument("--memory-prompt", type=int, default=131072)
    parser.add_argument("--lengths", default="32768,65536,131072,262144,524288", help="prompts of the curves")
    parser.add_argument("--conventional-to", type=int, default=262144, help="the longest prompt of a conventional member there")
    parser.add_argument("--exactness-tokens", type=int, default=32768)
    parser.add_argument("--exactness-models", default="smollm2_135m,hybrid_2b")
    parser.add_argument("--rate-queries", type=int, default=16384)
    parser.add_argument("--rate-keys", type=int, default=262144)
    parser.add_argument("--from", dest="results", type=Path, help="run nothing: record the figures of this result file")
    parser.add_argument("--record", action="store_true", help="write the figures into docs/figures.json")
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2's weights; without it they are random")
    options = parser.parse_args()
    if options.results:
        record(json.loads(options.results.read_text()))
        return
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}
    found |= {"provenance": figures.provenance(), "scale": options.scale}
    for stage in options.stages.split(","):
        started = time.perf_counter()

        def save(partial: dict[str, Any], stage: str = stage) -> None:
            found[stage] = partial
            options.out.write_text(json.dumps(found, indent=1, default=str) + "\n")

        say(f"stage {stage}")
        save(STAGES[stage](options, save) | {"stage_seconds": round(time.perf_counter() - started, 1)})
        say(f"{stage}: {json.dumps(found[stage], default=str)}")
        gc.collect()
    if options.record:
        record(found)


if __name__ == "__main__":
    main()
