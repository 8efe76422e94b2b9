"""Running a decoder from a layer on: what lies below the first trained layer never changes, so it need not run again.

Idea: a layer's input depends on the embeddings and the layers below it alone. Where those are frozen, the input of the first
trained layer, once stored, stands for them. For the length of a run the layers below pass through what they are given, and
that layer reads the stored input instead of it. The model itself walks its layers as it always does, with its own masks,
positions and rotary embeddings: no model's code is copied, and embedding scales and layer types stay where they are.

Vocabulary
    frontier   the layer from which a run starts: the first one with a trained parameter, or the nearest below it that can start
    input      the hidden states that enter the frontier; for frontier L, the number of layers, those that enter the final norm

Shapes: B rows, T tokens, C hidden size, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer.stamps import first_trained_layer


@dataclass(frozen=True)
class Entry:
    """The stored input [1, T, C] of layer `layer` for the tokens of one run."""

    layer: int
    hidden_1TC: Tensor


def find_frontier(decoder: nn.Module, config: Any) -> int:
    """The layer from which runs may start under the parameters that train now; 0 where there is nothing to save.

    A layer that reads another layer's index selection can't start a run: the frontier moves down to the layer that made it.
    """
    frontier = first_trained_layer(decoder)
    kinds = getattr(config.get_text_config(), "indexer_types", None) or ()
    while 0 < frontier < len(kinds) and kinds[frontier] == "shared":
        frontier -= 1
    return frontier


@contextmanager
def started_from(decoder: nn.Module, entry: Entry | None) -> Iterator[None]:
    """Within the block the decoder's forward runs from `entry` on; without one it runs whole."""
    if entry is None:
        yield
        return
    hook = _place(decoder, entry.layer).register_forward_pre_hook(_reads(entry.hidden_1TC), with_kwargs=True)
    try:
        with _skipped(list(decoder.layers)[: entry.layer]):  # type: ignore[arg-type]
            yield
    finally:
        hook.remove()


@contextmanager
def stopped_before(decoder: nn.Module, layer: int) -> Iterator[None]:
    """Within the block `layer` and those above it do not run; what comes out is of no use but for `kept_input`."""
    with _skipped(list(decoder.layers)[layer:]):  # type: ignore[arg-type]
        yield


@contextmanager
def _skipped(layers: list[nn.Module]) -> Iterator[None]:
    before = [vars(module).get("forward") for module in layers]  # set on a layer itself where others have wrapped it
    for module in layers:
        module.forward = _pass_through
    try:
        yield
    finally:
        for module, forward in zip(layers, before, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


@contextmanager
def kept_input(decoder: nn.Module, layer: int) -> Iterator[list[Tensor]]:
    """Within the block the input of `layer` is appended to the list at every forward, without autograd."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.append((args[0] if args else kwargs["hidden_states"]).detach())

    hook = _place(decoder, layer).register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield kept
    finally:
        hook.remove()


def _place(decoder: nn.Module, layer: int) -> nn.Module:
    """The module whose input is meant: a layer, or the final norm after all of them."""
    layers = list(decoder.layers)  # type: ignore[arg-type]
    if layer < len(layers):
        return layers[layer]
    if not isinstance(norm := getattr(decoder, "norm", None), nn.Module):
        raise ModelError(f"{type(decoder).__name__} has no final `norm`; its layers' outputs can't be stored")
    return norm


def _pass_through(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A layer that does nothing, with the result's shape of the one it stands for: some hand on an index selection too."""
    return (hidden_states, None) if "prev_topk_indices" in kwargs else hidden_states


def _reads(hidden_1TC: Tensor) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """A hook that gives a module the stored hidden states in place of what it was called with."""

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = args[0] if args else kwargs["hidden_states"]
        if given.shape != hidden_1TC.shape or given.dtype != hidden_1TC.dtype:
            raise ModelError(
                f"stored hidden states are {tuple(hidden_1TC.shape)} {hidden_1TC.dtype}, but the run has {tuple(given.shape)} "
                f"{given.dtype}; they belong to another run"
            )
        hidden = hidden_1TC.to(given.device)
        return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

    return replace
