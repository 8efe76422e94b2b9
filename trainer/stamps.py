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
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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
_SMALL = 1 << 16  # elements of a tensor that is digested on the host


def tensor_digest(tensor: Tensor) -> bytes:
    """A 16-byte digest of a tensor's values, shape and type. Equal bits give equal digests on devices of one kind.

    On a CPU it is SHA-256 of the bytes (twice as fast there as BLAKE2b). Elsewhere two sums modulo 2^64 of the words, weighted
    by different odd multipliers of their position, computed where the tensor lies: they tell accidents apart, not an adversary.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.device.type == "cpu":
        return _digest_of(tensor, hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest())
    return _digest_of(tensor, " ".join(map(str, _weighted_sums(flat).tolist())))


def _copied(tensor: Tensor) -> bool:
    """Whether a GPU reads the tensor from pinned memory: its digest is that of a copy there, which a CPU takes longer to make."""
    return tensor.device.type == "cpu" and tensor.numel() > _SMALL and tensor.is_pinned()


def _digest_of(tensor: Tensor, content: str) -> bytes:
    return hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype} {content}".encode(), digest_size=16).digest()


def _weighted_sums(flat: Tensor) -> Tensor:
    """[2] int64 on the tensor's device; nothing waits for it here."""
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    device = torch.device("cuda") if _copied(flat) else flat.device
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for first in range(0, words.numel(), _PIECE):
        piece = words[first : first + _PIECE].to(device).to(torch.int64)
        place = torch.arange(first, first + piece.numel(), device=piece.device, dtype=torch.int64)
        for which, factor in enumerate((-7046029254386353131, -4417276706812531889)):
            weight = (place * factor) | 1
            sums[which] += ((piece ^ (piece << 13)) * (weight ^ (weight >> 29))).sum()
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
        self.changes = 0  # how often `stamps` found something that was not as at the call before
        self._known: dict[str, _Known] = {}
        self._set = b""
        self._flags: list[tuple[nn.Module, object]] = []  # modules with adapters, and how these were set at the last call

    def layers(self, *, fresh: bool = True) -> tuple[str, ...]:
        """One digest per layer's state. With fresh=False, tensors whose version counter did not move are not digested again."""
        return self.stamps(fresh=fresh).states

    def stamps(self, *, fresh: bool = True) -> Stamps:
        """The digests of every layer's state and input."""
        tensors = self._survey()
        settings = self._settings()
        self.changes += settings != self._set
        self._set = settings
        below = hashlib.blake2b(settings, digest_size=16)
        own: dict[int, list[bytes]] = {}
        after: dict[int, list[bytes]] = {}
        self._digest([item for item in tensors if self._is_due(*item, fresh)])
        for name, _ in tensors:
            match = _LAYER.search(name)
            entry = name.encode() + self._known[name].digest
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

    def moved(self, since: int) -> bool:
        """Whether torch saw a tensor written, or an adapter set otherwise, since `changes` was `since`: no digest."""
        if self.changes != since:
            return True
        written = any(known.tensor() is None or known.place != _place(known.tensor()) for known in self._known.values())
        return written or any(_flags(module) != flags for module, flags in self._flags)

    def _survey(self) -> list[tuple[str, Tensor]]:
        """All parameters and buffers by name, sorted, in one walk; notes adapters on the way."""
        self._flags = []
        tensors: list[tuple[str, Tensor]] = []
        for prefix, module in self._decoder.named_modules():
            if hasattr(module, "merged"):
                self._flags.append((module, _flags(module)))
            held = [*module._parameters.items(), *module._buffers.items()]
            tensors += [(f"{prefix}.{name}" if prefix else name, tensor) for name, tensor in held if tensor is not None]
        return sorted(tensors, key=lambda item: item[0])

    def _is_due(self, name: str, tensor: Tensor, fresh: bool) -> bool:
        known = self._known.get(name)
        unmoved = known is not None and known.tensor() is tensor and known.place == _place(tensor)
        return not unmoved or (fresh and tensor.requires_grad)

    def _digest(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Digest tensors. Those of a GPU are read back together: one wait for each would take longer than a layer."""
        small: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
        large: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors:
            if tensor.device.type == "cpu" and not _copied(tensor):
                self._note(name, tensor, tensor_digest(tensor))
            elif tensor.numel() <= _SMALL:
                small.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
            else:
                large.setdefault(tensor.device, []).append((name, tensor))
        for group in small.values():
            joined = torch.cat([tensor.detach().reshape(-1) for _, tensor in group]).cpu()
            for (name, tensor), flat in zip(group, joined.split([tensor.numel() for _, tensor in group]), strict=True):
                self._note(name, tensor, tensor_digest(flat.view(tensor.shape)))
        for group in large.values():
            sums = torch.stack([_weighted_sums(tensor.detach().contiguous().view(-1)) for _, tensor in group]).tolist()
            for (name, tensor), pair in zip(group, sums, strict=True):
                self._note(name, tensor, _digest_of(tensor, " ".join(map(str, pair))))

    def _note(self, name: str, tensor: Tensor, digest: bytes) -> None:
        known = self._known.get(name)
        self.changes += known is not None and known.digest != digest
        self._known[name] = _Known(weakref.ref(tensor), _place(tensor), digest)

    def _settings(self) -> bytes:
        """Position settings, types and the active adapters with their scaling."""
        to_dict = getattr(self._config, "to_dict", None)
        settings = json.dumps(to_dict() if to_dict else repr(self._config), sort_keys=True, default=str)
        return f"{settings} {[flags for _, flags in self._flags]}".encode()


@dataclass(frozen=True)
class _Known:
    """A tensor's digest, and where it lay and how often it had been written when that was made."""

    tensor: weakref.ref[Tensor]
    place: tuple[int, int]
    digest: bytes


def _place(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor._version)


def _flags(module: Any) -> tuple[Any, ...]:
    """How an adapter layer is set: active adapters, scaling, merged, switched off."""
    return (
        list(getattr(module, "active_adapters", ())), sorted(getattr(module, "scaling", {}).items()),
        bool(module.merged), bool(getattr(module, "disable_adapters", False)),
    )  # fmt: skip


def require_fresh(captured: tuple[str, ...], now: tuple[str, ...], what: str) -> None:
    """Raise StaleStateError, naming the first layer that differs, unless both stamps are the same."""
    if captured == now:
        return
    first = next((i for i, (a, b) in enumerate(zip(captured, now, strict=False)) if a != b), min(len(captured), len(now)))
    raise StaleStateError(
        f"{what} was captured under other weights or settings: layer {first} of {len(now)} is the first that differs; "
        "capture it again (recapture) before it is read"
    )
