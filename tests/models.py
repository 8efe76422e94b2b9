"""The zoo: tiny models of the real transformers classes, with random weights, on which exactness is tested.

Nothing in it is vacuous. The sliding window is 24, the index keeps 24 keys, a delta chunk is 64 tokens and `length` is what a
path must exceed for all three to matter; routers pick 2 of 8 experts; keys and values are shared by two heads each; there are
several layers of each kind; Gemma's embeddings are its head; the recurrent decay remembers tens of tokens; norms, biases and
LoRA's B are random, because a gradient through a zero or a one hides mistakes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

VOCABULARY = 61
WINDOW = 24  # sliding window, and the index's top-k: at most a quarter of the paths that are tested
LAYERS = 4

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=1024,
    initializer_range=0.25,
    attention_dropout=0.0,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    tie_word_embeddings=False,
)
_EXPERTS: dict[str, Any] = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True, decoder_sparse_step=1
)
_DELTA: dict[str, Any] = dict(
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    num_hidden_layers=5,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
_MROPE: dict[str, Any] = dict(
    rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5, mrope_section=[1, 1, 0], mrope_interleaved=True
    )
)
_SHARED_EXPERT: dict[str, Any] = dict(shared_expert_intermediate_size=16)
_LATENT: dict[str, Any] = dict(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=16,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
)
_INDEX: dict[str, Any] = dict(index_topk=WINDOW, index_n_heads=16, index_head_dim=16)


def _configs() -> dict[str, Callable[[], tuple[str, Any]]]:
    def entry(kind: str, config: str, *parts: Mapping[str, Any], **changes: Any) -> Callable[[], tuple[str, Any]]:
        def make() -> tuple[str, Any]:
            settings = dict(_COMMON)
            for part in parts:
                settings.update(part)
            settings.update(changes)
            return kind, getattr(transformers, config)(**copy.deepcopy(settings))  # a test may change what it was given

        return make

    mixed = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return {
        "llama": entry("LlamaForCausalLM", "LlamaConfig"),
        "qwen3": entry("Qwen3ForCausalLM", "Qwen3Config"),
        "mistral": entry("MistralForCausalLM", "MistralConfig", sliding_window=WINDOW),
        "gemma3": entry(
            "Gemma3ForCausalLM", "Gemma3TextConfig", sliding_window=WINDOW, layer_types=mixed, query_pre_attn_scalar=8,
            final_logit_softcapping=20.0, tie_word_embeddings=True,
        ),
        "gemma2": entry(
            "Gemma2ForCausalLM", "Gemma2Config", sliding_window=WINDOW, layer_types=mixed, query_pre_attn_scalar=8,
            final_logit_softcapping=20.0, attn_logit_softcapping=3.0, tie_word_embeddings=True,
        ),
        "qwen3_moe": entry("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _EXPERTS),
        "qwen3_next": entry("Qwen3NextForCausalLM", "Qwen3NextConfig", _EXPERTS, _SHARED_EXPERT, _DELTA),
        "qwen3_5": entry("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _DELTA, _MROPE),
        "qwen3_5_moe": entry("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", _EXPERTS, _SHARED_EXPERT, _DELTA, _MROPE),
        "deepseek_v3": entry("DeepseekV3ForCausalLM", "DeepseekV3Config", _LATENT),
        "deepseek_v32": entry("DeepseekV32ForCausalLM", "DeepseekV32Config", _LATENT, _INDEX),
        "glm_moe_dsa": entry(
            "GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", _LATENT, _INDEX, n_group=1,
            indexer_types=["full", "shared", "full", "shared"],
        ),
    }  # fmt: skip


CONFIGS = _configs()
NAMES: tuple[str, ...] = tuple(CONFIGS)
RECURRENT: tuple[str, ...] = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
SPARSE: tuple[str, ...] = ("deepseek_v32", "glm_moe_dsa")


def build(
    name: str, *, training: str = "full", dtype: torch.dtype = torch.float32, seed: int = 0, smooth: bool = False
) -> nn.Module:
    """One model of the zoo. `training`: "full" (every parameter but an indexer's), or "lora" (adapters with random A and B on
    all linear layers but an indexer's, and on the experts). The weights depend on `seed` alone, not on `dtype`.

    smooth: with smaller weights, as a trained model's are, so that a 16-bit type's rounding is not amplified from layer to layer
    until nothing else is left (the zoo's own bfloat16 gradients are tens of percent off)."""
    kind, config = CONFIGS[name]()
    if smooth:
        config.initializer_range = 0.1
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, kind)(config)
        _randomize(model)
        if training == "lora":
            model = _adapt(model, std=0.1 if smooth else 0.3)
    for parameter_name, parameter in model.named_parameters():
        if "indexer" in parameter_name:
            parameter.requires_grad_(False)
    return model.to(dtype).eval()


def _randomize(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        with torch.no_grad():
            if leaf == "A_log":  # decay per token between about 0.99 and 0.9
                parameter.uniform_(0.01, 0.1).log_()
            elif leaf == "dt_bias" or parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)


def linear_names(model: nn.Module) -> list[str]:
    """Full names of all linear layers that may carry an adapter: all but the head and an indexer's."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "indexer" not in name and name != "lm_head"
    ]


def _adapt(model: nn.Module, std: float) -> nn.Module:
    experts = [
        name for name, _ in model.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    config = LoraConfig(
        r=2, lora_alpha=4, lora_dropout=0.0, target_modules=linear_names(model), target_parameters=experts or None
    )
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=std)
    return adapted
