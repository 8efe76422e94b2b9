"""What an update will need before it is launched: bytes by kind and place, operations and seconds by phase, and what would fit.

Idea: nothing is estimated by a formula for an architecture. The real model is made on torch's meta device (shapes, no data), and
the runs that need the most memory go through the real engine there, at their real sizes: the first and the last chunk of the
prefix captured, the branches scored and replayed, the last chunk reversed. `live.LiveBytes` counts what they hold. What meta
tensors can't show is what compiled kernels hold while they run: attention's is stood in for by `FlashLike`, the delta rule's by
`DeltaLike`, each with the tensors that the kernel's own source allocates.

Vocabulary
    kind      what the bytes are: weights, copies (of layers' weights that lie in host memory), adapter, optimizer, gradients,
              libraries' workspace, state, outputs (kept attention), cotangent
    working   the peak above all of these: a chunk's activations, gradients on their way, pieces of logits, kernels' workspace
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longstraw_agents.errors import ConfigError, ModelError
from longstraw_agents.trainer import kernels
from longstraw_agents.trainer.accumulation import accumulated
from longstraw_agents.trainer.architectures import make_state, unwrap
from longstraw_agents.trainer.delta_rule import RULE
from longstraw_agents.trainer.latent import LatentState
from longstraw_agents.trainer.live import LiveBytes, nbytes
from longstraw_agents.trainer.offload import Offload, offload
from longstraw_agents.trainer.pages import HostStack, Placement
from longstraw_agents.trainer.replay import GRADIENTS, Engine, ReplayConfig
from longstraw_agents.trainer.sparse import SparseState
from longstraw_agents.trainer.standins import DeltaLike, FlashLike
from longstraw_agents.trainer.state import AttentionState, RecurrentState, Run, StateCache

#: Bytes that cuBLAS and cuBLASLt take of the allocator for their products on an H200, 32 MiB each.
LIBRARIES = 64 * 2**20


@dataclass
class Phase:
    """One phase: peak bytes of the GPU; operations of attention and matrix products; bytes that the rest moves; bytes of weights
    copied from host memory; seconds."""

    peak: int = 0
    attention: float = 0.0
    matrix: float = 0.0
    traffic: float = 0.0
    copied: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Rates:
    """A GPU's rates, by default an H200's: TFLOP/s of attention by head size (forward alone; forward and backward), of matrix
    products, and TB/s of its memory and of copies from pinned host memory (PCIe 5: 0.05, not measured here).

    Attention's are FlashAttention-4's for 16,384 queries on 262,144 keys; the rate of the nearest size given is taken.
    """

    attention: Mapping[int, tuple[float, float]] = field(
        default_factory=lambda: {64: (567.0, 578.0), 128: (676.0, 669.0), 256: (736.0, 453.0)}
    )
    matrix: float = 650.0
    memory: float = 3.3
    host: float = 0.05

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Rates:
        """From JSON: {"attention": {"128": [forward, both]}, "matrix": ..., "memory": ..., "host": ...}; else an H200's."""
        unknown = sorted(set(given) - {"attention", "matrix", "memory", "host"})
        if unknown:
            raise ConfigError(f"rates have no {', '.join(unknown)}; they are attention, matrix, memory and host")
        attention = {int(size): (float(one), float(both)) for size, (one, both) in given.get("attention", {}).items()}
        rest = {name: float(given[name]) for name in ("matrix", "memory", "host") if name in given}
        return cls(attention or H200.attention, **rest)

    def seconds(self, phase: Phase, head_size: int, backward: bool) -> float:
        """Seconds of a phase's work; copies from host memory go on beside it."""
        nearest = min(self.attention, key=lambda size: abs(size - head_size))
        attention = phase.attention / self.attention[nearest][backward]
        return max(attention + phase.matrix / self.matrix + phase.traffic / self.memory, phase.copied / self.host) / 1e12


H200 = Rates()


@dataclass(frozen=True)
class PlanConfig:
    """What is to be trained on what. context: positions of a trajectory, its `response` included. memory: bytes of one GPU.

    gpus share the context: each has 1/gpus of positions and chunk (queries gathered for an exchange are not counted).
    chunk, outputs: None lets the planner choose. stand_ins: plan for a GPU's kernels; without it for torch's own. weights: "host"
    plans with base weights in host memory (`offload`).
    """

    context: int
    memory: int
    group: int = 8
    response: int = 512
    gradient: str = "exact"
    gpus: int = 1
    place: str = "device"
    chunk: int | None = None
    pack: int = 4096
    outputs: bool | None = None
    logit_piece: int = 1024
    stand_ins: bool = True
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.gradient not in GRADIENTS:
            raise ConfigError(f"gradient is {self.gradient!r}; choose one of {', '.join(GRADIENTS)}")
        for name in ("context", "memory", "group", "response", "gpus"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.weights not in (None, "host"):
            raise ConfigError(f'weights is {self.weights!r}; plan with "host", or without it for weights on the GPU')
        if self.response >= self.context - 1:
            raise ConfigError(f"response is {self.response} of {self.context} positions; it must leave a prompt of two tokens")


@dataclass
class Forecast:
    """Of one setting. gpu, host: bytes by kind, on one GPU and in its host's memory.

    per_position: bytes that one position adds to the state on all GPUs together, by what it is: keys and values, latents (with
    their rotary keys), index keys, kept outputs. per_chunk: bytes that recurrent layers keep at each border of chunks (in
    detached mode only at the prompt's end).
    """

    chunk: int
    outputs: bool
    gpu: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    phases: dict[str, Phase] = field(default_factory=dict)
    per_position: dict[str, int] = field(default_factory=dict)
    per_chunk: int = 0

    @property
    def peak(self) -> int:
        """The largest peak of a phase."""
        return max(phase.peak for phase in self.phases.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"peak": self.peak, "seconds": sum(p.seconds for p in self.phases.values())}


def forecast(model: nn.Module, config: PlanConfig, chunk: int, outputs: bool = False, rates: Rates = H200) -> Forecast:
    """The forecast of an update of `model`, which lies on the meta device, at one chunk size."""
    return _Walk(model, config, chunk, outputs, rates).forecast()


class _Walk:
    """The runs of one update that decide its peak, on the meta device."""

    def __init__(self, model: nn.Module, config: PlanConfig, chunk: int, outputs: bool, rates: Rates) -> None:
        self.model, self.config, self.rates = model, config, rates
        self.base = unwrap(model)
        experts = any(name.endswith("experts.down_proj") for name, _ in self.base.named_parameters())
        if experts and self.base.dtype != torch.bfloat16:
            raise ModelError(f"a mixture of experts can be planned in bfloat16 only, and this one is {self.base.dtype}")
        prompt = config.context - config.response - 1  # inputs before those of the branches
        share = lambda count: -(-count // config.gpus)
        self.prompt, self.response = share(prompt), share(config.response)
        self.chunk = min(share(chunk), self.prompt)
        placement = Placement(config.place, outputs=outputs)
        self.engine = Engine(model, ReplayConfig(config.gradient, logit_piece=config.logit_piece))
        self.live = LiveBytes()
        self.found = Forecast(chunk, outputs)
        self.state: StateCache = make_state(self.base, self.prompt + self.response, placement=placement)
        self.state.frontier = self.engine.frontier
        self._records = torch.empty(0, dtype=torch.uint8, device="meta")
        self._offload: Offload | None = None
        self._copied = 0  # by the offload, before the work that is looked at

    def forecast(self) -> Forecast:
        """With base weights in host memory where that is asked for."""
        if self.config.weights != "host":
            return self._forecast()
        self._offload = offload(self.model, "meta")
        try:
            return self._forecast()
        finally:
            self._offload.undo()

    def _forecast(self) -> Forecast:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        frozen = [*(p for p in self.model.parameters() if not p.requires_grad), *self.model.buffers()]
        moments = [torch.empty_like(p) for p in trained for _ in range(2)]
        workspace = torch.empty(LIBRARIES if self.config.stand_ins else 0, dtype=torch.uint8, device="meta")
        hosted = [] if self._offload is None else self._offload.parameters
        self.live.hold([*frozen, *trained, *moments, workspace])
        self.live.move(hosted)
        kernel = FlashLike(self.live, workspace=self.config.stand_ins)
        rules = delta_rules(self.base, self.config.stand_ins)
        with kernels.standing_in(kernel), rules, self.engine.attached(), self.live, accumulated(self.model):
            self._capture()
            self._score()
            self._replay()
            if self.config.gradient == "exact":
                self._reverse()
        held = self.state.nbytes()
        kept = self._outputs()
        own = nbytes(trained)
        summed = sum(p.numel() * max(4, p.itemsize) for p in trained)  # in 16 bits only between trees: `accumulation`
        sizes = dict(weights=nbytes(frozen) - nbytes(hosted), adapter=own, optimizer=nbytes(moments), gradients=summed)
        sizes |= dict(libraries=workspace.nbytes)
        if self._offload is not None:
            layers = self._offload.layer_bytes
            sizes["copies"] = max(sum(layers[first : first + 2]) for first in range(len(layers)))
        sizes |= dict(state=held["state"] - kept + self._records.nbytes, outputs=kept, cotangent=held["cotangent"])
        elsewhere = ("state", "outputs", "cotangent") if self.config.place == "host" else ()
        self.found.host = {kind: size for kind, size in sizes.items() if kind in elsewhere}
        self.found.gpu = {kind: size for kind, size in sizes.items() if kind not in elsewhere}
        if hosted:
            self.found.host["weights"] = sum(1 << (p.nbytes - 1).bit_length() for p in hosted)  # as pinned memory is given out
        self._describe_state()
        self.found.gpu["working"] = self.found.peak - sum(self.found.gpu.values())
        settings = self.base.config.get_text_config()
        size = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
        for name, phase in self.found.phases.items():
            phase.seconds = self.rates.seconds(phase, size, name in ("replay", "reverse"))
        return self.found

    # -- phases ---------------------------------------------------------------------------------------------------------

    def _capture(self) -> None:
        """The first chunk, which makes the stacks, and the last, which reads them all; what the others do lies in between."""
        with torch.no_grad():
            self._begin()
            self._decode(Run(0, self.chunk, 1, writes=True, gradient=False, hidden=False))
            first = self._work()
            if self.chunk < self.prompt:
                self._fill_borders()
                self._fill_records()
            self._move()
            self._begin()
            self._decode(Run(self.prompt - self.chunk, self.chunk, 1, writes=True, gradient=False, hidden=False))
        last = self._work()
        self._growth = {kind: 0.5 + 0.5 * first[kind] / last[kind] if last[kind] else 1.0 for kind in last}
        if self.config.gradient == "detached" and self.chunk < self.prompt:
            self.state.drop(self.prompt - self.chunk)
        self._move()
        self._note("capture", self.prompt / self.chunk, grows=True)

    def _work(self) -> dict[str, float]:
        copied = 0 if self._offload is None else self._offload.copied - self._copied
        return {
            "attention": self.live.attention, "matrix": self.live.operations, "traffic": self.live.traffic, "copied": copied
        }  # fmt: skip

    def _begin(self) -> None:
        self.live.begin()
        self._copied = 0 if self._offload is None else self._offload.copied

    def _score(self) -> None:
        rows, runs = self._packs()
        with torch.no_grad():
            hidden = self._decode(Run(self.prompt, self.response, rows, writes=False, gradient=False))
            self.engine.head.score(hidden.flatten(0, 1), self._targets(rows * self.response), entropy=False)
        self._note("score", runs)

    def _replay(self) -> None:
        rows, runs = self._packs()
        exact = self.config.gradient == "exact"
        for layer in self.state.layers[self.state.frontier :] if exact else ():
            if isinstance(layer, AttentionState):
                layer.keys._cotangent(0)
                layer.values._cotangent(0)
        self._move()
        self._begin()
        cut = 0 if exact else self.prompt
        self._backward(Run(self.prompt, self.response, rows, writes=False, gradient=True, cut=cut), rows * self.response)
        self._note("replay", runs)

    def _reverse(self) -> None:
        self._begin()
        self._backward(Run(self.prompt - self.chunk, self.chunk, 1, writes=False, gradient=True, hidden=False), 0)
        self._note("reverse", self.prompt / self.chunk, grows=True)

    # -- runs -----------------------------------------------------------------------------------------------------------

    def _decode(self, run: Run) -> Tensor:
        hidden = self.engine.decode(np.zeros((run.rows, run.length), dtype=np.int64), run, self.state)
        if not run.gradient:
            self.state.collect()
        return hidden

    def _backward(self, run: Run, losses: int) -> None:
        """As `replay.TreeReplay` runs a chunk backward; `losses` of its tokens carry loss, the last of each row."""
        with torch.enable_grad():
            hidden = self._decode(run)
            picked = hidden.flatten(0, 1)[:losses] if losses else None
        roots = self.state.seeds()
        if picked is not None:
            c = torch.empty(losses, dtype=torch.float32, device="meta")
            roots.append((picked, self.engine.head.backward(picked, self._targets(losses), c, None)[0]))
        roots = [(output, grad) for output, grad in roots if output.requires_grad]
        if roots:
            torch.autograd.backward([r[0] for r in roots], [r[1] for r in roots])
        self.state.collect()

    def _targets(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, device="meta")

    def _packs(self) -> tuple[int, float]:
        """Rows of the branches that run together, and how often such runs come."""
        rows = max(1, min(self.config.group, self.config.pack // self.config.response))
        return rows, self.config.group / rows

    # -- state ----------------------------------------------------------------------------------------------------------

    def _attention(self) -> list[AttentionState]:
        return [layer for layer in self.state.layers if isinstance(layer, AttentionState)]

    def _fill_borders(self) -> None:
        """Recurrent layers keep a state for each chunk that is reversed: all but the last are there before that one runs."""
        for layer in self.state.layers:
            if isinstance(layer, RecurrentState):
                first = layer._borders.pop(self.chunk)
                kept = range(self.chunk, self.prompt - self.chunk, self.chunk) if self.config.gradient == "exact" else ()
                for border in [*kept, self.prompt - self.chunk]:
                    layer._borders[border] = {kind: tensor.clone() for kind, tensor in first.items()}

    def _fill_records(self) -> None:
        """Decisions (expert routing, digests of selections) are kept for every chunk; those of the middle ones, in one tensor."""
        held = sum(layer.routing.nbytes() for layer in self.state.layers if layer.routing is not None)
        held += sum(x.nbytes for layer in self.state.layers if isinstance(layer, SparseState) for x in layer._digests.values())
        middle = max(0, self.prompt - 2 * self.chunk) / self.chunk
        self._records = torch.empty(int(held * middle), dtype=torch.uint8, device="meta")

    def _describe_state(self) -> None:
        for layer in self.state.layers:
            if isinstance(layer, AttentionState):
                name = "latents" if isinstance(layer, LatentState) else "keys and values"
                named = [(name, layer.keys), (name, layer.values), *(("outputs", stack) for stack in layer.outputs or ())]
                named += [("index keys", layer.index)] if isinstance(layer, SparseState) else []
                for what, stack in named:
                    row = 0 if stack.values_PKD is None else stack.values_PKD[0].nbytes
                    self.found.per_position[what] = self.found.per_position.get(what, 0) + row
            elif isinstance(layer, RecurrentState):
                self.found.per_chunk += sum(tensor.nbytes for tensor in next(iter(layer._borders.values())).values())

    def _outputs(self) -> int:
        return sum(stack.nbytes()["state"] for layer in self._attention() for stack in layer.outputs or ())

    def _move(self) -> None:
        """Stacks in host memory take none of the GPU's."""
        for layer in self._attention():
            stacks = [layer.keys, layer.values, *(layer.outputs or ())]
            stacks += [layer.index] if isinstance(layer, SparseState) else []
            for stack in stacks:
                if isinstance(stack, HostStack):
                    self.live.move([x for x in (stack.values_PKD, stack.cotangent_PKD) if x is not None])

    def _note(self, name: str, runs: float, grows: bool = False) -> None:
        """Take in a phase of `runs` runs like the last; `grows`: those before it read less."""
        work = {kind: done * runs * (self._growth[kind] if grows else 1.0) for kind, done in self._work().items()}
        self.found.phases[name] = Phase(self.live.peak, **work)
        self._begin()


@contextmanager
def delta_rules(base: nn.Module, stand_in: bool) -> Iterator[None]:
    """Within the block the model's delta rule is the stand-in for flash-linear-attention's, or torch's own definition."""
    modules = {sys.modules[type(module).__module__] for module in base.modules()}
    before = {module: getattr(module, RULE) for module in modules if hasattr(module, RULE)}
    for module, rule in before.items():
        while hasattr(rule, "__wrapped__"):
            rule = rule.__wrapped__
        setattr(module, RULE, DeltaLike.rule if stand_in else rule)
    try:
        yield
    finally:
        for module, rule in before.items():
            setattr(module, RULE, rule)
