"""What refreshing states costs, and what is left of an approximate refresh.

    python benchmarks/recapture.py exact --record       frontier against full bit for bit, stale reads, every architecture
    python benchmarks/recapture.py cost --record        full, frontier at 25, 50 and 75 % of the depth, bounded
    python benchmarks/recapture.py extension --record   one per cent more tokens, against a stock cache and the same kernel
    python benchmarks/recapture.py drift --record       a prefix over many steps with real gradients
    python benchmarks/recapture.py plot                 docs/design/recapture.svg, from what `drift` recorded last

The model is SmolLM2-135M, or with `--random` its shape with random weights, in the given type. A CPU is timed in its own
seconds of work, because other work on it should not count; a GPU by the clock. On a GPU:

    PYTHONPATH=. python benchmarks/recapture.py drift --device cuda --tokens 16384 --chunk 2048 --steps 200 --every 20 \
        --exact-gradient --learning-rate 1e-5 --record

Layers below the frontier are frozen. Above it adapters train (LoRA, rank 8, all linear layers), or where PEFT is not installed,
or with `--whole`, all weights: then digesting them shows in the cost.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longstraw_agents import figures
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import attention
from longstraw_agents.trainer.approximate import ApproximateReplay, ApproximateState
from longstraw_agents.trainer.architectures import make_state
from longstraw_agents.trainer.attention import Spec, Visibility, merge, part_forward
from longstraw_agents.trainer.bounded import measure
from longstraw_agents.trainer.kernels import choose
from longstraw_agents.trainer.recapture import Prefix, Recapture
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.trainer.shelf import ShelfConfig
from longstraw_agents.trainer.state import Run, StateCache
from longstraw_agents.types import StopReason, Trajectory

ROOT = Path(__file__).resolve().parents[1]
Arguments = argparse.Namespace


def build(arguments: Arguments) -> tuple[Any, np.ndarray]:
    """The model, and a long stretch of token ids: this repository's own prose and code, or random ids for random weights."""
    dtype = getattr(torch, arguments.dtype)
    if arguments.random:
        shape = LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=2**21,
        )  # fmt: skip
        torch.manual_seed(0)
        model = LlamaForCausalLM(shape).to(dtype)
        ids = np.random.default_rng(0).integers(3, 49152, arguments.tokens + 4096)
    else:
        folder = arguments.model
        if folder is None:
            from longstraw_agents.trainer.models import smollm2_folder  # needs PEFT

            folder = smollm2_folder()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        files = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*.py")])
        text = "\n".join(path.read_text() for path in files)[: 8 * (arguments.tokens + 4096)]
        ids = np.asarray(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    if importlib.util.find_spec("peft") and not arguments.whole:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=1e-3)  # zeros would leave A without a gradient
    return model.to(arguments.device).eval(), ids.astype(np.int32)


def train_from(model: Any, layer: int) -> list[torch.nn.Parameter]:
    """Train the adapters of the layers from `layer` on, or without PEFT their weights; the trained parameters."""
    decoder = model.get_base_model().get_decoder() if hasattr(model, "peft_config") else model.get_decoder()
    wanted = [p for module in decoder.layers[layer:] for name, p in module.named_parameters()
              if "lora_" in name or not hasattr(model, "peft_config")]  # fmt: skip
    model.requires_grad_(False)
    for parameter in wanted:
        parameter.requires_grad_(True)
    return wanted


def timed(device: str, work: Callable[[], object]) -> float:
    """Seconds that `work` took: of this process's work on a CPU, by the clock on a GPU."""
    if device == "cpu":
        started = time.process_time()
        work()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def capture(engine: Engine, tokens: np.ndarray, chunk: int) -> StateCache:
    """The whole prefix under the current weights, keeping nothing: what a refresh is compared with. As in any capture of inputs
    without loss, each run ends when the last layer's state is written."""
    state = make_state(engine.base, len(tokens))
    with engine.attached(), torch.no_grad():
        for start in range(0, len(tokens), chunk):
            part = tokens[None, start : start + chunk]
            engine.decode(part, Run(start, part.shape[1], 1, writes=True, gradient=False, hidden=False), state)
            state.collect()
    return state


def nudge(parameters: list[torch.nn.Parameter]) -> None:
    """Change the trained weights a little, so that what depends on them is stale."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.001)


def keep(arguments: Arguments) -> ShelfConfig:
    """Where states are kept between steps."""
    return ShelfConfig(device_bytes=0 if arguments.device == "cpu" else 2**36, host_bytes=2**34)


def exact(arguments: Arguments) -> None:
    """The tests' own comparison for every architecture, in numbers; and every public way to read a stale state."""
    from longstraw_agents.trainer.lifting import lifted
    from tests import models as zoo
    from tests import test_recapture as trial
    from tests.test_frontier import KNOWN, freeze_below
    from tests.test_stale_states import attempts

    for name in KNOWN:
        model, worst, ran = zoo.build(name, dtype=torch.float64), 0.0, []
        layers = len(model.get_decoder().layers)
        for layer in (1, layers // 2, layers):
            freeze_below(model, layer)
            engine = Engine(model, trial.CONFIG)
            recapture = Recapture.of(engine, ShelfConfig())
            with lifted():
                trial.run(engine, trial.group(), recapture)
                trial.step(model)
                recapture.report()
                (ours, state), (full, other) = (trial.run(engine, trial.group(), kept) for kept in (recapture, None))
            ran.append(recapture.report()["whole"])
            worst = max([worst, *(float((ours[key] - value).abs().max()) for key, value in full.items())])
            for index in range(layers):
                pairs = zip(*(s.export(index, 96, trial.ROOT - 1).values() for s in (state, other)), strict=True)
                worst = max([worst, *(float((a.double() - b.double()).abs().max()) for a, b in pairs)])
        print(f"{name}: largest difference {worst}; tokens run whole by frontier {ran}")
        if arguments.record:
            figures.record(f"recapture.frontier_difference.{name}", worst, trials=3, extra={"layers": layers})
    with tempfile.TemporaryDirectory() as folder:
        found = list(attempts(Path(folder)))
    served = sum(stale for *_, stale in found)
    print(f"stale reads served: {served} of {len(found)}")
    if arguments.record:
        figures.record("recapture.stale_reads_served", served, trials=len(found))


def cost(arguments: Arguments) -> None:
    """Seconds and tokens times layers of one refresh after one step, by how it is done."""
    model, ids = build(arguments)
    tokens, layers = ids[: arguments.tokens], model.config.num_hidden_layers
    rows: dict[str, dict[str, float]] = {}
    ratios = {}
    for share in (0.25, 0.5, 0.75):
        frontier = round(share * layers)
        seconds, run = refreshes(arguments, model, tokens, frontier)
        ratios[frontier] = seconds["frontier"] / seconds["full"] / ((layers - frontier) / layers)
        for name, value in seconds.items():
            rows[f"{name}, frontier {frontier}"] = {"seconds": round(value, 4), "token_layers": run[name]}
            print(f"frontier {frontier} of {layers}: {name:9} {value:8.3f} s  {run[name]:>12,} tokens x layers")
        print(f"frontier {frontier}: {ratios[frontier]:.3f} of the ideal cost", flush=True)
    if arguments.record:
        extra = {"rows": rows, "by_frontier": {str(k): round(v, 4) for k, v in ratios.items()}, "tokens": len(tokens)}
        figures.record("recapture.frontier_cost_over_ideal", max(ratios.values()), trials=arguments.repeats, extra=extra)


def refreshes(
    arguments: Arguments, model: Any, tokens: np.ndarray, frontier: int
) -> tuple[dict[str, float], dict[str, int]]:
    """Median seconds, and tokens times layers, of a full capture, a frontier refresh and a bounded one, taken in turn."""
    trained, chunk = train_from(model, frontier), arguments.chunk
    engine = Engine(model, ReplayConfig(chunk=chunk))
    recapture = Recapture.of(engine, keep(arguments))
    prefix = Prefix(recapture, len(tokens))
    list(prefix.refresh(tokens, chunk))
    approximate = ApproximateState.of(engine, tokens, prefix.state)
    nudge(trained)
    approximate.refresh(arguments.share)  # the first time it stores the frontier's input
    seconds: dict[str, list[float]] = {"full": [], "frontier": [], "bounded": []}
    for _ in range(arguments.repeats):
        nudge(trained)
        before = approximate.tokens_run
        seconds["full"].append(timed(arguments.device, lambda: capture(engine, tokens, chunk)))
        seconds["frontier"].append(timed(arguments.device, lambda: list(recapture.refresh(tokens, chunk))))
        seconds["bounded"].append(timed(arguments.device, lambda: approximate.refresh(arguments.share)))
    layers = model.config.num_hidden_layers
    run = {"full": len(tokens) * layers, "frontier": len(tokens) * (layers - frontier)}
    run["bounded"] = approximate.tokens_run - before
    return {name: statistics.median(values) for name, values in seconds.items()}, run


def stock_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float = 1.0, **_: Any) -> tuple[Any, None]:
    """Our kernels on keys and values that a stock cache has joined: those of the chunk are the last ones."""
    here = key.shape[2] - query.shape[2]
    spec = Spec(scaling, None, None, choose(query, key, value))
    own = Visibility(here, here, True, None)
    out, lse = part_forward(query, key[:, :, here:], value[:, :, here:], own, spec)
    if here:
        see = Visibility(here, 0, False, None)
        parts = part_forward(query, key[:, :, :here], value[:, :, :here], see, spec)
        out, lse = merge(out.to(torch.promote_types(out.dtype, torch.float32)), lse, *parts)
    return out.to(query.dtype).transpose(1, 2), None


def extension(arguments: Arguments) -> None:
    """A prefix that grew by one per cent: only the new tokens run."""
    model, ids = build(arguments)
    tokens = arguments.tokens
    ids = np.resize(ids, tokens + tokens // 100 * (arguments.repeats + 1))
    train_from(model, round(0.75 * model.config.num_hidden_layers))
    engine = Engine(model, ReplayConfig(chunk=arguments.chunk))
    recapture = Recapture.of(engine, keep(arguments))
    prefix = Prefix(recapture, len(ids))
    list(prefix.refresh(ids[:tokens], arguments.chunk))
    ALL_ATTENTION_FUNCTIONS.register("stock", stock_attention)
    attention.ALL_MASK_ATTENTION_FUNCTIONS.register("stock", lambda *args, **kwargs: None)
    cache = DynamicCache(config=model.config)
    for layer in range(len(prefix.state.layers)):
        held = prefix.state.export(layer, 0, tokens)
        cache.update(held["keys"].clone(), held["values"].clone(), layer)
    ours, stock, size = [], [], tokens // 100
    engine.base.config._attn_implementation = "stock"
    for number in range(arguments.repeats + 1):
        stop = tokens + size * (number + 1)
        new = torch.as_tensor(ids[None, stop - size : stop].astype(np.int64), device=arguments.device)

        def plain(new: torch.Tensor = new) -> None:
            with torch.no_grad():
                engine.decoder(input_ids=new, past_key_values=cache, use_cache=True)

        stock.append(timed(arguments.device, plain))
        ours.append(timed(arguments.device, lambda stop=stop: list(prefix.refresh(ids[:stop], arguments.chunk))))
    report = recapture.report()
    assert report["extended"] == size * (arguments.repeats + 1), report
    ratio = statistics.median(ours[1:]) / statistics.median(stock[1:])
    print(f"{size} tokens after {tokens}: ours {statistics.median(ours[1:]):.4f} s, stock {statistics.median(stock[1:]):.4f} s")
    print(f"ratio {ratio:.3f}")
    if arguments.record:
        figures.record("recapture.extension_cost_over_ideal", ratio, trials=arguments.repeats, extra={"tokens": tokens})


def branches(ids: np.ndarray, root: int, members: int = 4, length: int = 32) -> list[Trajectory]:
    """Members that go on from `root` tokens of text with other stretches of it, each `length` tokens under loss."""
    found = []
    for member in range(members):
        first = root + 100 + member * 200
        path = np.r_[ids[:root], ids[first : first + length]].astype(np.int32)
        mask = np.arange(len(path)) >= root
        behaviour = np.where(mask, -1.0, np.nan).astype(np.float32)
        version = np.where(mask, 0, -1).astype(np.int32)
        found.append(Trajectory(str(member), path, mask, behaviour, version, (len(path),), (0.0,), 1.0, StopReason.ANSWERED))
    return found


def drift(arguments: Arguments) -> None:
    """Many steps on one prefix: the frontier's states against full ones, and approximate ones against them."""
    model, ids = build(arguments)
    frontier = round(arguments.frontier * model.config.num_hidden_layers)
    optimizer = torch.optim.AdamW(train_from(model, frontier), lr=arguments.learning_rate, weight_decay=0.0)
    gradient = "exact" if arguments.exact_gradient else "detached"
    engine = Engine(model, ReplayConfig(gradient, chunk=arguments.chunk))
    recapture = Recapture.of(engine, keep(arguments))
    tree = segment(branches(ids, arguments.tokens))
    tokens = tree.nodes[0].tokens[:-1]
    # Advantages of a group of four with rewards 1, 0, 1, 0: what a step of GRPO weighs its tokens by.
    signs = torch.where(torch.as_tensor(tree.entry_trajectory) % 2 == 0, 1.0, -1.0)
    c = (-signs / len(signs)).to(arguments.device)
    states = {name: ApproximateState.of(engine, tokens) for name in ("drift", "random", "stale")}
    curve: list[dict[str, Any]] = []
    different = 0
    for number in range(1, arguments.steps + 1):
        engine.open(tree, recapture).backward(c)
        optimizer.step()
        optimizer.zero_grad()
        for name in ("drift", "random"):
            states[name].refresh(arguments.share, name, seed=number)
        if number % arguments.every and number != arguments.steps:
            continue
        row: dict[str, Any] = {"step": number}
        for name, state in states.items():
            found = measure(engine.open(tree, recapture), ApproximateReplay(engine, tree, state), c)
            row[name] = {"kl": found.kl, "cosine": found.cosine}
        different += count_differences(engine, recapture, tokens, arguments.chunk)
        curve.append(row)
        print(json.dumps(row), f"values that differ from full: {different}", flush=True)
    report(arguments, curve, different, gradient, frontier)


def count_differences(engine: Engine, recapture: Recapture, tokens: np.ndarray, chunk: int) -> int:
    """Values of the kept states that are not, bit for bit, those of a full capture."""
    prefix, different = Prefix(recapture, len(tokens)), 0
    list(prefix.refresh(tokens, chunk))
    full = capture(engine, tokens, chunk)
    for layer in range(len(full.layers)):
        for start in range(0, len(tokens), chunk):
            stop = min(len(tokens), start + chunk)
            pairs = zip(*(state.export(layer, start, stop).values() for state in (prefix.state, full)), strict=True)
            different += sum(int((a != b).sum()) for a, b in pairs)
    return different


def report(arguments: Arguments, curve: list[dict[str, Any]], different: int, gradient: str, frontier: int) -> None:
    """Print what was found, and record it where asked."""
    mean = {name: statistics.fmean(row[name]["kl"] for row in curve) for name in ("drift", "random", "stale")}
    cosine = min(row["drift"]["cosine"] for row in curve)
    over = mean["random"] / max(mean["drift"], 1e-30)
    print(f"mean KL: {mean}; least cosine {cosine:.6f}; random leaves {over:.3f} times the KL of the choice by drift")
    print(f"values of frontier states that differ from full ones: {different}")
    if arguments.record:
        extra = {
            "steps": arguments.steps, "tokens": arguments.tokens, "share": arguments.share, "gradient": gradient,
            "frontier": frontier, "device": arguments.device, "dtype": arguments.dtype, "random_weights": arguments.random,
            "learning_rate": arguments.learning_rate, "frontier_values_that_differ": different, "curve": curve,
        }  # fmt: skip
        figures.record("recapture.bounded_kl", mean["drift"], "nats", trials=len(curve), extra=extra)
        figures.record("recapture.bounded_cosine", cosine, trials=len(curve))
        figures.record("recapture.bounded_over_random", over, trials=len(curve), extra={"mean_kl": mean})


def plot(arguments: Arguments) -> None:
    """KL and cosine against steps."""
    import matplotlib.pyplot as plt

    entry = next(entry for entry in figures.read() if entry["figure"] == "recapture.bounded_kl")
    curve, path = entry["extra"]["curve"], ROOT / "docs" / "design" / "recapture.svg"
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2))
    labels = {"drift": "refreshed by drift", "random": "refreshed at random", "stale": "never refreshed"}
    for panel, quantity in zip(panels, ("kl", "cosine"), strict=True):
        for name, label in labels.items():
            values = [row[name][quantity] if quantity == "kl" else 1 - row[name][quantity] for row in curve]
            panel.plot([row["step"] for row in curve], values, marker=".", label=label)
        panel.set_xlabel("steps")
        panel.set_ylabel("KL to fresh, nats per token" if quantity == "kl" else "1 - cosine of the gradient")
        panel.set_yscale("log")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("exact", "cost", "extension", "drift", "plot"))
    parser.add_argument("--record", action="store_true", help="write what was found into docs/figures.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--random", action="store_true", help="SmolLM2's shape with random weights")
    parser.add_argument("--whole", action="store_true", help="train whole layers, not adapters")
    parser.add_argument("--model", help="a folder with SmolLM2, where its package is not installed")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between measurements")
    parser.add_argument("--share", type=float, default=0.2, help="tokens that `bounded` refreshes at each step")
    parser.add_argument("--frontier", type=float, default=0.75, help="part of the depth that is frozen in `drift`")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--exact-gradient", action="store_true", help="reverse through the prefix too, not only the branches")
    arguments = parser.parse_args()
    parts = {"exact": exact, "cost": cost, "extension": extension, "drift": drift, "plot": plot}
    parts[arguments.part](arguments)


if __name__ == "__main__":
    main()
