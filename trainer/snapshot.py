"""What an update has in hand between two runs of a tree, as named tensors, and the way back.

Idea: what a captured run wrote, and the cotangents of that, are asked of the layers run by run, so that the runs of a path can
lie in files of their own. All else is small: scores and gradients so far, counts of decisions, and how each stack is laid out.

Names are "layer.name" for what belongs to a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from longstraw_agents.trainer.state import StateCache


def states(state: StateCache, start: int, stop: int) -> dict[str, Tensor]:
    """All that later runs read of the captured run [start, stop), with kept outputs."""
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(state.layers):
        own = state.export(index, start, stop) | layer.outputs_of(start, stop)
        found |= {f"{index}.{name}": tensor for name, tensor in own.items()}
    return found


def restore_states(state: StateCache, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `states` gave, as if the run had just been captured."""
    for index, own in _by_layer(tensors).items():
        state.adopt(index, start, stop, own)


def size(state: StateCache, start: int, stop: int) -> int:
    """Bytes of the cotangents of what the captured run [start, stop) wrote; 0 where there are none."""
    return sum(tensor.nbytes for layer in state.layers for tensor in layer.cotangents(start, stop).values())


def cotangents(state: StateCache, start: int, stop: int) -> dict[str, Tensor]:
    """The cotangents of what the captured run [start, stop) wrote."""
    each = ((index, layer.cotangents(start, stop)) for index, layer in enumerate(state.layers))
    return {f"{index}.{name}": tensor for index, own in each for name, tensor in own.items()}


def restore_cotangents(state: StateCache, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `cotangents` gave, after `restore_outline`."""
    for index, own in _by_layer(tensors).items():
        state.layers[index].restore_cotangents(start, stop, own)


def outline(state: StateCache) -> dict[str, Tensor]:
    """How the stacks are laid out, by "layer.stack.part": a stack may be there of which no run is on the path."""
    return {
        f"{index}.{name}.{part}": tensor
        for index, layer in enumerate(state.layers)
        for name, stack in layer.stacks().items()
        for part, tensor in stack.outline().items()
    }


def restore_outline(state: StateCache, tensors: Mapping[str, Tensor]) -> None:
    """Lay stacks out as `outline` found them, cotangents zero."""
    for index, own in _by_layer(tensors).items():
        layer = state.layers[index]
        for name, stack in layer.stacks().items():
            parts = {key.partition(".")[2]: tensor for key, tensor in own.items() if key.startswith(f"{name}.")}
            stack.restore_outline(parts, layer.device)


def flips(state: StateCache) -> list[tuple[int, int]]:
    """By layer, decisions that reruns would have made otherwise: its own, and its router's."""
    return [(layer.flips, layer.routing.flips if layer.routing else 0) for layer in state.layers]


def restore_flips(state: StateCache, counts: list[tuple[int, int]]) -> None:
    """Put back what `flips` gave."""
    for layer, (own, routed) in zip(state.layers, counts, strict=True):
        layer.flips = own
        if layer.routing is not None:
            layer.routing.flips = routed


def gradients(model: nn.Module, sums: Mapping[Tensor, Tensor | None]) -> dict[str, Tensor]:
    """The gradients so far by parameter; those that are summed apart from `.grad` (see `accumulation`) from there."""
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    held = {name: sums[p] if p in sums else p.grad for name, p in trained}
    return {name: gradient for name, gradient in held.items() if gradient is not None}


def restore_gradients(model: nn.Module, sums: dict[Tensor, Tensor | None], held: Mapping[str, Tensor]) -> None:
    """Put back what `gradients` gave."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            gradient = held[name].to(p.device) if name in held else None
            if p in sums:
                sums[p] = gradient
            else:
                p.grad = gradient


def _by_layer(tensors: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        layer, _, name = key.partition(".")
        found.setdefault(int(layer), {})[name] = tensor
    return found
