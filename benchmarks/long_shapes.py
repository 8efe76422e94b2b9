"""Shapes, models and groups of `long_context.py`: random weights in published widths, or a tiny size of the same kind.

Models are made where they are to run, in their own type: 27 billion parameters take 54 GB of the GPU and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from longstraw_agents.trainer.pages import Placement
from longstraw_agents.types import Group, StopReason, Task, Trajectory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LONGEST = dict(max_position_embeddings=2**23)
TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
TINY_DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)


@dataclass(frozen=True)
class Shape:
    """A transformers class with its configuration's settings; `tiny` replaces some of them for a run on a CPU."""

    kind: str
    config: str
    settings: Mapping[str, Any]
    tiny: Mapping[str, Any]
    place: str = "device"

    def make(self, scale: str = "full") -> Any:
        """The configuration at `scale` "full" or "tiny"."""
        settings = LONGEST | dict(self.settings) | (dict(self.tiny) if scale == "tiny" else {})
        return getattr(transformers, self.config)(**settings)

    def placement(self, gradient: str, outputs: bool = True) -> Placement:
        """Where its states lie; exact updates keep attention's outputs where attention reads the whole prefix."""
        return Placement(self.place, outputs=outputs and gradient == "exact" and self.kind != "GlmMoeDsaForCausalLM")


def llama(tie: bool = True, **settings: Any) -> Shape:
    """A Llama with rotary embeddings for 100,000."""
    return Shape(
        "LlamaForCausalLM", "LlamaConfig", dict(tie_word_embeddings=tie, rope_theta=100000.0) | settings,
        TINY | dict(num_hidden_layers=2),
    )  # fmt: skip


def hybrid(**settings: Any) -> Shape:
    """A Qwen3.5: three layers of gated delta net, then one of attention; what is not given is transformers' default."""
    return Shape("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", settings, TINY | TINY_DELTA | dict(num_hidden_layers=4))


SPARSE = dict(
    num_hidden_layers=8, n_routed_experts=32, mlp_layer_types=["dense"] * 3 + ["sparse"] * 5,
    indexer_types=["full", "shared", "shared", "shared"] * 2, index_topk=2048,
)  # fmt: skip
TINY_SPARSE = TINY | dict(
    num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, q_lora_rank=32, kv_lora_rank=32,
    qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, index_topk=64, index_n_heads=4, index_head_dim=32,
)  # fmt: skip
TINY_SPARSE.pop("head_dim")
SHAPES: dict[str, Shape] = {
    "smollm2_135m": llama(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3,
    ),
    "hybrid_2b": hybrid(
        vocab_size=32768, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256,
    ),
    "hybrid_9b": hybrid(),  # transformers' default: 32 layers, hidden 4,096
    "hybrid_27b": hybrid(  # Qwen3.6-27B
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48,
    ),
    "sparse_8_layers": Shape("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", SPARSE, TINY_SPARSE, place="host"),
    # Small ones, for peak memory: other widths, depths and ratios of heads.
    "llama_768": llama(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4,
    ),
    "qwen3_2048": Shape(
        "Qwen3ForCausalLM", "Qwen3Config",
        dict(vocab_size=65536, hidden_size=2048, intermediate_size=6144, num_hidden_layers=8, num_attention_heads=16,
             num_key_value_heads=8, head_dim=128), TINY | dict(num_hidden_layers=2),
    ),
    "qwen3_1024": Shape(
        "Qwen3ForCausalLM", "Qwen3Config",
        dict(vocab_size=65536, hidden_size=1024, intermediate_size=3072, num_hidden_layers=16, num_attention_heads=8,
             num_key_value_heads=4, head_dim=128), TINY | dict(num_hidden_layers=2),
    ),
    "hybrid_1024": hybrid(
        vocab_size=65536, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2,
    ),
    "hybrid_1536": hybrid(
        vocab_size=65536, hidden_size=1536, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=2, linear_num_key_heads=8, linear_num_value_heads=16,
    ),
    "wide_state": llama(  # little but its state: 32 KiB a position in float32
        vocab_size=8192, hidden_size=512, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, head_dim=128,
    ),
}  # fmt: skip


def build(
    name: str, dtype: torch.dtype, scale: str = "full", weights: Path | None = None, rope: Mapping[str, Any] | None = None
) -> nn.Module:
    """The named shape with LoRA r = 8 on all linear layers (random A and B), on the device, frozen but for the adapters.

    weights: a folder to read them from. rope: the configuration's `rope_parameters`, for contexts beyond the trained range.
    """
    torch.manual_seed(0)
    shape = SHAPES[name]
    kind = getattr(transformers, shape.kind)
    if weights is not None:
        config = transformers.AutoConfig.from_pretrained(weights)
        if rope is not None:
            config.rope_parameters, config.max_position_embeddings = dict(rope), LONGEST["max_position_embeddings"]
        model = kind.from_pretrained(weights, config=config, dtype=dtype).to(DEVICE)
    else:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(DEVICE):
                model = kind(shape.make(scale))
        finally:
            torch.set_default_dtype(before)
    return with_adapters(model)


def with_adapters(model: nn.Module) -> nn.Module:
    """LoRA r = 8 on all linear layers but the head and an indexer's, with random B: through zeros A has no gradient.

    With experts, on attention's alone: PEFT reads the names of a dense layer's projections as the fused experts'.
    """
    targets = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head" and ".indexer." not in n]
    if any("experts." in n for n, _ in model.named_parameters()):
        targets = [n for n in targets if ".self_attn." in n]
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    device = next(model.parameters()).device
    if device.type != "meta":
        generator = torch.Generator(device=device).manual_seed(1)
        with torch.no_grad():
            for n, parameter in model.named_parameters():
                if "lora_B" in n:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, device=device) * 0.02)
    return model.eval()  # type: ignore[no-any-return]


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


def text_ids(weights: Path | None) -> np.ndarray | None:
    """Token ids of Python's help texts, which come with it; None without a tokenizer."""
    if weights is None:
        return None
    from pydoc_data import topics

    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    return np.asarray(tokenizer("\n\n".join(topics.topics[key] for key in sorted(topics.topics)))["input_ids"])
