"""Which layers a model has, and the state that each of them keeps.

Idea: exactness is a claim about a layer's mathematics, so a layer type that is not listed here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer.context import Context, SharedAttentionState
from longstraw_agents.trainer.heads import SharedRecurrentState
from longstraw_agents.trainer.state import AttentionState, LayerState, RecurrentState, StateCache

#: Layer type, as a configuration's `layer_types` names it -> the state of one layer, made for a number of positions.
LAYER_STATES: dict[str, Callable[[int], LayerState]] = {
    "full_attention": AttentionState,
    "sliding_attention": AttentionState,
    "linear_attention": lambda capacity: RecurrentState(),
}

#: Model types (configuration's `model_type`) whose layers are what their `layer_types` say.
MODEL_TYPES = {
    "llama", "qwen3", "mistral", "gemma2", "gemma3_text", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
}  # fmt: skip

#: The same where a run's tokens are shared out over processes.
SHARED_STATES: dict[str, Callable[[int, Context], LayerState]] = {
    "full_attention": SharedAttentionState,
    "sliding_attention": SharedAttentionState,
    "linear_attention": lambda capacity, context: SharedRecurrentState(context),
}


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model, or the model itself."""
    get = getattr(model, "get_base_model", None)
    return get() if get is not None else model  # type: ignore[no-any-return]


def make_state(model: nn.Module, capacity: int, context: Context | None = None) -> StateCache:
    """Fresh states for `capacity` positions of the unwrapped model; raises ModelError, naming what is not known.

    context: where several processes share a run, how; `capacity` is then this process's share.
    """
    config = model.config.get_text_config()
    if config.model_type not in MODEL_TYPES:
        raise ModelError(
            f"model type {config.model_type!r} is not known to replay exactly; known: {', '.join(sorted(MODEL_TYPES))}. "
            "`longstraw verify` is how a new one is proved"
        )
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    unknown = sorted(set(types) - set(LAYER_STATES))
    if unknown:
        raise ModelError(f"{config.model_type} has layers of type {', '.join(unknown)}, whose state is not known")
    if context is None or context.size == 1:
        cache = StateCache([LAYER_STATES[kind](capacity) for kind in types])
    else:
        unshared = sorted(set(types) - set(SHARED_STATES))
        if unshared:
            raise ModelError(f"layers of type {', '.join(unshared)} can't be shared out over processes; set cp and ep to 1")
        cache = StateCache([SHARED_STATES[kind](capacity, context) for kind in types])
    for state, layer in zip(cache.layers, model.get_decoder().layers, strict=True):  # type: ignore[operator,union-attr]
        state.device = next(layer.parameters()).device
    return cache
