"""Several GPUs of one host: the context-parallel update against the one-GPU update.

    python benchmarks/context_parallel.py --nproc 2 [--stages exchanges,capture,...] [--seconds 560] [--out FILE]
    python benchmarks/context_parallel.py --from FILE       # run nothing: record the figures of a result file

Stages, in the order in which they are worth having. Each has a time limit (`LIMITS`); its numbers are in `--out` as soon as they
exist. When a stage fails or runs out of time, the processes end with a traceback, and new ones go on with the next stage.

    exchanges   every kind of exchange on known numbers, its rate, and the attention kernel that is chosen (compiled here)
    capture     one detached update at `--context` tokens on all GPUs: seconds by kind of run, peak memory, traffic, idle time
    one         the same on one GPU, hence the capture's fraction of linear
    parity      float32 gradients at `--tokens` on all GPUs against ours on one: SmolLM2-135M's shape and a small hybrid
    bfloat16    bfloat16 gradients on all GPUs, and conventional bfloat16, both against conventional float32
    identical   ten steps; the trained weights of all processes are compared bit by bit after each
    update      one exact update at `--context` tokens on all GPUs
    fits        the largest context that fits, exact and detached: the memory in use grows in a straight line with the context, so
                it is measured at two lengths, and the length at which it would reach 97 % (then 93 %) of the GPU is run. What is
                run is the end of the path: all states are there (copies of the first chunk's), and the last chunk is replayed

Weights are random; LoRA r = 8 on all linear layers. NCCL on GPUs, gloo where there are none (to try the script out:
`--scale tiny --tokens 512 --context 4096 --response 64 --chunk 512 --fit-context 1024`).
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The delta rule as transformers has it: kernels of flash-linear-attention multiply in TF32, which is no float32 to compare with.
sys.modules["fla"] = None  # type: ignore[assignment]

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.long_exactness import in_float32  # noqa: E402
from benchmarks.long_runs import timed  # noqa: E402
from benchmarks.long_shapes import DEVICE, SHAPES, build, hybrid, make_group  # noqa: E402
from longstraw_agents import figures  # noqa: E402
from longstraw_agents.errors import RankError  # noqa: E402
from longstraw_agents.launch import launch  # noqa: E402
from longstraw_agents.segmenter import segment  # noqa: E402
from longstraw_agents.trainer import comparison, conventional, kernels  # noqa: E402
from longstraw_agents.trainer.loss import LossConfig  # noqa: E402
from longstraw_agents.trainer.optimizer import OptimizerConfig  # noqa: E402
from longstraw_agents.trainer.pages import Placement  # noqa: E402
from longstraw_agents.trainer.ranks import Layout, Ranks, join, leave  # noqa: E402
from longstraw_agents.trainer.reduction import sum_gradients  # noqa: E402
from longstraw_agents.trainer.replay import Engine, ReplayConfig  # noqa: E402
from longstraw_agents.trainer.state import Run  # noqa: E402
from longstraw_agents.trainer.update import Trainer, TrainerConfig  # noqa: E402
from longstraw_agents.types import Group  # noqa: E402

SHAPES["hybrid_small"] = hybrid(
    vocab_size=32768, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
    head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
)  # fmt: skip

#: Seconds that a stage may take, the start of the processes not counted.
LIMITS = {
    "exchanges": 120, "capture": 120, "one": 150, "parity": 90, "bfloat16": 120, "identical": 90, "update": 260, "fits": 200,
}  # fmt: skip

Keep = Callable[[str, Any], None]


def on_gpu() -> bool:
    """Whether this run has GPUs."""
    return DEVICE.type == "cuda"


def vocabulary(options: argparse.Namespace, name: str) -> int:
    """Token ids of the named shape."""
    return int(SHAPES[name].make(options.scale).vocab_size)


def model_of(options: argparse.Namespace, name: str, dtype: torch.dtype) -> Any:
    """The named shape; its weights are the float32 ones, rounded. Adapters stay float32."""
    model = build(name, torch.float32, options.scale)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" not in parameter_name:
            parameter.data = parameter.data.to(dtype)
    return model


def stage_exchanges(options: argparse.Namespace, ranks: Ranks, keep: Keep) -> None:
    """What each exchange gives on known numbers, bytes per second of the two that carry attention, and the chosen kernel."""
    R, number, device = ranks.size("context"), ranks.number, ranks.device
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        mine = torch.full((3, 5), number + 1, dtype=dtype, device=device)
        everyone = torch.arange(1, R + 1, dtype=dtype, device=device)
        assert torch.equal(ranks.gather(mine)[:, 0, 0], everyone), f"gather of {dtype}"
        assert torch.equal(ranks.exchange(everyone * (number + 1)), everyone * (number + 1)), f"exchange of {dtype}"
        assert torch.equal(ranks.sum(mine), torch.full_like(mine, int(everyone.sum()))), f"sum of {dtype}"
        assert int(ranks.scatter_sum(everyone[:, None])) == R * (number + 1), f"scatter_sum of {dtype}"
        assert torch.equal(ranks.broadcast(mine), torch.ones_like(mine)), f"broadcast of {dtype}"
    assert ranks.gather_objects({"rank": number}) == [{"rank": r} for r in range(R)], "objects"
    large = torch.zeros(R, options.rate_bytes // R, dtype=torch.uint8, device=device)
    for name, exchange in (("exchange", lambda: ranks.exchange(large)), ("gather", lambda: ranks.gather(large[0]))):
        exchange()
        _, measured = timed(lambda exchange=exchange: [exchange() for _ in range(10)])  # type: ignore[misc]
        keep(f"{name}_gb_per_second", round(10 * large.nbytes * (R - 1) / R / measured["seconds"] / 1e9, 2))
    new = lambda heads: torch.randn(1, heads, 128, 64, device=device, dtype=torch.bfloat16)
    _, measured = timed(lambda: kernels.choose(new(9), new(3), new(3)))
    keep("kernels", {"chosen": kernels.chosen(), "seconds": measured["seconds"]})


def new_trainer(options: argparse.Namespace, gradient: str, ranks: Ranks, model: Any, rate: float = 1e-9) -> Trainer:
    """A trainer with one scoring pass per step; exact updates keep attention outputs for their reverse pass."""
    replay = ReplayConfig(
        gradient, chunk=options.chunk, pack=options.pack, logit_piece=1024, placement=Placement(outputs=gradient == "exact")
    )  # fmt: skip
    settings = TrainerConfig(replay=replay, loss=LossConfig(mismatch_cap=2.0), optimizer=OptimizerConfig(learning_rate=rate))
    return Trainer(model, settings, ranks=ranks)


def one_update(options: argparse.Namespace, gradient: str, ranks: Ranks) -> dict[str, Any]:
    """One update at `--context` tokens, G = 2, after a small one that warms up; what the receipt says of it."""
    model = build(options.model, torch.bfloat16, options.scale)
    response = min(options.response, options.context // 8)
    warm = make_group(8 * response, response, 2, vocabulary(options, options.model))
    new_trainer(options, gradient, ranks, model).update([warm])
    group = make_group(options.context - response, response, 2, vocabulary(options, options.model))
    receipt, measured = timed(lambda: new_trainer(options, gradient, ranks, model).update([group]))
    return measured | {
        "gradient": gradient, "context": options.context, "chunk": options.chunk, "by_kind": dict(receipt.seconds),
        "inputs": dict(receipt.inputs), "state_bytes": receipt.state_bytes, "gradient_norm": receipt.steps[0].gradient_norm,
        "kernels": receipt.setting["kernels"], "ranks": receipt.ranks,
    }  # fmt: skip


def stage_update(options: argparse.Namespace, ranks: Ranks, keep: Keep, gradient: str = "exact") -> None:
    """One update on all processes, with the highest peak and the bytes sent per input of any run."""
    result = one_update(options, gradient, ranks)
    sent = sum(sum(rank["sent_bytes"].values()) for rank in result["ranks"])
    runs = sum(result["inputs"].get(kind, 0) for kind in ("capture", "score", "replay", "reverse"))
    keep("all", result | {"peaks_gib": ranks.gather_objects(result["peak_gib"]), "sent_bytes_per_input": sent / runs})


def stage_capture(options: argparse.Namespace, ranks: Ranks, keep: Keep) -> None:
    """As `update`, without the reverse pass."""
    stage_update(options, ranks, keep, "detached")


def stage_one(options: argparse.Namespace, ranks: Ranks, keep: Keep) -> None:
    """One detached update on process 0 alone; the others wait."""
    if ranks.number == 0:
        keep("one", one_update(options, "detached", Ranks()))
    ranks.gather_objects(None)


def inputs_of(options: argparse.Namespace, name: str) -> tuple[Group, Tensor]:
    """A group of two at `--tokens`, and random coefficients for its loss tokens."""
    response = min(256, options.tokens // 4)
    group = make_group(options.tokens - response, response, 2, vocabulary(options, name))
    return group, torch.randn(2 * response, generator=torch.Generator().manual_seed(0)) / response


def ours(options: argparse.Namespace, name: str, dtype: torch.dtype, ranks: Ranks) -> dict[str, Tensor]:
    """The gradient of sum(c * logp) by our engine on these processes, in float32."""
    group, c = inputs_of(options, name)
    model = model_of(options, name, dtype)
    config = ReplayConfig(chunk=options.parity_chunk, pack=options.parity_chunk)
    Engine(model, config, ranks).open(segment(group.trajectories)).backward(c)
    sum_gradients([(n, p) for n, p in model.named_parameters() if p.requires_grad], ranks)
    return {n: g.float() for n, g in comparison.gradients(model).items()}


def theirs(options: argparse.Namespace, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Conventional training's gradient of the same loss, member by member, in float32."""
    group, c = inputs_of(options, name)
    model = model_of(options, name, dtype)
    if dtype == torch.float32 and on_gpu():
        model.get_base_model().config.get_text_config()._attn_implementation = in_float32()  # type: ignore[operator]
    conventional.backward(
        model, group.trajectories, lambda logp: (c.to(logp.device) * logp).sum(), in_series=True, checkpointing=True
    )  # fmt: skip
    return {n: g.float() for n, g in comparison.gradients(model).items()}


def difference(one: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Any]:
    """Worst parameter and global relative error."""
    d = comparison.compare(one, reference)
    return {"worst": d.worst, "worst_name": d.worst_name, "global": d.global_relative, "cosine": d.cosine}


def each_model(options: argparse.Namespace, ranks: Ranks, keep: Keep, dtype: torch.dtype, compare: Callable[..., Any]) -> None:
    """`ours` on all processes for every parity model; then the models' references, one process for each, side by side."""
    names, mine = options.parity_models.split(","), {}
    for index, name in enumerate(names):
        found, measured = timed(lambda name=name: ours(options, name, dtype, ranks))  # type: ignore[misc]
        keep(f"{name}.all", measured)
        if index % ranks.world == ranks.number:
            mine[name] = found
    results = ranks.gather_objects({name: timed(lambda n=name, g=found: compare(n, g)) for name, found in mine.items()})
    for result in results:
        for name, (found, measured) in result.items():
            keep(name, {"tokens": options.tokens, **found, "reference": measured})


def stage_parity(options: argparse.Namespace, ranks: Ranks, keep: Keep) -> None:
    """All processes against one, both ours, in float32."""
    alone = lambda name, found: difference(found, ours(options, name, torch.float32, Ranks()))
    each_model(options, ranks, keep, torch.float32, alone)


def stage_bfloat16(options: argparse.Namespace, ranks: Ranks, keep: Keep) -> None:
    """Errors against conventional float32: ours on all processes, and conventional bfloat16."""

    def compare(name: str, found: dict[str, Tensor]) -> dict[str, Any]:
        reference = theirs(options, name, torch.float32)
        own, usual = difference(found, reference), difference(theirs(options, name, torch.bfloat16), reference)
        return {"ours": own, "conventional": usual, "over_conventional": own["global"] / usual["global"]}

    each_model(options, ranks, keep, torch.bfloat16, compare)


def stage_identical(options: argparse.Namespace, ranks: Ranks, keep: Keep) -> None:
    """Ten steps. `Trainer` compares digests after each; here every bit is compared with process 0's too."""
    model = build(options.model, torch.bfloat16, options.scale)
    trainer = new_trainer(options, "exact", ranks, model, rate=1e-3)
    group, _ = inputs_of(options, options.model)
    trained = [p for p in model.parameters() if p.requires_grad]
    norms, mismatches = [], 0
    before = torch.cat([p.detach().reshape(-1) for p in trained])
    for _ in range(10):
        norms.append(trainer.update([group]).steps[0].gradient_norm)
        mine = torch.cat([p.detach().reshape(-1) for p in trained])
        same = torch.equal(mine.view(torch.int32), ranks.broadcast(mine).view(torch.int32))
        mismatches += sum(not flag for flag in ranks.gather_objects(same))
    keep("steps", trainer.version)
    keep("mismatches", mismatches)
    keep("changed_weights", int((mine != before).sum()))
    keep("gradient_norms", norms)


def stage_fits(options: argparse.Namespace, ranks: Ranks, keep: Keep) -> None:
    """Largest context by memory; see the module's head. On a CPU, where memory is not measured, three times `--fit-context`."""
    total = torch.cuda.get_device_properties(0).total_memory / 2**30 if on_gpu() else 0.0
    keep("gpu_gib", round(total, 2))
    for gradient in ("exact", "detached"):
        lengths = [options.fit_context, 2 * options.fit_context]
        used = [end_of_path(options, gradient, ranks, length)["used_gib"] for length in lengths]
        slope = (used[1] - used[0]) / (lengths[1] - lengths[0])
        keep(f"{gradient}.measured", dict(zip(lengths, used, strict=True)))
        for fraction in (0.97, 0.93):
            room = (fraction * total - used[0]) / slope if on_gpu() else 2 * options.fit_context
            length = (lengths[0] + int(room)) // options.chunk * options.chunk
            try:
                result = end_of_path(options, gradient, ranks, length)
            except torch.OutOfMemoryError as error:
                result = {"out_of_memory": str(error).splitlines()[0]}
            keep(f"{gradient}.{fraction}", {"context": length, **result})
            if all(ranks.gather_objects("used_gib" in result)):
                keep(f"{gradient}.largest", length)
                break


def end_of_path(options: argparse.Namespace, gradient: str, ranks: Ranks, length: int) -> dict[str, float]:
    """Replay the last chunk of a path of `length` positions; seconds, and the most memory in use on any GPU.

    In use is what PyTorch had reserved at its peak and what else is taken (the context, NCCL's buffers, compiled kernels).
    """
    model = build(options.model, torch.bfloat16, options.scale)
    engine = Engine(model, ReplayConfig(gradient, chunk=options.chunk, pack=options.pack, logit_piece=1024), ranks)
    # The shared part's inputs are whole chunks: one token fewer than its tokens.
    tree = segment(make_group(length - options.chunk + 1, options.chunk, 2, vocabulary(options, options.model)).trajectories)
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
        c = torch.ones(len(tree.entry_node), device=engine.device)
        with engine.attached():
            replay._replay_leaves([tree.nodes[root.children[0]]], replay._slots(c), None, replay._new_scores(False))

    _, measured = timed(run)
    used = measured["peak_gib"]
    if on_gpu():
        free, total = torch.cuda.mem_get_info()
        used = (torch.cuda.max_memory_reserved() + total - free - torch.cuda.memory_reserved()) / 2**30
    return measured | {"used_gib": round(max(ranks.gather_objects(used)), 3)}


STAGES: dict[str, Callable[[argparse.Namespace, Ranks, Keep], None]] = {
    "exchanges": stage_exchanges, "capture": stage_capture, "one": stage_one, "parity": stage_parity,
    "bfloat16": stage_bfloat16, "identical": stage_identical, "update": stage_update, "fits": stage_fits,
}  # fmt: skip


def say(text: str) -> None:
    """Print with the time of day."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def write(found: dict[str, Any], out: Path) -> None:
    """The results so far, whole or as they were."""
    hidden = out.with_name(f".{out.name}")
    hidden.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(hidden, out)


def work(options: argparse.Namespace) -> None:
    """One process: the stages in order. One that raises or takes too long ends the process; the launcher then ends the others."""
    faulthandler.dump_traceback_later(90, exit=True)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    ranks = join(Layout(cp=options.nproc, timeout=3600), DEVICE.type)
    found = json.loads(options.out.read_text())
    found |= {"provenance": figures.provenance(), "device": torch.cuda.get_device_name() if on_gpu() else "cpu"}
    for stage in options.stages.split(","):
        left = options.deadline - time.time()
        if left < 1:
            break
        faulthandler.dump_traceback_later(min(LIMITS[stage], left), exit=True)
        entry = found.setdefault(stage, {})
        started = time.perf_counter()

        def keep(name: str, value: Any, stage: str = stage, entry: dict[str, Any] = entry) -> None:
            entry[name] = value
            if ranks.number == 0:
                write(found, options.out)
                say(f"{stage} {name} {json.dumps(value)}")

        STAGES[stage](options, ranks, keep)
        keep("stage_seconds", round(time.perf_counter() - started, 1))
        gc.collect()
    faulthandler.dump_traceback_later(60, exit=True)
    leave(ranks)
    faulthandler.cancel_dump_traceback_later()


def supervise(options: argparse.Namespace) -> dict[str, Any]:
    """Start the processes, and again without the stage that failed, until all stages were tried or the time is over."""
    started = time.time()
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    found |= {"processes": options.nproc, "torch": torch.__version__, "transformers": transformers.__version__}
    todo = options.stages.split(",")
    for stage in todo:
        found.pop(stage, None)
    while todo and time.time() - started < options.seconds:
        write(found, options.out)
        say(f"{options.nproc} processes for {', '.join(todo)}")
        rest = ["--stages", ",".join(todo), "--deadline", str(started + options.seconds)]
        try:
            launch([sys.executable, __file__, *sys.argv[1:], *rest, "--worker"], options.nproc, grace=3)
        except RankError as error:
            say(str(error))
        found = json.loads(options.out.read_text())
        done = [stage for stage in todo if "stage_seconds" in found.get(stage, {})]
        todo = todo[len(done) :]
        if todo:
            say(f"{todo[0]} failed, or the time is over")
            found.setdefault(todo.pop(0), {})["failed"] = True
    write(found, options.out)
    return found


def record(found: dict[str, Any]) -> None:
    """Write the figures that a result file holds."""
    about = {key: found[key] for key in ("processes", "torch", "transformers", "device")}
    command = f"python benchmarks/context_parallel.py --nproc {found['processes']}"

    def write_figure(figure: str, value: float, extra: dict[str, Any]) -> None:
        figures.record(figure, value, command=command, extra=about | extra, measured=found["provenance"])

    for name, value, extra in summary(found):
        if name in figures.BOUNDS:
            write_figure(name, value, extra)
        else:
            say(f"{name} {value}")


def summary(found: dict[str, Any]) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """(figure, value, what belongs to it) of the stages that are whole."""
    whole = lambda stage: found[stage] if "stage_seconds" in found.get(stage, {}) else {}
    models = {name: entry for name, entry in whole("parity").items() if isinstance(entry, dict) and "worst" in entry}
    if models:
        yield "parallel.gpu.float32_parity", max(entry["worst"] for entry in models.values()), models
    models = {name: entry for name, entry in whole("bfloat16").items() if isinstance(entry, dict) and "ours" in entry}
    if models:
        yield "bfloat16 over conventional", max(entry["over_conventional"] for entry in models.values()), models
    if whole("capture") and whole("one"):
        one, every = found["one"]["one"], found["capture"]["all"]
        speedup = one["by_kind"]["capture"] / every["by_kind"]["capture"]
        extra = {"one": one["by_kind"], "all": every["by_kind"], "context": every["context"], "speedup": speedup}
        yield "parallel.gpu.capture_fraction_of_linear", speedup / found["processes"], extra
    if whole("identical"):
        yield "differing weights over ten steps", found["identical"]["mismatches"], {}
    for stage in ("capture", "update"):
        if whole(stage):
            every = found[stage]["all"]
            yield f"{stage}: seconds", every["seconds"], {}
            yield f"{stage}: peak GiB of any GPU", max(every["peaks_gib"]), {}
            yield f"{stage}: bytes sent per input", every["sent_bytes_per_input"], {}
    for gradient in ("exact", "detached"):
        if f"{gradient}.largest" in found.get("fits", {}):
            yield f"largest context, {gradient}", found["fits"][f"{gradient}.largest"], {}


def main() -> None:
    """See the module's head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--seconds", type=float, default=560, help="after which no stage is begun, and the last one is ended")
    parser.add_argument("--out", type=Path, default=Path("context_parallel.json"))
    parser.add_argument("--model", default="smollm2_135m", choices=SHAPES)
    parser.add_argument("--scale", default="full", choices=["full", "tiny"])
    parser.add_argument("--parity-models", default="smollm2_135m,hybrid_small")
    parser.add_argument("--parity-chunk", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--context", type=int, default=1048576)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=16384)
    parser.add_argument("--pack", type=int, default=4096)
    parser.add_argument("--fit-context", type=int, default=524288)
    parser.add_argument("--rate-bytes", type=int, default=2**26)
    parser.add_argument("--from", dest="results", type=Path, help="run nothing: record the figures of this result file")
    parser.add_argument("--record", action="store_true", help="write the figures into docs/figures.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.results:
        record(json.loads(options.results.read_text()))
    elif options.worker:
        work(options)
    else:
        found = supervise(options)
        for name, value, _ in summary(found):
            say(f"{name}: {value:.6g}")
        if options.record:
            record(found)


if __name__ == "__main__":
    main()
