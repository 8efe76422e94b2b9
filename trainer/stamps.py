"""Stamps: which weights, tokens and settings a state was captured under.

Idea: a state is a function of the tokens before it and of every parameter it passed through. Each layer's stamp is a digest of
both; a state whose stamp differs from what the model has now can't be read as exact. Digests are computed where the tensor
lies (one pass, no copy to the host) and remembered while torch's own version counter says that the tensor was not written.
Parameters that train are digested again at every phase, because `.data` writes pass that counter by; frozen ones are once per
update (`forget`), because a merge of adapters, or a user, may write them so between two.

Layer l's keys and values depend on the embeddings, on all parameters of layers below l, and on layer l's own projections; its
MLP, its query and output projections and the norm after attention come later. What is not known to come later counts. Layer
l's *input* depends on the embeddings and the layers below l alone: it survives a step that trains nothing below l.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longstraw_agents.errors import StaleStateError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.*)$")
_FINAL_NORM = re.compile(r"(^|\.)norm\.")

#: Parts of a layer that act after its state is written.
_AFTER_STATE = re.compile(
    r"^(mlp|feed_forward|block_sparse_moe|post_attention_layernorm|pre_feedforward_layernorm|post_feedforward_layernorm)\."
    r"|\.(q_proj|q_norm|o_proj|out_proj|in_proj_z)\."
)
_PIECE = 1 << 24  # elements digested at once


def tensor_digest(tensor: Tensor) -> bytes:
    """A 16-byte digest of a tensor's values, shape and type. Equal bits give equal digests on devices of one kind.

    On a CPU it is SHA-256 of the bytes (twice as fast there as BLAKE2b). Elsewhere two sums modulo 2^64 of the words, weighted
    by different odd multipliers of their position, computed where the tensor lies: they tell accidents apart, not an adversary.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.device.type == "cpu":
        content = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
    else:
        content = " ".join(map(str, _weighted_sums(flat)))
    text = f"{tuple(tensor.shape)} {tensor.dtype} {content}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _weighted_sums(flat: Tensor) -> list[int]:
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    sums = [0, 0]
    for first in range(0, words.numel(), _PIECE):
        piece = words[first : first + _PIECE].to(torch.int64)
        place = torch.arange(first, first + piece.numel(), device=piece.device, dtype=torch.int64)
        for which, factor in enumerate((-7046029254386353131, -4417276706812531889)):
            weight = (place * factor) | 1
            sums[which] = (sums[which] + int(((piece ^ (piece << 13)) * (weight ^ (weight >> 29))).sum())) & (2**64 - 1)
    return sums


def token_digest(tokens: Iterable[int] | bytes) -> str:
    """Digest of a span's token ids (int32 bytes, little-endian, or an iterable of ids)."""
    data = tokens if isinstance(tokens, bytes) else b"".join(int(t).to_bytes(4, "little", signed=True) for t in tokens)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Stamps:
    """Digests under one set of weights: of what each layer's state depends on [L], and of what its input does [L + 1].

    inputs[L] is the stamp of the final norm's input.
    """

    states: tuple[str, ...]
    inputs: tuple[str, ...]


def first_trained_layer(decoder: nn.Module) -> int:
    """The lowest layer with a trained parameter: nothing below it changes. L where no layer is trained, 0 for embeddings.

    A tied head is the embeddings' own parameter, so it counts as them; an untied head and the final norm come after all states.
    """
    first = 1 + max((int(match[1]) for name, _ in decoder.named_modules() if (match := _LAYER.search(f"{name}."))), default=-1)
    for name, parameter in decoder.named_parameters():
        match = _LAYER.search(name)
        if parameter.requires_grad and (match is not None or not _FINAL_NORM.search(name)):
            first = min(first, int(match[1]) if match else 0)
    return first


def trains_states(decoder: nn.Module) -> bool:
    """Whether some layer's state depends on a trained parameter; if not, no cotangent of a state is ever wanted."""
    last = max((int(match[1]) for name, _ in decoder.named_parameters() if (match := _LAYER.search(name))), default=-1)
    for name, parameter in decoder.named_parameters():
        match = _LAYER.search(name)
        above = bool(_FINAL_NORM.search(name)) if match is None else int(match[1]) == last and _AFTER_STATE.search(match[2])
        if parameter.requires_grad and not above:
            return True
    return False


class WeightStamps:
    """The digests that each layer's state depends on, for one model."""

    def __init__(self, decoder: nn.Module, config: object) -> None:
        """decoder: the stack of layers (embeddings, `layers`, final norm). config: the model's configuration."""
        self._decoder = decoder
        self._config = config
        self._known: dict[str, tuple[tuple[int, int], bytes]] = {}

    def layers(self, *, fresh: bool = True) -> tuple[str, ...]:
        """One digest per layer's state. With fresh=False, tensors whose version counter did not move are not digested again."""
        return self.stamps(fresh=fresh).states

    def stamps(self, *, fresh: bool = True) -> Stamps:
        """The digests of every layer's state and input."""
        below = hashlib.blake2b(self._settings(), digest_size=16)
        own: dict[int, list[bytes]] = {}
        after: dict[int, list[bytes]] = {}
        tensors = list(self._decoder.named_parameters()) + list(self._decoder.named_buffers())
        for name, tensor in sorted(tensors, key=lambda item: item[0]):
            match = _LAYER.search(name)
            entry = name.encode() + self._digest(name, tensor, fresh)
            if match is None:
                if not _FINAL_NORM.search(name):  # the final norm comes after every state
                    below.update(entry)
                continue
            table = after if _AFTER_STATE.search(match[2]) else own
            table.setdefault(int(match[1]), []).append(entry)
        states, inputs = [], [below.hexdigest()]
        for index in range(1 + max([*own, *after], default=-1)):
            for entry in own.get(index, []):
                below.update(entry)
            states.append(below.hexdigest())
            for entry in after.get(index, []):
                below.update(entry)
            inputs.append(below.hexdigest())
        return Stamps(tuple(states), tuple(inputs))

    def forget(self) -> None:
        """Digest every tensor anew at the next call, frozen ones too."""
        self._known.clear()

    def _digest(self, name: str, tensor: Tensor, fresh: bool) -> bytes:
        key = (tensor.data_ptr(), tensor._version)
        known = self._known.get(name)
        if known is not None and known[0] == key and not (fresh and tensor.requires_grad):
            return known[1]
        digest = tensor_digest(tensor)
        self._known[name] = (key, digest)
        return digest

    def _settings(self) -> bytes:
        """Position settings, types and the active adapters with their scaling."""
        to_dict = getattr(self._config, "to_dict", None)
        settings = json.dumps(to_dict() if to_dict else repr(self._config), sort_keys=True, default=str)
        adapters = [
            (name, list(module.active_adapters), sorted(getattr(module, "scaling", {}).items()), bool(module.merged))
            for name, module in self._decoder.named_modules()
            if hasattr(module, "active_adapters") and hasattr(module, "merged")
        ]
        disabled = [bool(getattr(m, "disable_adapters", False)) for m in self._decoder.modules() if hasattr(m, "merged")]
        return f"{settings} {adapters} {any(disabled)}".encode()


def require_fresh(captured: tuple[str, ...], now: tuple[str, ...], what: str) -> None:
    """Raise StaleStateError, naming the first layer that differs, unless both stamps are the same."""
    if captured == now:
        return
    first = next((i for i, (a, b) in enumerate(zip(captured, now, strict=False)) if a != b), min(len(captured), len(now)))
    raise StaleStateError(
        f"{what} was captured under other weights or settings: layer {first} of {len(now)} is the first that differs; "
        "capture it again (recapture) before it is read"
    )
