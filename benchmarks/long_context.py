"""One GPU, long contexts: exactness, speed against conventional training, memory, and the largest contexts.

Stages (`--stages a,b,...`), each of which writes its numbers to `--out` as soon as it has them:

    kernels     which attention kernel is chosen for each shape, and its own rate on 16,384 queries over 262,144 keys
    exactness   bfloat16 gradients at 32,768 tokens: ours and conventional's, each against conventional float32
    speed       524,288 prompt tokens, 512 response tokens, G = 8: ours detached and exact; conventional with its default
                attention and with our kernel, `--members` members run and multiplied. Both sides do one scoring pass
    memory      peak GPU memory of an exact update for G = 2, 8, 32
    positions   one exact update at 1,048,576 positions (`--model`), with the capture's share of the kernel's own rate

Conventional: transformers + PEFT, activation checkpointing, members in series, logits only on the response, no KL. Weights are
random but for `exactness` on SmolLM2 where its folder is given (`--smollm2`). Times are wall clock after synchronization.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from longstraw_agents import figures
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import comparison, conventional, kernels
from longstraw_agents.trainer.loss import LossConfig
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.receipt import Receipt
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.trainer.update import Trainer, TrainerConfig
from longstraw_agents.types import Group, StopReason, Task, Trajectory

SMOLLM2 = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, tie_word_embeddings=True, rope_theta=100000.0, max_position_embeddings=2**23,
)  # fmt: skip
HYBRID = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=256, max_position_embeddings=2**23, vocab_size=32768)
CONFIGS: dict[str, Callable[[], tuple[type, Any]]] = {
    "smollm2_135m": lambda: (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMOLLM2)),
    "hybrid_2b": lambda: (
        transformers.Qwen3_5ForCausalLM,
        transformers.Qwen3_5TextConfig(**HYBRID, num_hidden_layers=24, hidden_size=2048, intermediate_size=6144),
    ),
    "tiny": lambda: (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**SMOLLM2 | dict(num_hidden_layers=2, hidden_size=72, intermediate_size=64, head_dim=64)),
    ),
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build(name: str, dtype: torch.dtype, weights: Path | None = None) -> nn.Module:
    """The named shape with LoRA r = 8 on all linear layers (random A and B), on the device, frozen but for the adapters."""
    torch.manual_seed(0)
    kind, config = CONFIGS[name]()
    if weights is not None:
        model = kind.from_pretrained(weights, dtype=dtype).to(DEVICE)
    else:
        with torch.device(DEVICE):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                model = kind(config)
            finally:
                torch.set_default_dtype(before)
    targets = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    with torch.no_grad():
        for n, parameter in model.named_parameters():
            if "lora_B" in n:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device=DEVICE) * 0.02)
    return model.eval()


def make_group(prompt: int, response: int, size: int, vocabulary: int, text: np.ndarray | None = None) -> Group:
    """`size` trajectories of `prompt` shared tokens and `response` own ones, random or cut from `text`; rewards alternate."""
    random = np.random.default_rng(0)
    pick = lambda first, count: random.integers(10, vocabulary, count) if text is None else text[first : first + count]
    shared = pick(0, prompt)
    mask = np.r_[np.zeros(prompt, bool), np.ones(response, bool)]
    members = []
    for index in range(size):
        tokens = np.r_[shared, pick(prompt + index * response, response)].astype(np.int32)
        members.append(
            Trajectory(
                str(index), tokens, mask, np.where(mask, -10.0, np.nan).astype(np.float32),
                np.where(mask, 0, -1).astype(np.int32), (len(tokens),), (0.0,), float(index % 2), StopReason.ANSWERED,
            )  # fmt: skip
        )
    return Group("g", Task("synthetic", 0), tuple(members))


def trainer(model: nn.Module, gradient: str, chunk: int, pack: int, *, score: bool = True) -> Trainer:
    """Ours. `score` keeps a scoring pass (a weight for the sampler mismatch needs one); exact updates keep attention outputs."""
    placement = Placement(outputs=gradient == "exact")
    config = TrainerConfig(
        replay=ReplayConfig(gradient, chunk=chunk, pack=pack, logit_piece=1024, placement=placement),
        loss=LossConfig(mismatch_cap=2.0 if score else None), optimizer=OptimizerConfig(learning_rate=1e-9),
    )  # fmt: skip
    return Trainer(model, config)


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Run `work`; seconds and peak memory (GiB) of the device. A receipt's phases begin the peak anew, so theirs count too."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
    if isinstance(result, Receipt):
        peak = max([peak, *(phase.get("gpu_peak_mib", 0.0) / 1024 for phase in result.phases.values())])
    return result, {"seconds": round(seconds, 3), "peak_gib": round(peak, 4)}


def with_our_kernel() -> str:
    """Register the chosen fast kernel as an ordinary attention function, so that conventional training can use it too."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            kernel = kernels.choose(q, k, v)
            assert kernel is not None
            out, lse = kernel.forward(q, k, v, True, scale)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.kernel, ctx.scale = kernel, scale
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Any:
            q, k, v, out, lse = ctx.saved_tensors
            return *ctx.kernel.backward(dout.contiguous(), q, k, v, out, lse, True, ctx.scale), None

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **kwargs: Any) -> Any:
        return Attention.apply(q, k, v, scaling).transpose(1, 2), None

    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register("benchmark_kernel", attention)
    transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("benchmark_kernel", lambda *a, **k: None)
    return "benchmark_kernel"


def in_float32() -> str:
    """Register an attention for the float32 reference that fits: torch's memory-efficient kernel takes no grouped heads."""

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **kwargs: Any) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        return out.transpose(1, 2), None

    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register("benchmark_float32", attention)
    transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("benchmark_float32", lambda *a, **k: None)
    return "benchmark_float32"


def conventional_member(model: nn.Module, trajectory: Trajectory, attention: str) -> dict[str, Any]:
    """One scoring pass, and one forward and backward with activation checkpointing, of one member."""
    config = model.get_base_model().config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, attention
    positions = conventional.loss_positions(trajectory)
    try:
        with torch.no_grad():
            _, score = timed(lambda: conventional.log_probabilities(model, trajectory.tokens, positions))

        def train() -> None:
            logp = conventional.log_probabilities(model, trajectory.tokens, positions, checkpointing=True)
            (logp.sum() / 1000).backward()

        _, step = timed(train)
    finally:
        config._attn_implementation = before
        model.zero_grad()
    return {"score": score, "train": step, "seconds": score["seconds"] + step["seconds"]}


def stage_kernels(options: argparse.Namespace) -> dict[str, Any]:
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


def timed_once(work: Callable[[], Any]) -> float:
    """Seconds of one call, the device's work included."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def stage_exactness(options: argparse.Namespace) -> dict[str, Any]:
    """Relative error of the whole LoRA gradient against conventional float32, ours and conventional's own, in bfloat16.

    The gradient is that of the mean log-probability of two responses: with real weights, of real text (Python's own help
    texts), because far from its data a model's gradient is mostly rounding in any bfloat16 arithmetic.
    """
    found: dict[str, Any] = {}
    for name in options.exactness_models.split(","):
        weights = options.smollm2 if name == "smollm2_135m" else None
        group = make_group(options.exactness_tokens - 256, 256, 2, CONFIGS[name]()[1].vocab_size, text_ids(weights))
        tree = segment(group.trajectories)
        c = torch.full((len(tree.entry_node),), 1 / len(tree.entry_node), device=DEVICE)

        def theirs(dtype: torch.dtype, name: str = name, weights: Any = weights, group: Group = group) -> dict[str, Tensor]:
            model = build(name, dtype, weights)
            if dtype == torch.float32:
                model.get_base_model().config.get_text_config()._attn_implementation = in_float32()
            mean = lambda logp: logp.mean()
            conventional.backward(model, group.trajectories, mean, in_series=True, checkpointing=True)
            return {n: g.float() for n, g in comparison.gradients(model).items()}

        reference, low = theirs(torch.float32), theirs(torch.bfloat16)
        entry: dict[str, Any] = {"tokens": options.exactness_tokens, "conventional": _difference(low, reference)}
        for gradient in ("exact", "detached"):
            model = build(name, torch.bfloat16, weights)
            Engine(model, ReplayConfig(gradient, chunk=options.chunk, pack=options.pack)).open(tree).backward(c)
            entry[gradient] = _difference({n: g.float() for n, g in comparison.gradients(model).items()}, reference)
            del model
            gc.collect()
        entry["over_conventional"] = entry["exact"]["global"] / entry["conventional"]["global"]
        found[name] = entry
        print(json.dumps({name: entry}), flush=True)
    return found


def text_ids(weights: Path | None) -> np.ndarray | None:
    """Token ids of Python's help texts, which come with it; None without a tokenizer."""
    if weights is None:
        return None
    from pydoc_data import topics

    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    return np.asarray(tokenizer("\n\n".join(topics.topics[key] for key in sorted(topics.topics)))["input_ids"])


def _difference(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Any]:
    d = comparison.compare(ours, reference)
    return {"global": d.global_relative, "cosine": d.cosine, "worst": d.worst, "worst_name": d.worst_name}


def stage_speed(options: argparse.Namespace) -> dict[str, Any]:
    """See the module's head. Times of both sides in one process on one device."""
    name, found = options.model, {}
    model = build(name, torch.bfloat16)
    vocabulary = CONFIGS[name]()[1].vocab_size
    warm = make_group(4096, 512, 2, vocabulary)
    for gradient in ("detached", "exact"):
        trainer(model, gradient, options.chunk, options.pack).update([warm])
    group = make_group(options.prompt, options.response, options.group, vocabulary)
    for gradient in ("detached", "exact"):
        subject = trainer(model, gradient, options.chunk, options.pack)
        receipt, measured = timed(lambda subject=subject: subject.update([group]))
        found[gradient] = measured | {"by_kind": dict(receipt.seconds), "inputs": dict(receipt.inputs)}
        found["kernels"] = receipt.setting["kernels"]
        print(json.dumps({gradient: found[gradient]}), flush=True)
    own = with_our_kernel()
    for label, attention in (("same_kernel", own), ("default", "sdpa")):
        conventional_member(model, warm.trajectories[0], attention)
        runs = [conventional_member(model, t, attention) for t in group.trajectories[: options.members]]
        seconds = float(np.median([run["seconds"] for run in runs])) * options.group
        found[f"conventional_{label}"] = {"members_run": len(runs), "seconds_times_group": seconds, "runs": runs}
        print(json.dumps({label: found[f"conventional_{label}"]}), flush=True)
        for gradient in ("detached", "exact"):
            found[f"speedup_{gradient}_{label}"] = seconds / found[gradient]["seconds"]
    return found


def stage_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory by group size."""
    name, peaks = options.model, {}
    model = build(name, torch.bfloat16)
    for size in (2, 8, 32):
        group = make_group(options.memory_prompt, options.response, size, CONFIGS[name]()[1].vocab_size)
        subject = trainer(model, "exact", options.chunk, 2 * options.response)
        _, measured = timed(lambda subject=subject, group=group: subject.update([group]))
        peaks[size] = measured
    growth = {f"g2_g{size}_percent": 100 * (peaks[size]["peak_gib"] / peaks[2]["peak_gib"] - 1) for size in (8, 32)}
    return {"prompt": options.memory_prompt, "peaks": peaks} | growth


def stage_positions(options: argparse.Namespace) -> dict[str, Any]:
    """One update at `--context` positions, G = 2, and the capture's share of the kernel's own rate."""
    name = options.model
    model = build(name, torch.bfloat16)
    config = CONFIGS[name]()[1]
    trainer(model, options.gradient, options.chunk, options.pack).update([make_group(4096, 512, 2, config.vocab_size)])
    group = make_group(options.context - options.response, options.response, 2, config.vocab_size)
    receipt, measured = timed(lambda: trainer(model, options.gradient, options.chunk, options.pack).update([group]))
    kernel_seconds = attention_seconds(config, options.context - options.response, options.chunk)
    return {
        "model": name, "gradient": options.gradient, "context": options.context, **measured,
        "by_kind": dict(receipt.seconds), "inputs": dict(receipt.inputs), "state_bytes": receipt.state_bytes,
        "kernels": receipt.setting["kernels"], "kernel_alone_seconds": kernel_seconds,
        "capture_fraction_of_kernel_rate": kernel_seconds / receipt.seconds["capture"],
        "gradient_norm": receipt.steps[0].gradient_norm,
    }  # fmt: skip


def attention_seconds(config: Any, length: int, chunk: int) -> float:
    """What the chosen kernel alone takes for a capture of `length` inputs: every 8th chunk is timed, all are summed."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    new = lambda count, length: torch.randn(1, length, count, size, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
    q = new(config.num_attention_heads, chunk)
    k, v = new(config.num_key_value_heads, length), new(config.num_key_value_heads, length)
    kernel = kernels.choose(q, k, v)
    assert kernel is not None and kernel.bottom_right
    stops = list(range(chunk, length + 1, chunk))
    sampled = stops[::8] + stops[-1:]
    seconds = [timed_once(lambda s=s: kernel.forward(q, k[:, :, :s], v[:, :, :s], True, 0.1)) for s in sampled]
    return float(np.interp(stops, sampled, seconds).sum()) * sum(kind == "full_attention" for kind in types)


STAGES = {
    "kernels": stage_kernels, "exactness": stage_exactness, "speed": stage_speed, "memory": stage_memory,
    "positions": stage_positions,
}  # fmt: skip


def record(found: dict[str, Any]) -> None:
    """Write the figures of the stages that ran, here or where the result file comes from."""
    name = found["device"]

    def write(figure: str, value: float, unit: str, trials: int | None = None, extra: dict[str, Any] | None = None) -> None:
        figures.record(figure, value, unit, trials=trials, extra=extra, measured=found["provenance"])

    if "exactness" in found:
        models = {k: v for k, v in found["exactness"].items() if isinstance(v, dict)}
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
    if "positions" in found:
        run = found["positions"]
        figure = f"gpu.positions_{run['gradient']}.{run['model']}"
        write(figure, run["context"], "positions", extra=run | {"device": name})
        if run["context"] == 2**20 and run["model"] == "smollm2_135m":
            fraction = run["capture_fraction_of_kernel_rate"]
            write("gpu.capture_fraction_of_kernel_rate", fraction, "fraction", extra={"device": name})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="kernels,exactness,speed,memory")
    parser.add_argument("--out", type=Path, default=Path("long_context.json"))
    parser.add_argument("--model", default="smollm2_135m", choices=CONFIGS)
    parser.add_argument("--gradient", default="exact", choices=["exact", "detached"])
    parser.add_argument("--chunk", type=int, default=16384)
    parser.add_argument("--pack", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=524288)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--context", type=int, default=1048576)
    parser.add_argument("--memory-prompt", type=int, default=131072)
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
    found["provenance"] = figures.provenance()
    for stage in options.stages.split(","):
        started = time.perf_counter()
        found[stage] = STAGES[stage](options) | {"stage_seconds": round(time.perf_counter() - started, 1)}
        options.out.write_text(json.dumps(found, indent=1, default=str) + "\n")
        print(stage, json.dumps(found[stage], default=str), flush=True)
        gc.collect()
    if options.record:
        record(found)


if __name__ == "__main__":
    main()
