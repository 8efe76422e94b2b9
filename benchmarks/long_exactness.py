"""The stage `exactness` of `long_context.py`: bfloat16 gradients, ours and conventional's, against conventional float32.

The gradient is that of the mean log-probability of two responses. With real weights it is of real text (Python's own help
texts), because far from its data a model's gradient is mostly rounding in any bfloat16 arithmetic; SmolLM2 was trained on
8,192 positions, so all sides read longer texts with its rotary embedding extended by YaRN. The float32 reference is torch's own
arithmetic throughout: its memory-efficient attention and, for the delta rule, transformers' own definition of it, which no
foreign kernel stands in for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.long_runs import clear, say
from benchmarks.long_shapes import DEVICE, SHAPES, build, make_group, text_ids
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import comparison, conventional
from longstraw_agents.trainer.delta_rule import RULE
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.types import Group

Gradient = dict[str, Tensor]

#: SmolLM2's trained range and the rotary embedding for texts beyond it.
TRAINED, ROPE = 8192, dict(rope_type="yarn", rope_theta=100000.0, original_max_position_embeddings=8192)


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


@contextmanager
def defined_rule(model: nn.Module) -> Iterator[None]:
    """Within the block the model's delta rule is transformers' own definition in torch, whatever kernel is installed."""
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    before = {module: getattr(module, RULE) for module in modules if hasattr(module, RULE)}
    for module, rule in before.items():
        while hasattr(rule, "__wrapped__"):
            rule = rule.__wrapped__
        setattr(module, RULE, rule)
    try:
        yield
    finally:
        for module, rule in before.items():
            setattr(module, RULE, rule)


class _Case:
    """One model and its data: gradients of it in any type, by either side."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.weights: Path | None = options.smollm2 if name == "smollm2_135m" else None
        tokens, response = options.exactness_tokens, min(256, options.exactness_tokens // 8)
        factor = tokens / TRAINED
        self.rope = ROPE | {"factor": factor} if self.weights is not None and factor > 1 else None
        vocabulary = SHAPES[name].make(options.scale).vocab_size
        self.group: Group = make_group(tokens - response, response, 2, vocabulary, text_ids(self.weights))

    def _build(self, dtype: torch.dtype) -> nn.Module:
        return build(self.name, dtype, self.options.scale, self.weights, self.rope)

    def conventional(self, dtype: torch.dtype) -> tuple[Gradient, float]:
        """The gradient and the mean log-probability of transformers and autograd."""
        model = self._build(dtype)
        wide = dtype == torch.float32
        if wide:
            model.get_base_model().config.get_text_config()._attn_implementation = in_float32()
        mean = lambda logp: logp.mean()
        with defined_rule(model) if wide else _as_it_is():
            value, _ = conventional.backward(model, self.group.trajectories, mean, in_series=True, checkpointing=True)
        return _gradient(model), float(value)

    def ours(self, gradient: str) -> Gradient:
        """The gradient of our engine in bfloat16."""
        model = self._build(torch.bfloat16)
        tree = segment(self.group.trajectories)
        c = torch.full((len(tree.entry_node),), 1 / len(tree.entry_node), device=DEVICE)
        Engine(model, ReplayConfig(gradient, chunk=self.options.chunk, pack=self.options.pack)).open(tree).backward(c)
        return _gradient(model)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def _gradient(model: nn.Module) -> Gradient:
    return {n: g.float().cpu() for n, g in comparison.gradients(model).items()}


def stage_exactness(options: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Relative error of the whole LoRA gradient against conventional float32, ours and conventional's own, in bfloat16."""
    found: dict[str, Any] = {}
    for name in options.exactness_models.split(","):
        case = _Case(name, options)
        entry: dict[str, Any] = {
            "tokens": options.exactness_tokens, "weights": "random" if case.weights is None else "real", "rope": case.rope,
            "reference": "conventional float32 (TF32 off), torch's attention and delta rule",
        }  # fmt: skip
        found[name] = entry
        say(f"{name}: conventional float32")
        reference, entry["mean_logp_float32"] = case.conventional(torch.float32)
        clear()
        say(f"{name}: conventional bfloat16")
        low, entry["mean_logp_bfloat16"] = case.conventional(torch.bfloat16)
        entry["conventional"] = _difference(low, reference)
        for gradient in ("exact", "detached"):
            clear()
            say(f"{name}: ours, {gradient}")
            entry[gradient] = _difference(case.ours(gradient), reference)
            save(found)
        entry["over_conventional"] = entry["exact"]["global"] / entry["conventional"]["global"]
        say(f"{name}: {entry}")
        save(found)
    return found


def _difference(ours: Gradient, reference: Gradient) -> dict[str, Any]:
    d = comparison.compare(ours, reference)
    classes = {label: round(part.relative_error, 6) for label, part in d.classes.items()}
    found = {"global": d.global_relative, "cosine": d.cosine, "worst": d.worst, "worst_name": d.worst_name}
    return found | {"classes": classes}
