"""What fits: the chunk of an update, the longest context, and what to change where the asked-for one does not fit.

Idea: a peak grows linearly with the chunk and, beyond a few blocks of the prefix, with the context. So two forecasts give a line,
the line gives the setting, and a forecast at that setting confirms it. Keeping attention's outputs saves an exact update about a
quarter of its time, so it is tried first, with chunks of at least `LEAST_KEPT`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from longstraw_agents.trainer.architectures import unwrap
from longstraw_agents.trainer.plan import H200, Forecast, PlanConfig, Rates, forecast

#: Share of a GPU's memory that an update can't have: the CUDA context, and what its allocator can't use of its blocks.
RESERVE = 0.03
CHUNKS = (16384, 8192, 4096, 2048, 1024, 512, 256)
LEAST_KEPT = 2048
_PROBES = (512, 1024)  # chunks of the two forecasts that give the line

Say = Callable[[str], None]


@dataclass(frozen=True)
class Change:
    """Something to change, and the forecast peak under it (bytes of one GPU)."""

    what: str
    peak: int
    fits: bool


@dataclass
class Plan:
    """The chosen setting with its forecast. largest: positions of the longest trajectory for which some setting fits."""

    config: PlanConfig
    rates: Rates
    budget: int
    forecast: Forecast
    largest: int
    changes: list[Change] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether the chosen setting's peak is within the budget."""
        return self.forecast.peak <= self.budget

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"fits": self.fits, "forecast": self.forecast.to_dict()}


def plan(model: nn.Module, config: PlanConfig, rates: Rates = H200, say: Say = lambda text: None) -> Plan:
    """Plan an update of `model`, which lies on the meta device (`models.without_weights`). `say` is told of each step."""
    budget = int(config.memory * (1 - RESERVE))
    chosen = _choose(model, config, budget, rates, say)
    frugal = replace(config, chunk=config.chunk or min(_PROBES[1], chosen.chunk), outputs=config.outputs or False)
    say("looking for the longest context that fits")
    found = Plan(config, rates, budget, chosen, _largest(model, frugal, budget, rates))
    if not found.fits:
        found.changes = list(_changes(model, frugal, budget, rates, say))
    return found


def _choose(model: nn.Module, config: PlanConfig, budget: int, rates: Rates, say: Say) -> Forecast:
    """The largest chunk that fits, with kept outputs where that leaves enough of one; a usual one where none fits."""
    kept = [config.outputs] if config.outputs is not None else [True, False] if config.gradient == "exact" else [False]
    for outputs in kept:
        if config.chunk is not None:
            chunks, least = [config.chunk], config.chunk
        else:
            least = LEAST_KEPT if outputs and len(kept) > 1 else CHUNKS[-1]
            say(f"forecasting chunks of {' and '.join(map(str, _PROBES))}, outputs {'kept' if outputs else 'not kept'}")
            low, high = (forecast(model, config, chunk, outputs, rates).peak for chunk in _PROBES)
            slope = (high - low) / (_PROBES[1] - _PROBES[0])
            line = lambda chunk, high=high, slope=slope: high + slope * (chunk - _PROBES[1])
            useful = [c for c in CHUNKS if c >= least and c < 2 * config.context]
            chunks = [c for c in useful if line(c) <= budget] or useful[-1:]
        for chunk in chunks:
            say(f"forecasting a chunk of {chunk}")
            found = forecast(model, config, chunk, outputs, rates)
            if found.peak <= budget:
                return found
    return found if config.chunk is not None else forecast(model, config, min(_PROBES[1], config.context), outputs, rates)


def _largest(model: nn.Module, config: PlanConfig, budget: int, rates: Rates) -> int:
    """The context at which the line through two forecasts meets the budget; 0 where even a short one does not fit."""
    assert config.chunk is not None
    least = 4 * config.chunk + config.response + 1
    near = max(config.context, least)
    chunk, outputs = config.chunk, config.outputs or False
    first, second = (forecast(model, replace(config, context=n), chunk, outputs, rates).peak for n in (near, 2 * near))
    slope = (second - first) / near
    if slope <= 0:
        return 2 * near
    length = int(near + (budget - first) / slope)
    return length if length >= least else 0


def _changes(model: nn.Module, config: PlanConfig, budget: int, rates: Rates, say: Say) -> Iterator[Change]:
    """Each change by itself, with its peak."""
    assert config.chunk is not None
    base: Any = unwrap(model)

    def change(what: str, **settings: Any) -> Change:
        say(f"trying: {what}")
        changed = replace(config, **settings)
        peak = forecast(model, changed, changed.chunk or CHUNKS[-1], False, rates).peak
        return Change(what, peak, peak <= budget)

    if config.place == "device":
        yield change("states in host memory (trainer.replay.placement.place = 'host')", place="host")
    if config.weights is None and base.config.get_text_config().num_hidden_layers > 2 and hasattr(model, "peft_config"):
        yield change("base weights in host memory (model.weights = 'host')", weights="host")
    if config.gradient == "exact":
        yield change("gradient = 'detached' (biased: see docs/exact-and-detached.md)", gradient="detached")
        with upper_half(model) as layers:
            yield change(f"adapting only layers {layers[0]} to {layers[1]}")
    if min(config.group, config.pack // config.response) > 1:
        yield change(f"branches replayed one at a time (trainer.replay.pack = {config.response})", pack=config.response)
    for gpus in (2, 4, 8):
        if gpus > config.gpus:
            yield change(f"{gpus} GPUs that share the context (parallel.cp = {gpus})", gpus=gpus)


@contextmanager
def upper_half(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Within the block only parameters of the decoder's upper half train; gives its first and last layer."""
    layers = list(unwrap(model).get_decoder().layers)  # type: ignore[operator]
    frozen = [p for layer in layers[: len(layers) // 2] for p in layer.parameters() if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield len(layers) // 2, len(layers) - 1
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
