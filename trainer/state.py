"""What later tokens read of a span, layer by layer, with its cotangent: the state.

Idea: the live states are those of one root-to-leaf path, and positions along a path are contiguous. So each layer keeps one
stack: a child's span is written after its parent's, the next sibling overwrites it, and the parent's part is never touched.
Beside each value lies its cotangent (the gradient of the loss with respect to it) in float32 or the compute type where that
is wider. Branches add to the cotangent of what they read; when a span is run backward, the cotangent of what it wrote is
its seed, and is cleared.

A model meets the state as the `cache` argument of its forward: attention layers call `update` and then
`attention.attention`; recurrent layers fetch and store their state through the conv-state and recurrent-state calls. Nothing
is updated in place that autograd or a sibling still reads.

Vocabulary
    position   index of an input token on the path; a span [start, stop) of inputs writes the state positions start..stop-1
    border     a position between two runs; a recurrent layer keeps one copy of its state at each border
    run        one forward of a chunk: capture (no autograd, writes), replay (autograd, reads), or reverse (replay with seeds)
    seed       (output of a run, its cotangent): what back-propagation starts from, beside the loss

Shapes: B rows, K key heads, T tokens of the run, D/E head sizes, P positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from longstraw_agents.errors import ModelError, StaleStateError
from longstraw_agents.trainer.attention import PrefixAttention, Spec
from longstraw_agents.trainer.paged import Page
from longstraw_agents.trainer.pages import Placement, page_borders, staged
from longstraw_agents.trainer.quantized import ByteStack
from longstraw_agents.trainer.stack import BLOCK, Stack, wide


@dataclass(frozen=True)
class Run:
    """One forward of a chunk. `cut`: positions before it pass no gradient on (0 in exact mode; the node's start in detached).

    hidden: whether hidden states are wanted. If not, the run may end as soon as the last layer has written its state.
    nodes: of a tree, the node that each row belongs to.
    """

    start: int
    length: int
    rows: int
    writes: bool
    gradient: bool
    cut: int = 0
    hidden: bool = True
    nodes: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        """One past the run's last input."""
        return self.start + self.length


Seed = tuple[Tensor, Tensor]


class StateWritten(Exception):  # no error: it ends a forward whose hidden states nobody wants
    """The last layer's state is written, and the run wants no hidden states."""


class Decisions(Protocol):
    """What a layer decided discontinuously along the path (expert routing), kept beside its state run by run."""

    @property
    def flips(self) -> int:
        """Decisions that a rerun would have made otherwise."""
        ...

    @flips.setter
    def flips(self, count: int) -> None: ...

    def export(self, start: int, stop: int) -> dict[str, Tensor]:
        """What `adopt` takes of the run [start, stop)."""
        ...

    def adopt(self, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
        """Take what `export` gave."""
        ...

    def truncate(self, position: int) -> None:
        """Forget what lies at `position` and after it."""
        ...

    def nbytes(self) -> int:
        """Bytes held."""
        ...


class LayerState(ABC):
    """One layer's state along the current path. One instance per layer of the model."""

    run: Run
    device: torch.device | None = None  # where the layer lies; set by `architectures.make_state`
    routing: Decisions | None = None  # of a layer with experts; set by `architectures.make_state`
    flips = 0  # of the layer's own decisions (index selection)

    def begin(self, run: Run) -> None:
        """Prepare for a run's forward."""
        self.run = run

    def put(self, placement: Placement) -> None:
        """Choose where the state lies. By default it stays on the device: what does not grow with the length is small."""
        return None

    @abstractmethod
    def seeds(self) -> list[Seed]:
        """After a replay's forward: this run's outputs that later runs read, with their cotangents, which are cleared here."""

    @abstractmethod
    def collect(self) -> None:
        """After a replay's backward: add the gradient of what was read to its cotangent, and let the run's tensors go."""

    @abstractmethod
    def truncate(self, position: int) -> None:
        """Forget what lies at `position` and after it."""

    def drop(self, border: int) -> None:
        """Nothing will run from `border` any more: let go of what was kept for that alone. By default nothing was."""
        return None

    @abstractmethod
    def export(self, start: int, stop: int) -> dict[str, Tensor]:
        """All that later runs read of the run [start, stop), by name: what `adopt` takes to stand for having captured it."""

    @abstractmethod
    def adopt(self, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
        """Take copies of what `export` gave, on whatever device, as if [start, stop) had just been captured."""

    # For the journal: what the layer holds beside what `export` gives.

    def stacks(self) -> dict[str, Stack]:
        """Its stacks by name; the cotangent of a run lies in them, unless `cotangents` says otherwise."""
        return {}

    def outputs_of(self, start: int, stop: int) -> dict[str, Tensor]:
        """Kept outputs of the run [start, stop), which `adopt` takes beside what `export` gives; by default none are kept."""
        return {}

    def cotangents(self, start: int, stop: int) -> dict[str, Tensor]:
        """The cotangents of what the run [start, stop) wrote, by name, left as they are."""
        found = {name: stack.seen_cotangent(start, stop) for name, stack in self.stacks().items()}
        return {name: grad for name, grad in found.items() if grad is not None}

    def restore_cotangents(self, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `cotangents` gave, after the stacks' outlines."""
        for name, grad in tensors.items():
            self.stacks()[name].restore_cotangent(start, grad)

    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Bytes held: {"state": ..., "cotangent": ...}."""


class AttentionState(LayerState):
    """Keys and values of an attention layer, after the rotary embedding: two stacks."""

    def __init__(self, capacity: int) -> None:
        self.keys, self.values = Stack(capacity), Stack(capacity)
        self.outputs: tuple[Stack, Stack] | None = None  # attention's output and log-sum-exp of captured chunks
        self._kept: dict[int, int] = {}  # start -> stop of the chunks in `outputs`
        self._own: tuple[Tensor, Tensor] | None = None

    def put(self, placement: Placement) -> None:
        """Choose where this layer's state lies; before anything is captured."""
        capacity = self.keys.capacity
        self.keys, self.values = placement.state(capacity), placement.state(capacity)
        if placement.outputs:
            self.outputs = (placement.stack(capacity), placement.stack(capacity))

    def keep(self, out_BHTE: Tensor, lse_BHT: Tensor) -> None:
        """Keep a capture's attention output for its reverse: computing it anew reads the whole prefix."""
        if self.outputs is not None and self.run.writes:
            first, last = self.own_rows
            self.outputs[0].write(first, out_BHTE[:, :, : last - first])
            self.outputs[1].write(first, lse_BHT[:, :, : last - first, None])
            self._kept[self.run.start] = self.run.stop

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """The kept output of the run's chunk, out_BHTE and lse_BHT, to the bit what the kernel gave; None where none was kept."""
        run = self.run
        if self.outputs is None or not run.gradient or run.rows != 1 or self._kept.get(run.start) != run.stop:
            return None
        out, lse = (stack.read(*self.own_rows) for stack in self.outputs)
        return out, lse[..., 0].contiguous()

    @property
    def own_rows(self) -> tuple[int, int]:
        """The rows of the stacks that the run's own tokens take."""
        return self.run.start, self.run.stop

    def update(self, k_BKTD: Tensor, v_BKTE: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Called by the layer with the chunk's keys and values; gives them back alone (the prefix is read block by block)."""
        self._own = (k_BKTD, v_BKTE)
        if self.run.writes:
            self.keys.write(self.run.start, k_BKTD.detach())
            self.values.write(self.run.start, v_BKTE.detach())
        return k_BKTD, v_BKTE

    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
        """out_BHTE of the chunk's queries over the stored prefix and the chunk itself."""
        return PrefixAttention.apply(q, k, v, StoredPrefix(self, self.run), spec)  # type: ignore[no-untyped-call,no-any-return]

    def seeds(self) -> list[Seed]:
        """See `LayerState`."""
        if self._own is None or self.run.rows != 1:
            return []
        pairs = zip(self._own, (self.keys, self.values), strict=True)
        taken = [(out, stack.take(self.run.start, self.run.stop)) for out, stack in pairs]
        return [(out, grad.to(out.dtype)) for out, grad in taken if grad is not None]

    def collect(self) -> None:
        """See `LayerState`."""
        self._own = None

    def export(self, start: int, stop: int) -> dict[str, Tensor]:
        """See `LayerState`."""
        return {"keys": self.keys.read(start, stop), "values": self.values.read(start, stop)}

    def adopt(self, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
        """See `LayerState`."""
        for name, stack in (("keys", self.keys), ("values", self.values)):
            stack.write(start, tensors[name], self.device)
        self._kept.pop(start, None)
        if self.outputs is not None and "out" in tensors:
            for name, stack in zip(("out", "lse"), self.outputs, strict=True):
                stack.write(start, tensors[name], self.device)
            self._kept[start] = stop

    def stacks(self) -> dict[str, Stack]:
        """See `LayerState`."""
        return {"keys": self.keys, "values": self.values}

    def outputs_of(self, start: int, stop: int) -> dict[str, Tensor]:
        """See `LayerState`."""
        if self.outputs is None or self._kept.get(start) != stop:
            return {}
        return {name: stack.read(start, stop) for name, stack in zip(("out", "lse"), self.outputs, strict=True)}

    def truncate(self, position: int) -> None:
        """The next branch overwrites the values, and the cotangent was cleared when it was taken; kept outputs are forgotten."""
        self._kept = {start: stop for start, stop in self._kept.items() if stop <= position}

    def nbytes(self) -> dict[str, int]:
        """See `LayerState`."""
        return _sum_bytes(self.keys.nbytes(), self.values.nbytes(), *(stack.nbytes() for stack in self.outputs or ()))

    def get_seq_length(self) -> int:
        """Positions before the run; transformers asks for it where no position ids are given."""
        return self.run.start


class StoredPrefix:
    """`attention.Prefix` over an AttentionState's stacks, for one run."""

    def __init__(self, state: AttentionState, run: Run) -> None:
        self._state, self._run = state, run
        self._cut, self.length = run.cut, run.start

    def blocks(self, first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The visible prefix, parted at the cut: in large blocks where it lies on the device, in pages where it does not."""
        stacks = (self._state.keys, self._state.values)
        borders = page_borders(first, self.length, self._cut, stacks[0].page or BLOCK)
        for start, (k, v) in staged(stacks, borders):
            yield start, k, v

    def pages(self, gradient: bool) -> Iterator[list[Page]] | None:
        """Of a state in 8 bits its codes: one list where they lie on the device, else a list of one staged page at a time."""
        keys, values = self._state.keys, self._state.values
        if not isinstance(keys, ByteStack) or not isinstance(values, ByteStack):
            return None
        return self._coded(keys, values, gradient)

    def _coded(self, keys: ByteStack, values: ByteStack, gradient: bool) -> Iterator[list[Page]]:
        borders = page_borders(0, self.length, self._cut, keys.codes.page)
        resident = []
        for start, (k, v, *scales) in staged((keys.codes, values.codes, keys.scales, values.scales), borders):
            found = Page(k, v, *scales)
            if gradient and start >= self._cut:
                found = replace(found, dk=_target(keys, start, k, self._cut), dv=_target(values, start, v, self._cut))
            if keys.codes.page is None:
                resident.append(found)
                continue
            yield [found]
            if found.dk is not None and found.dv is not None:
                self.add(start, found.dk, found.dv)
        if resident:
            yield resident

    def joined(self, k_1KTD: Tensor, v_1KTE: Tensor) -> tuple[Tensor, Tensor] | None:
        """One row's chunk lies after its prefix in the same stacks; a replay writes it there too."""
        run = self._run
        if run.rows != 1 or self._state.keys.page is not None:
            return None
        if not run.writes:
            self._state.keys.write(run.start, k_1KTD.detach())
            self._state.values.write(run.start, v_1KTE.detach())
        return self._state.keys.read(0, run.stop), self._state.values.read(0, run.stop)

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """The kept output of the run's chunk; None where none was kept."""
        return self._state.recall()

    def keep(self, out_BHTE: Tensor, lse_BHT: Tensor) -> None:
        """Keep a capture's output."""
        self._state.keep(out_BHTE, lse_BHT)

    def gradient_start(self) -> int:
        """The first position that takes a gradient."""
        return self._cut

    def add(self, start: int, dk_1KSD: Tensor, dv_1KSE: Tensor) -> None:
        """Add to the cotangent of the keys and values from `start` on."""
        self._state.keys.add(start, dk_1KSD, self._cut)
        self._state.values.add(start, dv_1KSE, self._cut)


def _target(stack: ByteStack, start: int, codes_1KSD: Tensor, cut: int) -> Tensor:
    """Where a page's gradient is added: the cotangent itself where the device holds it, else zeros to be added to it later."""
    held = stack.cotangent(start, start + codes_1KSD.shape[2], cut)
    return torch.zeros_like(codes_1KSD, dtype=torch.float32) if held is None else held


class RecurrentState(LayerState):
    """A recurrent layer's state (gated delta net): at each border the recurrent matrix S and the convolution's tail.

    Tensors are kept per border as the layer gives them: S [1, heads, dk, dv] float32, tail [1, channels, kernel]. Both carry a
    cotangent. The convolution's tail of a span shorter than the kernel reaches into the span before it.
    """

    KINDS = ("tail", "recurrent")

    def __init__(self) -> None:
        self._borders: dict[int, dict[str, Tensor]] = {}
        self._cotangents: dict[int, dict[str, Tensor]] = {}
        self._read: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}

    def begin(self, run: Run) -> None:
        """See `LayerState`."""
        super().begin(run)
        self._read, self._own = {}, {}

    def _incoming(self, kind: str) -> Tensor | None:
        """The state at the run's start: a leaf that requires grad in replay, one per run, expanded to the run's rows."""
        if self.run.start == 0:
            return None
        if kind not in self._read:
            stored = self._borders.get(self.run.start, {}).get(kind)
            if stored is None:
                raise StaleStateError(f"no recurrent state was captured at position {self.run.start}; capture the prefix first")
            wanted = self.run.gradient and self.run.start > self.run.cut
            self._read[kind] = stored.detach().requires_grad_(wanted)
        leaf = self._read[kind]
        return leaf.expand(self.run.rows, *leaf.shape[1:]) if self.run.rows > 1 else leaf

    # transformers before 5.24 looks at the layer itself.
    record_past = True

    @property
    def recurrent_states(self) -> list[Tensor | None]:
        """As transformers asks for it before 5.24."""
        return [self._incoming("recurrent")]

    def get_conv_state(self) -> Tensor | None:
        """The convolution's tail at the run's start."""
        return self._incoming("tail")

    def get_recurrent_state(self) -> Tensor | None:
        """The recurrent matrix at the run's start."""
        return self._incoming("recurrent")

    def update_conv_state(self, new_BCT: Tensor, kernel: int) -> Tensor:
        """Return the inputs that the convolution reads, the incoming tail before the new ones; keep the last `kernel`."""
        tail = self._incoming("tail")
        full = new_BCT if tail is None else torch.cat([tail, new_BCT], dim=-1)
        kept = full[..., -kernel:]
        if kept.shape[-1] < kernel:
            kept = torch.nn.functional.pad(kept, (kernel - kept.shape[-1], 0))
        self._keep("tail", kept)
        return full

    def update_recurrent_state(self, new_BHDE: Tensor) -> Tensor:
        """Keep the recurrent matrix at the run's end."""
        self._keep("recurrent", new_BHDE)
        return new_BHDE

    def _keep(self, kind: str, value: Tensor) -> None:
        self._own[kind] = value
        if self.run.writes:
            self._borders.setdefault(self.run.stop, {})[kind] = value.detach().clone()

    def seeds(self) -> list[Seed]:
        """See `LayerState`."""
        given = self._cotangents.pop(self.run.stop, {}) if self.run.rows == 1 else {}
        return [(self._own[kind], grad.to(self._own[kind].dtype)) for kind, grad in given.items() if kind in self._own]

    def collect(self) -> None:
        """See `LayerState`."""
        for kind, leaf in self._read.items():
            if leaf.grad is not None:
                held = self._cotangents.setdefault(self.run.start, {})
                grad = leaf.grad.to(wide(leaf.dtype))
                held[kind] = held[kind] + grad if kind in held else grad
        self._read, self._own = {}, {}

    def export(self, start: int, stop: int) -> dict[str, Tensor]:
        """See `LayerState`."""
        return dict(self._borders.get(stop, {}))  # nothing where it was dropped

    def adopt(self, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
        """See `LayerState`."""
        self._borders[stop] = {kind: tensor.to(self.device, copy=True) for kind, tensor in tensors.items()}

    def drop(self, border: int) -> None:
        """See `LayerState`."""
        self._borders.pop(border, None)

    def cotangents(self, start: int, stop: int) -> dict[str, Tensor]:
        """See `LayerState`."""
        return dict(self._cotangents.get(stop, {}))

    def restore_cotangents(self, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
        """See `LayerState`."""
        self._cotangents[stop] = {kind: tensor.to(self.device, copy=True) for kind, tensor in tensors.items()}

    def truncate(self, position: int) -> None:
        """See `LayerState`."""
        for table in (self._borders, self._cotangents):
            for border in [b for b in table if b > position]:
                del table[border]

    def nbytes(self) -> dict[str, int]:
        """See `LayerState`."""
        total = lambda table: sum(t.nbytes for kinds in table.values() for t in kinds.values())
        return {"state": total(self._borders), "cotangent": total(self._cotangents)}


class StateCache(Cache):  # type: ignore[misc]
    """All layers' states, in the shape in which a transformers model takes its cache."""

    def __init__(self, layers: Sequence[LayerState]) -> None:
        # Not Cache.__init__: its layers update themselves in place, ours never do.
        self.layers = list(layers)
        self.layer_class_to_replicate = None
        self.offloading = False
        self.start = 0
        self.run: Run | None = None
        self.frontier = 0  # layers below it train nothing: no gradient is wanted of what they read

    def begin(self, run: Run) -> None:
        """Prepare every layer for a run."""
        self.start, self.run = run.start, run
        for index, layer in enumerate(self.layers):
            layer.begin(run if index >= self.frontier else replace(run, cut=run.start))

    def seeds(self) -> list[Seed]:
        """The seeds of every layer."""
        return [seed for layer in self.layers for seed in layer.seeds()]

    def collect(self) -> None:
        """Take in the gradients of what the run read."""
        for layer in self.layers:
            layer.collect()

    def truncate(self, position: int) -> None:
        """Forget what lies at `position` and after it, in every layer."""
        for layer in self.layers:
            layer.truncate(position)
        for routing in self._routing():
            routing.truncate(position)

    def drop(self, border: int) -> None:
        """`LayerState.drop` of every layer."""
        for layer in self.layers:
            layer.drop(border)

    def export(self, layer: int, start: int, stop: int) -> dict[str, Tensor]:
        """`LayerState.export` of one layer, with its routing."""
        state = self.layers[layer]
        return state.export(start, stop) | (state.routing.export(start, stop) if state.routing else {})

    def adopt(self, layer: int, start: int, stop: int, tensors: Mapping[str, Tensor]) -> None:
        """`LayerState.adopt` of one layer, with its routing."""
        state = self.layers[layer]
        state.adopt(start, stop, tensors)
        if state.routing:
            state.routing.adopt(start, stop, tensors)

    def nbytes(self) -> dict[str, int]:
        """Bytes held by all layers: {"state": ..., "cotangent": ...}."""
        recorded = {"state": sum(routing.nbytes() for routing in self._routing())}
        return _sum_bytes(recorded, *(layer.nbytes() for layer in self.layers))

    def _routing(self) -> list[Decisions]:
        return [layer.routing for layer in self.layers if layer.routing is not None]

    def flips(self) -> dict[str, int]:
        """Decisions that reruns would have made otherwise: {"routing": tokens, "selection": queries}, summed over layers."""
        return {
            "routing": sum(routing.flips for routing in self._routing()),
            "selection": sum(layer.flips for layer in self.layers),
        }

    def attend(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
        """Attention of the module's layer; see AttentionState.attend. Raises StateWritten where the run ends here."""
        last = len(self.layers) - 1
        if module.layer_idx == last and self.run is not None and not self.run.hidden and self.layers[last].routing is None:
            raise StateWritten
        return self._layer(module.layer_idx, "attend")(module, q, k, v, spec)  # type: ignore[no-any-return,arg-type]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """transformers: a layer stores its chunk's keys and values."""
        return self._layer(layer_idx, "update")(key_states, value_states)  # type: ignore[no-any-return]

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """transformers: an indexer stores its chunk's keys and gets those that it is to score."""
        return self._layer(layer_idx, "update_indexer")(indexer_key_states)  # type: ignore[no-any-return]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """transformers: a recurrent layer reads its convolution's tail."""
        return self._layer(layer_idx, "get_conv_state")()  # type: ignore[no-any-return]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """transformers: a recurrent layer reads its matrix."""
        return self._layer(layer_idx, "get_recurrent_state")()  # type: ignore[no-any-return]

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """transformers: a recurrent layer gives its new convolution inputs and gets those that the convolution reads."""
        kernel = kwargs.get("conv_kernel_size")
        if kernel is None:
            raise ModelError(f"layer {layer_idx} stores a convolution state without its kernel size; no exact replay is known")
        return self._layer(layer_idx, "update_conv_state")(conv_states, kernel)  # type: ignore[no-any-return]

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """transformers: a recurrent layer stores its matrix."""
        return self._layer(layer_idx, "update_recurrent_state")(recurrent_states)  # type: ignore[no-any-return]

    def _layer(self, index: int, call: str) -> Callable[..., Any]:
        method = getattr(self.layers[index], call, None)
        if method is None:
            raise ModelError(
                f"layer {index} calls {call} but was given a {type(self.layers[index]).__name__}; "
                "its type is not what the model's configuration says: no exact replay is known"
            )
        return method  # type: ignore[no-any-return]

    # What transformers asks a cache about itself. Masks are not built (see attention), so lengths only matter for positions.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the run."""
        return self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys, as a mask would need them."""
        return self.start + query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether anything precedes the run."""
        return self.start > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: keeps recurrent layers off their one-token path, which updates the convolution's tail in place."""
        return True

    is_compileable = False
    is_sliding: list[bool] = []  # transformers looks here for the first full-attention layer, to build masks that we do not use
    is_linear: list[bool] = []
    is_dummy: list[bool] = []


def _sum_bytes(*parts: dict[str, int]) -> dict[str, int]:
    total = {"state": 0, "cotangent": 0}
    for part in parts:
        for kind, size in part.items():
            total[kind] += size
    return total
