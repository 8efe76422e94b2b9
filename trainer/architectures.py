"""Which layers a model has, the state that each of them keeps, and what must be so before anything runs.

Idea: exactness is a claim about a layer's mathematics, so what is not listed here is refused by name. A model is used as it is:
its attention goes through transformers' registry and our cache; only indexers and routers, whose decisions must be kept, have
their forward replaced while a tree is worked on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer.attention import ACTIVE
from longstraw_agents.trainer.candidates import SharedSparseState
from longstraw_agents.trainer.context import Context, SharedAttentionState, SharedLatentState
from longstraw_agents.trainer.delta_rule import RULE, SINGLE_RULE
from longstraw_agents.trainer.heads import SharedRecurrentState
from longstraw_agents.trainer.latent import LatentState
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.routing import RoutingState, routers, routing
from longstraw_agents.trainer.sparse import SparseState, indexers, noting, selecting, sparse_layers
from longstraw_agents.trainer.state import AttentionState, LayerState, RecurrentState, StateCache

#: Layer type, as a configuration's `layer_types` names it -> the state of one layer, made for a number of positions.
LAYER_STATES: dict[str, Callable[[int], LayerState]] = {
    "full_attention": AttentionState,
    "sliding_attention": AttentionState,
    "linear_attention": lambda capacity: RecurrentState(),
    "latent_attention": LatentState,  # our name: its configurations give no layer types
    "indexed_attention": SparseState,
    "deepseek_sparse_attention": SparseState,  # its name before transformers 5.24
}

#: Model types (configuration's `model_type`) that are exact, verified by benchmarks/exactness.py -> the type of layers whose
#: configuration gives none.
MODEL_TYPES: dict[str, str] = {
    "llama": "full_attention",
    "qwen3": "full_attention",
    "mistral": "full_attention",
    "gemma2": "full_attention",
    "gemma3_text": "full_attention",
    "qwen3_moe": "full_attention",
    "qwen3_next": "full_attention",
    "qwen3_5_text": "full_attention",
    "qwen3_5_moe_text": "full_attention",
    "deepseek_v3": "latent_attention",
    "deepseek_v32": "indexed_attention",
    "glm_moe_dsa": "indexed_attention",
}

#: The same where a run's tokens are shared out over processes.
SHARED_STATES: dict[str, Callable[[int, Context], LayerState]] = {
    "full_attention": SharedAttentionState,
    "sliding_attention": SharedAttentionState,
    "linear_attention": lambda capacity, context: SharedRecurrentState(context),
    "latent_attention": SharedLatentState,
    "indexed_attention": SharedSparseState,
    "deepseek_sparse_attention": SharedSparseState,
}


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model, or the model itself."""
    get = getattr(model, "get_base_model", None)
    return get() if get is not None else model  # type: ignore[no-any-return]


def accept(model: Any) -> None:
    """Let this process try the unwrapped model's type though it is not on the list. `longstraw verify` must prove it."""
    config = model.config.get_text_config()
    latent = getattr(config, "kv_lora_rank", None) is not None
    MODEL_TYPES.setdefault(config.model_type, "latent_attention" if latent else "full_attention")


def layer_types(model: Any) -> list[str]:
    """The type of each layer of the unwrapped model; raises ModelError, naming what is not known."""
    config = model.config.get_text_config()
    if config.model_type not in MODEL_TYPES:
        raise ModelError(
            f"model type {config.model_type!r} is not known to replay exactly; known: {', '.join(sorted(MODEL_TYPES))}. "
            "`longstraw verify --unproven` is how a new one is proved"
        )
    types = getattr(config, "layer_types", None) or [MODEL_TYPES[config.model_type]] * config.num_hidden_layers
    unknown = sorted(set(types) - set(LAYER_STATES))
    if unknown:
        raise ModelError(f"{config.model_type} has layers of type {', '.join(unknown)}, whose state is not known")
    return list(types)


def make_state(
    model: Any, capacity: int, context: Context | None = None, placement: Placement | None = None
) -> StateCache:
    """Fresh states for `capacity` positions of the unwrapped model; raises ModelError, naming what is not known.

    context: where several processes share a run, how; `capacity` is then this process's share.
    """
    types = layer_types(model)
    if context is None or context.size == 1:
        cache = StateCache([LAYER_STATES[kind](capacity) for kind in types])
    else:
        cache = StateCache([SHARED_STATES[kind](capacity, context) for kind in types])
    for state, layer in zip(cache.layers, model.get_decoder().layers, strict=True):
        places = {parameter.device for parameter in layer.parameters()}
        # What lies in host memory beside others on a GPU is copied there to be computed with (`offload`).
        state.device = next((place for place in places if place.type != "cpu"), torch.device("cpu"))
        if placement is not None:
            state.put(placement)
    for index, _ in routers(model):
        cache.layers[index].routing = RoutingState()
    return cache


def require_supported(model: Any) -> None:
    """Raise ModelError, naming the cause, unless the unwrapped model can be replayed exactly."""
    layer_types(model)
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            "output_router_logits is on: a load-balancing loss couples all tokens of a batch and can't be split by chunk; "
            "set config.output_router_logits = False"
        )
    if len({getattr(config, name, 0) or 0 for name in ("num_experts", "n_routed_experts", "num_local_experts")} - {0}):
        if next(routers(model), None) is None:
            raise ModelError(f"{type(model).__name__} has experts but no router that is known here; routing can't be recorded")
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "residual_dropout"):
        if getattr(config, name, 0):
            raise ModelError(f"{name} is {getattr(config, name)}: a recomputed chunk would drop other values; set it to 0")
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelError(f"{name} drops with p = {module.p}: a recomputed chunk would drop other values; set it to 0")
        if ".indexer." in f".{name}." and hasattr(module, "lora_A"):
            raise ModelError(
                f"{name} has an adapter, but an indexer runs without autograd and would never train; "
                "leave it out of target_modules (exclude_modules)"
            )


@contextmanager
def attached(model: nn.Module) -> Iterator[None]:
    """Within the block, the unwrapped model's indexers and routers keep their decisions in the run's state (`ACTIVE`).

    Recurrent layers run one token by the rule for many: the fast kernel for a single token has no backward pass.
    """
    replaced: list[tuple[nn.Module, str, Any]] = []
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    singles = {module: getattr(module, SINGLE_RULE) for module in modules if hasattr(module, SINGLE_RULE)}

    def replace(module: nn.Module, function: Callable[..., Any], name: str = "forward") -> None:
        replaced.append((module, name, module.__dict__.get(name)))
        setattr(module, name, function)

    def active() -> StateCache:
        cache = ACTIVE.get()
        if not isinstance(cache, StateCache):
            raise ModelError("the model was called outside of a capture or replay while it was attached to one")
        return cache

    def layer_state(layer: int) -> Any:
        return active().layers[layer]

    def router_state(layer: int) -> Callable[[], Any]:
        return lambda: (active().layers[layer].routing, active().layers[layer].run)

    try:
        for code in singles:
            setattr(code, SINGLE_RULE, getattr(code, RULE))
        for indexer in indexers(model):
            replace(indexer, selecting(indexer, layer_state))
        for attention in sparse_layers(model):
            replace(attention, noting(attention, layer_state), "expand_kv")
        for layer, router in routers(model):
            replace(router, routing(router, router_state(layer)))
        yield
    finally:
        for code, single in singles.items():
            setattr(code, SINGLE_RULE, single)
        for module, name, before in replaced:
            delattr(module, name)
            if before is not None:
                setattr(module, name, before)
