"""How the local policy runs a model on many sessions at once while each session's state stays where it is.

Idea: one forward takes the new tokens of all sessions laid end to end, [1, N], whatever their number per session (a prompt, a
tool's answer, one sampled token). Linear layers see one matrix; only attention looks at sessions apart, each against its own
keys and values. So nothing is padded, nothing moves between turns, and the history is never run again. Models whose layers
keep something else than keys and values (recurrent ones) are run session by session with the library's own cache.

Vocabulary
    state      what a session has run so far: its tokens, and per layer what later tokens read
    segment    one session's new tokens in one forward
    fork       a state of its own that begins with another's first tokens

Legend: H heads, K key-value heads, G = H / K, D head size, N new tokens of all segments, n of one, L tokens in a state,
V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longstraw_agents.types import TokenArray

ATTENTION = "longstraw_sampling"

#: Model types whose layers are all grouped-query attention, full or with a sliding window, and which were tested this way.
ATTENTION_ONLY = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"})

_SPARE = 256  # tokens of room beyond what a state holds when its buffers are made or grown


@dataclass
class Segment:
    """`state` and the tokens [n] that it is to be extended by."""

    state: Any
    tokens: TokenArray


class StateRunner(Protocol):
    """A model with one way of keeping states."""

    def new(self) -> Any: ...

    def usable(self, state: Any, tokens: TokenArray) -> int:
        """How many of the first tokens a fork of `state` could take over."""
        ...

    def fork(self, state: Any, length: int) -> Any: ...

    def take_over(self, tokens: TokenArray, layers: Sequence[Mapping[str, torch.Tensor]]) -> Any:
        """A state after `tokens` [L] from each layer's "keys" and "values" [1, K, L, D]; None where it needs more than those."""
        ...

    def run(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Extend each state by its segment and give back the logits [segments, V] after each segment's last token."""
        ...


def runner_for(model: Any) -> StateRunner:
    """The runner that fits the model's layers."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return PackedRunner(base) if base.config.model_type in ATTENTION_ONLY else SerialRunner(base)


def shared_length(a: TokenArray, b: TokenArray) -> int:
    """Number of equal tokens at the beginning of both."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """Run with the attention implementation `name` and restore, part by part, what was set before."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config in configs.values():
            config._attn_implementation = name
        yield
    finally:
        for config, previous in before:
            config._attn_implementation = previous


@dataclass
class KeyValueState:
    """tokens [L]; keys and values per layer [K, capacity, D], of which the first L positions are filled."""

    tokens: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def append(self, layer: int, key_KnD: torch.Tensor, value_KnD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write behind the filled positions of this layer; gives back all keys and values [K, L + n, D] as views."""
        start = len(self.tokens)
        stop = start + key_KnD.shape[1]
        if layer not in self.keys or self.keys[layer].shape[1] < stop:
            self.keys[layer] = _grown(self.keys.get(layer), key_KnD, start, stop)
            self.values[layer] = _grown(self.values.get(layer), value_KnD, start, stop)
        self.keys[layer][:, start:stop] = key_KnD
        self.values[layer][:, start:stop] = value_KnD
        return self.keys[layer][:, :stop], self.values[layer][:, :stop]


def _grown(old: torch.Tensor | None, new_KnD: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    buffer = new_KnD.new_empty(new_KnD.shape[0], stop + max(_SPARE, start // 2), new_KnD.shape[2])
    if old is not None:
        buffer[:, :start] = old[:, :start]
    return buffer


class PackedRunner:
    """All segments in one forward. Results do not depend on which sessions run together, up to rounding."""

    def __init__(self, model: Any) -> None:
        self.model = model
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _packed_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)

    def new(self) -> KeyValueState:
        return KeyValueState()

    def usable(self, state: KeyValueState, tokens: TokenArray) -> int:
        return shared_length(state.tokens, tokens)

    def fork(self, state: KeyValueState, length: int) -> KeyValueState:
        copied = KeyValueState(tokens=state.tokens[:length].copy())
        for layer, key in state.keys.items():
            copied.keys[layer] = _grown(key, key, length, length)
            copied.values[layer] = _grown(state.values[layer], state.values[layer], length, length)
        return copied

    def take_over(self, tokens: TokenArray, layers: Sequence[Mapping[str, torch.Tensor]]) -> KeyValueState:
        state, length = KeyValueState(tokens=tokens.copy()), len(tokens)
        for index, layer in enumerate(layers):
            state.keys[index] = _grown(layer["keys"][0], layer["keys"][0], length, length)
            state.values[index] = _grown(layer["values"][0], layer["values"][0], length, length)
        return state

    def run(self, segments: Sequence[Segment]) -> torch.Tensor:
        device = self.model.device
        lengths = [len(segment.tokens) for segment in segments]
        ids = np.concatenate([segment.tokens for segment in segments]).astype(np.int64)
        positions = np.concatenate([len(s.state.tokens) + np.arange(n) for s, n in zip(segments, lengths, strict=True)])
        with attention(self.model, ATTENTION), torch.no_grad():
            logits_1RV = self.model(
                input_ids=torch.from_numpy(ids)[None].to(device),
                position_ids=torch.from_numpy(positions)[None].to(device),
                use_cache=False,
                logits_to_keep=torch.from_numpy(np.cumsum(lengths) - 1).to(device),
                longstraw_segments=segments,
            ).logits
        for segment in segments:
            segment.state.tokens = np.concatenate([segment.state.tokens, segment.tokens])
        return logits_1RV[0]


def _packed_attention(
    module: Any,
    query_1HND: torch.Tensor,
    key_1KND: torch.Tensor,
    value_1KND: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    longstraw_segments: Sequence[Segment] = (),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in every layer; the mask follows from the segments' own positions."""
    _, H, N, D = query_1HND.shape
    K = key_1KND.shape[1]
    out_1NHD = query_1HND.new_empty(1, N, H, value_1KND.shape[3])
    begin = 0
    for segment in longstraw_segments:
        n = len(segment.tokens)
        span = slice(begin, begin + n)
        key_KLD, value_KLD = segment.state.append(module.layer_idx, key_1KND[0, :, span], value_1KND[0, :, span])
        first = 0 if sliding_window is None else max(0, key_KLD.shape[1] - n - sliding_window + 1)
        # the G heads that read one key-value head become queries of that head: nothing is repeated in memory
        query_KGnD = query_1HND[0, :, span].reshape(1, K, H // K * n, D)
        mask = None if n == 1 else _causal_mask(n, key_KLD.shape[1], first, sliding_window, query_1HND.device).repeat(H // K, 1)
        result = F.scaled_dot_product_attention(
            query_KGnD, key_KLD[None, :, first:], value_KLD[None, :, first:], attn_mask=mask, scale=scaling
        )
        out_1NHD[0, span] = result.reshape(H, n, -1).transpose(0, 1)
        begin += n
    return out_1NHD, None


def _causal_mask(n: int, length: int, first: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[n, length - first] bool: which of the keys from `first` on the last n positions may read."""
    query_n1 = torch.arange(length - n, length, device=device)[:, None]
    key_1L = torch.arange(first, length, device=device)[None]
    mask = key_1L <= query_n1
    return mask if window is None else mask & (key_1L > query_n1 - window)


@dataclass
class CacheState:
    """tokens [L] and the library's own cache after them."""

    tokens: TokenArray
    cache: Any


class SerialRunner:
    """One session at a time through the library's cache: for layers whose state can't be cut at a position."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._attention = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"

    def new(self) -> CacheState:
        return CacheState(np.empty(0, np.int32), DynamicCache(config=self.model.config.get_text_config()))

    def usable(self, state: CacheState, tokens: TokenArray) -> int:
        length = len(state.tokens)
        return length if shared_length(state.tokens, tokens) == length else 0

    def fork(self, state: CacheState, length: int) -> CacheState:
        assert length == len(state.tokens), "a recurrent state can't be cut"
        return CacheState(state.tokens.copy(), copy.deepcopy(state.cache))

    def take_over(self, tokens: TokenArray, layers: Sequence[Mapping[str, torch.Tensor]]) -> None:
        return None

    def run(self, segments: Sequence[Segment]) -> torch.Tensor:
        return torch.stack([self._run_one(segment) for segment in segments])

    def _run_one(self, segment: Segment) -> torch.Tensor:
        ids = torch.from_numpy(segment.tokens.astype(np.int64))[None].to(self.model.device)
        with attention(self.model, self._attention), torch.no_grad():
            out = self.model(input_ids=ids, past_key_values=segment.state.cache, use_cache=True, logits_to_keep=1)
        segment.state.tokens = np.concatenate([segment.state.tokens, segment.tokens])
        return out.logits[0, -1]
