"""How the local policy runs a model on many sessions at once while each session's state stays where it is.

Idea: one forward takes the new tokens of all sessions laid end to end, [1, N], whatever their number per session (a prompt, a
tool's answer, one sampled token). Linear layers see one matrix; only attention looks at sessions apart, each against its own
keys and values. So nothing is padded, nothing moves between turns, and the history is never run again. Models whose layers
keep something else than keys and values (recurrent ones) are run session by session with the library's own cache.

On a GPU the sessions that have one new token each attend together: their keys and values are then rows of one buffer, so that a
step costs a few kernels per layer whatever the number of sessions. Longer segments are attended one by one, by the trainer's
kernels where one takes them.

Vocabulary
    state      what a session has run so far: its tokens, and per layer what later tokens read
    segment    one session's new tokens in one forward
    fork       a state of its own that begins with another's first tokens
    table      the buffer whose rows several states are

Legend: H heads, K key-value heads, G = H / K, D head size, N new tokens of all segments, n of one, L tokens in a state,
R rows of a table, V vocabulary.
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
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longstraw_agents.trainer.kernels import choose
from longstraw_agents.types import TokenArray

ATTENTION = "longstraw_sampling"

#: Model types whose layers are all grouped-query attention, full or with a sliding window, and which were tested this way.
ATTENTION_ONLY = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"})

#: Not cuDNN's: it makes a plan for each new length, and every step has one.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_SPARE = 256  # tokens of room beyond what a state holds when its buffers are made
_TOGETHER = 8192  # tokens in a state: a longer one attends alone, and its keys are not copied into a table
_GROWTH = 16384  # at most so many more when they are grown


@dataclass
class Segment:
    """`state` and the tokens [n] that it is to be extended by."""

    state: Any
    tokens: TokenArray


class StateRunner(Protocol):
    """A model with one way of keeping states."""

    def new(self) -> Any:
        """An empty state."""
        ...

    def usable(self, state: Any, tokens: TokenArray) -> int:
        """How many of the first tokens a fork of `state` could take over."""
        ...

    def fork(self, state: Any, length: int) -> Any:
        """A state of its own that begins with the first `length` tokens of `state`."""
        ...

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


def configs_of(model: Any) -> list[Any]:
    """The configuration of every part of the model, each once."""
    return list({id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values())


@contextmanager
def attention(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Run with the attention implementation `name` and restore, part by part, what was set before."""
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, previous in before:
            config._attn_implementation = previous


@dataclass(eq=False)
class KeyValueState:
    """tokens [L]; keys and values per layer [K, capacity, D], of which the first L positions are filled.

    row: which row of `table` the buffers are, if they are views of one.
    """

    tokens: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    table: Table | None = None
    row: int = 0

    def append(self, layer: int, key_KnD: torch.Tensor, value_KnD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write behind the filled positions of this layer; gives back all keys and values [K, L + n, D] as views."""
        start = len(self.tokens)
        stop = start + key_KnD.shape[1]
        if layer not in self.keys or self.keys[layer].shape[1] < stop:
            room = stop + max(_SPARE, min(start // 2, _GROWTH))
            self.keys[layer] = _grown(self.keys.get(layer), key_KnD, start, room)
            self.values[layer] = _grown(self.values.get(layer), value_KnD, start, room)
            self.table = None
        self.keys[layer][:, start:stop] = key_KnD
        self.values[layer][:, start:stop] = value_KnD
        return self.keys[layer][:, :stop], self.values[layer][:, :stop]


def _grown(old: torch.Tensor | None, like_KnD: torch.Tensor, filled: int, room: int) -> torch.Tensor:
    buffer = like_KnD.new_empty(like_KnD.shape[0], room, like_KnD.shape[2])
    if old is not None:
        buffer[:, :filled] = old[:, :filled]
    return buffer


class Table:
    """Keys and values of several states per layer, [R, K, capacity, D]; the states' own buffers become views of its rows."""

    def __init__(self, states: Sequence[KeyValueState]) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        room = _aligned(max(len(state.tokens) for state in states) + 2 * _SPARE)
        for layer, like in states[0].keys.items():
            for of_all, of_state in ((self.keys, "keys"), (self.values, "values")):
                of_all[layer] = like.new_zeros(len(states), like.shape[0], room, like.shape[2])
                for row, state in enumerate(states):
                    own = getattr(state, of_state)
                    of_all[layer][row, :, : len(state.tokens)] = own[layer][:, : len(state.tokens)]
                    own[layer] = of_all[layer][row]
        for row, state in enumerate(states):
            state.table, state.row = self, row
        self.capacity = room


@dataclass(frozen=True)
class Together:
    """Segments of one token each whose states are rows of one table.

    at [R]: their places among the N new tokens; rows [R] of the table, None for all in order; positions [R]: where the new token
    goes; bias [R, 1, 1, L]: 0 for what a row may read and minus infinity beyond its end.
    """

    table: Table
    at: torch.Tensor
    rows: torch.Tensor | None
    positions: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def of(cls, states: Sequence[KeyValueState], at: Sequence[int], like: torch.Tensor) -> Together:
        """The states' table, made anew unless all of them are rows of one already that has room for a token more."""
        table, longest = states[0].table, 1 + max(len(state.tokens) for state in states)
        if table is None or table.capacity < longest or any(state.table is not table for state in states):
            table = Table(states)
        rows = [state.row for state in states]
        to = lambda numbers: torch.tensor(numbers, device=like.device)
        positions = to([len(state.tokens) for state in states])
        width = _aligned(longest)
        seen = torch.arange(width, device=like.device)[None] <= positions[:, None]
        bias = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)
        whole = rows == list(range(len(table.keys[0])))
        return cls(table, to(list(at)), None if whole else to(rows), positions, bias[:, None, None])

    def attend(
        self, layer: int, q_RHD: torch.Tensor, k_RKD: torch.Tensor, v_RKD: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Write the new keys and values; give back the attention's outputs [R, H, D]."""
        (R, H, _), K, width = q_RHD.shape, k_RKD.shape[1], self.bias.shape[-1]
        rows = torch.arange(R, device=q_RHD.device) if self.rows is None else self.rows
        parts = []
        for buffer, new in ((self.table.keys[layer], k_RKD), (self.table.values[layer], v_RKD)):
            buffer[rows, :, self.positions] = new
            parts.append((buffer if self.rows is None else buffer[rows])[:, :, :width])
        q_RKGD = q_RHD.reshape(R, K, H // K, -1)
        bias = self.bias.expand(R, K, H // K, width)
        keys, values = parts
        return F.scaled_dot_product_attention(q_RKGD, keys, values, attn_mask=bias, scale=scale).reshape(R, H, -1)


def _aligned(length: int) -> int:
    """Not below the length, and such that rows of a bias of it begin where kernels want them to."""
    return -(-length // 16) * 16


class PackedRunner:
    """All segments in one forward. Results do not depend on which sessions run together, up to rounding."""

    def __init__(self, model: Any, together: bool | None = None) -> None:
        """together: whether sessions with one new token attend together; by default on a GPU, for models without windows."""
        self.model, self._configs = model, configs_of(model)
        window = getattr(model.config.get_text_config(), "sliding_window", None)
        self.together = (model.device.type == "cuda" and window is None) if together is None else together
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _packed_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)

    def new(self) -> KeyValueState:
        """An empty state."""
        return KeyValueState()

    def usable(self, state: KeyValueState, tokens: TokenArray) -> int:
        """All that both have in common: keys and values can be cut anywhere."""
        return shared_length(state.tokens, tokens)

    def fork(self, state: KeyValueState, length: int) -> KeyValueState:
        """The first `length` positions, copied, with room to grow."""
        copied = KeyValueState(tokens=state.tokens[:length].copy())
        for layer, key in state.keys.items():
            copied.keys[layer] = _grown(key, key, length, length + _SPARE)
            copied.values[layer] = _grown(state.values[layer], state.values[layer], length, length + _SPARE)
        return copied

    def take_over(self, tokens: TokenArray, layers: Sequence[Mapping[str, torch.Tensor]]) -> KeyValueState:
        """The given keys and values, copied, with room to grow."""
        state, length = KeyValueState(tokens=tokens.copy()), len(tokens)
        for index, layer in enumerate(layers):
            state.keys[index] = _grown(layer["keys"][0], layer["keys"][0], length, length + _SPARE)
            state.values[index] = _grown(layer["values"][0], layer["values"][0], length, length + _SPARE)
        return state

    def run(self, segments: Sequence[Segment]) -> torch.Tensor:
        """All segments as one packed row; see `StateRunner`."""
        device = self.model.device
        lengths = [len(segment.tokens) for segment in segments]
        ids = np.concatenate([segment.tokens for segment in segments]).astype(np.int64)
        positions = np.concatenate([len(s.state.tokens) + np.arange(n) for s, n in zip(segments, lengths, strict=True)])
        with attention(self._configs, ATTENTION), sdpa_kernel(_BACKENDS), torch.no_grad():
            logits_1RV = self.model(
                input_ids=torch.from_numpy(ids)[None].to(device),
                position_ids=torch.from_numpy(positions)[None].to(device),
                use_cache=False,
                logits_to_keep=torch.from_numpy(np.cumsum(lengths) - 1).to(device),
                longstraw_batch=self._batch(segments),
            ).logits
        for segment in segments:
            segment.state.tokens = np.concatenate([segment.state.tokens, segment.tokens])
        return logits_1RV[0]

    def _batch(self, segments: Sequence[Segment]) -> Batch:
        """Which segments attend one by one, and which together: over many keys one session alone keeps a GPU busy."""
        starts = np.cumsum([0, *(len(segment.tokens) for segment in segments)])
        single = [
            self.together and len(segment.tokens) == 1 and 0 < len(segment.state.tokens) <= _TOGETHER for segment in segments
        ]
        alone = [(int(start), segment) for start, segment, one in zip(starts, segments, single, strict=False) if not one]
        states = [segment.state for segment, one in zip(segments, single, strict=True) if one]
        if len(states) < 2:
            return Batch([(int(start), segment) for start, segment in zip(starts, segments, strict=False)], None)
        at = [int(start) for start, one in zip(starts, single, strict=False) if one]
        return Batch(alone, Together.of(states, at, states[0].keys[0]))


@dataclass(frozen=True)
class Batch:
    """One forward's segments: `alone` with where each begins among the N new tokens, and those that attend together."""

    alone: Sequence[tuple[int, Segment]]
    together: Together | None


def _packed_attention(
    module: Any,
    query_1HND: torch.Tensor,
    key_1KND: torch.Tensor,
    value_1KND: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    longstraw_batch: Batch = Batch((), None),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in every layer; the mask follows from the segments' own positions."""
    _, H, N, _ = query_1HND.shape
    out_1NHD = query_1HND.new_empty(1, N, H, value_1KND.shape[3])
    for begin, segment in longstraw_batch.alone:
        span = slice(begin, begin + len(segment.tokens))
        keys, values = segment.state.append(module.layer_idx, key_1KND[0, :, span], value_1KND[0, :, span])
        out_1NHD[0, span] = _attend_alone(query_1HND[:, :, span], keys[None], values[None], scaling, sliding_window)
    if (together := longstraw_batch.together) is not None:
        q_RHD, k_RKD, v_RKD = (tensor[0, :, together.at].transpose(0, 1) for tensor in (query_1HND, key_1KND, value_1KND))
        out_1NHD[0, together.at] = together.attend(module.layer_idx, q_RHD, k_RKD, v_RKD, scaling)
    return out_1NHD, None


def _attend_alone(
    q_1HnD: torch.Tensor, k_1KLD: torch.Tensor, v_1KLD: torch.Tensor, scale: float | None, window: int | None
) -> torch.Tensor:
    """The last n positions of one session read all L: outputs [n, H, D]."""
    (_, H, n, D), (_, K, length, _) = q_1HnD.shape, k_1KLD.shape
    if q_1HnD.is_cuda and n > 1 and window is None:
        kernel = choose(q_1HnD, k_1KLD, v_1KLD)
        if kernel is not None and (kernel.bottom_right or n == length):
            out, _ = kernel.forward(q_1HnD, k_1KLD, v_1KLD, True, D**-0.5 if scale is None else scale)
            return out[0].transpose(0, 1)
    first = 0 if window is None else max(0, length - n - window + 1)
    # the G heads that read one key-value head become queries of that head: nothing is repeated in memory
    query_KGnD = q_1HnD.reshape(1, K, H // K * n, D)
    mask = None if n == 1 else _causal_mask(n, length, first, window, q_1HnD.device).repeat(H // K, 1)
    result = F.scaled_dot_product_attention(query_KGnD, k_1KLD[:, :, first:], v_1KLD[:, :, first:], attn_mask=mask, scale=scale)
    return result.reshape(H, n, -1).transpose(0, 1)


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
        self.model, self._configs = model, configs_of(model)
        self._attention = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"

    def new(self) -> CacheState:
        """An empty cache of the library."""
        return CacheState(np.empty(0, np.int32), DynamicCache(config=self.model.config.get_text_config()))

    def usable(self, state: CacheState, tokens: TokenArray) -> int:
        """All of the state or nothing: a recurrent state can't be cut."""
        length = len(state.tokens)
        return length if shared_length(state.tokens, tokens) == length else 0

    def fork(self, state: CacheState, length: int) -> CacheState:
        """A deep copy; `length` is the state's own."""
        assert length == len(state.tokens), "a recurrent state can't be cut"
        return CacheState(state.tokens.copy(), copy.deepcopy(state.cache))

    def take_over(self, tokens: TokenArray, layers: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """None: keys and values are not all that such a state holds."""
        return None

    def run(self, segments: Sequence[Segment]) -> torch.Tensor:
        """One segment after the other."""
        return torch.stack([self._run_one(segment) for segment in segments])

    def _run_one(self, segment: Segment) -> torch.Tensor:
        ids = torch.from_numpy(segment.tokens.astype(np.int64))[None].to(self.model.device)
        with attention(self._configs, self._attention), torch.no_grad():
            out = self.model(input_ids=ids, past_key_values=segment.state.cache, use_cache=True, logits_to_keep=1)
        segment.state.tokens = np.concatenate([segment.state.tokens, segment.tokens])
        return out.logits[0, -1]
