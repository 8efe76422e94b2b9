"""Verification: our gradient against conventional training, for a user's own model.

Idea: on a small tree that fits both ways, run the exact replay and the full-sequence forward pass of the untouched model with the
same loss, and compare log-probabilities and gradients parameter by parameter. A type that rounds coarsely can't be compared
with itself, so for 16-bit types both ways are held against conventional training in float32: ours may err as conventional does,
not more. The same comparison with the reverse pass off must fail, or it would see nothing.

    E1        every pass finished, all numbers are finite
    E2        replayed log-probabilities equal the model's own full-sequence ones
    E3        several processes' gradient equals one process's, where there are several
    E4        the whole gradient equals conventional training's
    decisions where experts are routed or keys selected: the share that our runs would have decided otherwise. All ways are given
              the decisions of the reference (see `decisions`), or chance would be compared with chance
    control   with cotangents cut at node borders (`gradient="detached"`) E4 fails; not applicable where all trained parameters
              lie above the last state

Shapes: N loss tokens of all trajectories.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longstraw_agents.errors import ConfigError
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import comparison, conventional
from longstraw_agents.trainer.advantages import prepare
from longstraw_agents.trainer.architectures import unwrap
from longstraw_agents.trainer.comparison import Difference
from longstraw_agents.trainer.decisions import Decisions, differing
from longstraw_agents.trainer.lifting import lifted
from longstraw_agents.trainer.loss import LossConfig, make_batch, policy_loss
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.ranks import Ranks
from longstraw_agents.trainer.receipt import versions
from longstraw_agents.trainer.reduction import sum_gradients
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.trainer.stamps import trains_states
from longstraw_agents.types import Group, StopReason, Task, Trajectory

#: Largest error of a gradient by type: float64 of any parameter, float32 of the whole; 16-bit types against conventional's own.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}
#: Largest difference of a log-probability, in nats.
LOGP_BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-3}
#: Largest share of decisions that rounding and ties may flip; in 16-bit types this much above twice conventional's own.
FLIPS = 1e-2
#: Largest ratio of our error to conventional training's own error, where neither is exact.
RATIO = 1.25


@dataclass(frozen=True)
class VerifyConfig:
    """The tree that is verified on. length: tokens that all share; branch: tokens of the longest branch; group: trajectories.

    chunk: inputs of a run; None takes about a third of `length`, so that chunks do not divide it. bits: 8 also measures what
    keeping keys and values in 8 bits does to the gradient.
    """

    length: int = 256
    branch: int = 48
    group: int = 4
    chunk: int | None = None
    seed: int = 0
    bits: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("length", 8), ("branch", 8), ("group", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"verify {name} is {getattr(self, name)}; it must be at least {least}")
        if self.chunk is not None and self.chunk < 1:
            raise ConfigError(f"verify chunk is {self.chunk}; it counts tokens and must be at least 1")

    @property
    def replay(self) -> ReplayConfig:
        """How the tree is run."""
        return ReplayConfig(chunk=self.chunk or self.length // 3 + 1)


@dataclass(frozen=True)
class Check:
    """One piece of evidence: the number, the bound it must not exceed, and whether it holds; None: not applicable."""

    holds: bool | None
    value: float
    bound: float
    what: str


@dataclass(frozen=True)
class Verification:
    """What was verified and what came out. classes: by parameter class, our error and conventional's own where there is one.

    rounded: of the update with keys and values in 8 bits, the gradient's relative error and cosine and the log-probabilities'
    largest difference in nats, against the reference; a measurement, not a check.
    """

    model: str
    setting: dict[str, Any]
    checks: dict[str, Check]
    classes: list[dict[str, Any]]
    flips: dict[str, int]
    seconds: float
    rounded: dict[str, float] | None = None
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    @property
    def holds(self) -> bool:
        """Whether no check failed."""
        return all(check.holds is not False for check in self.checks.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"holds": self.holds}


# -- the two ways ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One way's result: loss, log-probabilities [N] and gradients by parameter.

    flips: decisions that our recomputations would have made otherwise than our captures. otherwise: the share of decisions, by
    kind, that differ from those imposed.
    """

    loss: float
    logp_N: Tensor
    gradient: dict[str, Tensor]
    flips: dict[str, int] = field(default_factory=dict)
    otherwise: dict[str, float] = field(default_factory=dict)


def ours(
    model: nn.Module, trajectories: Sequence[Trajectory], loss: conventional.Loss, replay: ReplayConfig,
    ranks: Ranks | None = None, decisions: Decisions | None = None,
) -> Outcome:  # fmt: skip
    """Score, loss, replay and reverse on the tree of `trajectories`. The parameters' `.grad` is cleared before and after.

    ranks: the processes that share it, each in this call. decisions: routing and selection that are imposed.
    """
    model.zero_grad()
    work = Engine(model, replay, ranks).open(segment(trajectories))
    counts = Counter[str]() if decisions is None else decisions.impose_on(work)
    leaf_N = work.score().logp.detach().requires_grad_()
    value = loss(leaf_N)
    (c_N,) = torch.autograd.grad(value, leaf_N)
    seen_N = work.backward(c_N).logp  # not a number where no coefficient asked for a replay
    seen_N = torch.where(seen_N.isnan(), leaf_N.detach(), seen_N)
    if ranks is not None:
        sum_gradients([(name, p) for name, p in model.named_parameters() if p.requires_grad], ranks)
    gradient = comparison.gradients(model)
    model.zero_grad()
    return Outcome(value.item(), seen_N, gradient, work.state.flips(), differing(counts))


def theirs(
    model: nn.Module, trajectories: Sequence[Trajectory], loss: conventional.Loss, decisions: Decisions | None = None
) -> Outcome:
    """Conventional training's loss and gradient, with `decisions` imposed if they are given.

    The parameters' `.grad` is cleared before and after.
    """
    model.zero_grad()
    with nullcontext(Counter[str]()) if decisions is None else decisions.imposed(model) as counts:
        value, logp_N = conventional.backward(model, trajectories, loss, in_series=True)
    gradient = comparison.gradients(model)
    model.zero_grad()
    return Outcome(value.item(), logp_N, gradient, otherwise=differing(counts))


# -- data -----------------------------------------------------------------------------------------------------------------


def make_group(vocabulary: int, config: VerifyConfig) -> Group:
    """A group on a tree three nodes deep: all share `length` tokens, every second trajectory shares an inner branch too.

    Tokens are drawn at random; a tenth of the shared ones and half of the branches' carry loss; branches are of unequal length.
    """
    draw = np.random.default_rng(config.seed)
    new: Callable[[int], np.ndarray] = lambda count: draw.integers(0, vocabulary, count)
    shared, inner = new(config.length), new(max(2, config.branch // 3))
    sampled = np.r_[draw.random(config.length) < 0.1, draw.random(len(inner)) < 0.5]
    members = []
    for index in range(config.group):
        stem = np.r_[shared, inner] if index % 2 == 0 else shared
        length = 1 if index == 1 and config.group > 2 else max(2, config.branch - 5 * (index % 8))
        tokens = np.r_[stem, new(length)].astype(np.int32)
        mask = np.r_[sampled[: len(stem)], draw.random(length) < 0.5]
        mask[0], mask[-1] = False, True
        members.append(_trajectory(f"verify-{index}", tokens, mask, float(draw.normal())))
    return Group("verify", Task("longstraw/verify", config.seed), tuple(members))


def _trajectory(name: str, tokens: np.ndarray, mask: np.ndarray, reward: float) -> Trajectory:
    return Trajectory(
        name, tokens, mask, np.where(mask, 0, np.nan).astype(np.float32), np.where(mask, 0, -1).astype(np.int32),
        (len(tokens),), (0.0,), reward, StopReason.ANSWERED,
    )  # fmt: skip


def make_loss(group: Group, logp_N: Tensor, seed: int) -> conventional.Loss:
    """The default policy loss of the group, with old log-probabilities around `logp_N`: some tokens lie inside the clip range,
    some outside, and none so near to its ends that rounding could move it across."""
    kept = prepare([group]).kept
    draw = np.random.default_rng(seed + 1)
    offset_N = draw.choice([-0.5, -0.05, 0.05, 0.5], len(logp_N))
    old_N = logp_N.detach().double() + torch.as_tensor(offset_N, device=logp_N.device)
    batch = make_batch(kept, old_N)
    config = LossConfig(mismatch_cap=None)
    return lambda values_N: policy_loss(values_N, batch, config)[0]


# -- the verdict ----------------------------------------------------------------------------------------------------------


def verify(
    model: Any, config: VerifyConfig = VerifyConfig(), name: str = "", say: Callable[[str], None] = lambda text: None,
    ranks: Ranks | None = None,
) -> Verification:  # fmt: skip
    """Verify a transformers causal language model, plain or with PEFT adapters, in its own type, on its own device.

    What requires grad is what is verified. Raises ModelError for a model that is refused. `say` is told what runs. ranks: this
    is process 0 of several, the others of which are in `take_part`; they establish E3.
    """
    started = time.perf_counter()
    base: Any = unwrap(model)
    dtype = base.get_input_embeddings().weight.dtype
    group = make_group(base.config.get_text_config().vocab_size, config)
    exact = config.replay
    with _ready(model), lifted(dtype == torch.float64):
        say("conventional training")
        wide = copy.deepcopy(model).float() if dtype.itemsize < 4 else model
        loss, decisions = _prepare(wide, group, config)
        reference = theirs(wide, group.trajectories, loss)
        own = None if wide is model else theirs(model, group.trajectories, loss, decisions)
        del wide
        say("exact replay")
        replayed = ours(model, group.trajectories, loss, exact, decisions=decisions)
        shared: Outcome | None = None
        if ranks is not None and ranks.world > 1:
            say(f"exact replay in {ranks.world} processes")
            shared = ours(model, group.trajectories, loss, exact, ranks, decisions)
        rounded = None
        if config.bits is not None:
            say(f"exact replay with keys and values in {config.bits} bits")
            placement = Placement(bits=config.bits)
            coarse = ours(model, group.trajectories, loss, replace(exact, placement=placement), decisions=decisions)
            found = comparison.compare(coarse.gradient, reference.gradient)
            distance = float((coarse.logp_N.double() - reference.logp_N.double()).abs().max())
            rounded = {"global_relative": found.global_relative, "cosine": found.cosine, "logp": distance}
        say("negative control: without the reverse pass")
        detached = ReplayConfig("detached", exact.chunk, exact.pack)
        control = ours(model, group.trajectories, loss, detached, decisions=decisions)
    checks, classes = _judge(model, dtype, reference, own, replayed, control)
    if shared is not None and ranks is not None:
        checks["E3"] = _judge_shared(dtype, ranks.world, shared, replayed, reference, own)
    return Verification(
        name or getattr(base.config, "name_or_path", "") or type(base).__name__, describe(model) | asdict(config) |
        {"chunk": exact.chunk, "versions": versions()}, checks, classes, replayed.flips, time.perf_counter() - started, rounded,
    )  # fmt: skip


def take_part(model: Any, config: VerifyConfig, ranks: Ranks) -> None:
    """What the processes other than the first do while it verifies."""
    dtype = unwrap(model).get_input_embeddings().weight.dtype
    group = make_group(unwrap(model).config.get_text_config().vocab_size, config)
    with _ready(model), lifted(dtype == torch.float64):
        loss, decisions = _prepare(copy.deepcopy(model).float() if dtype.itemsize < 4 else model, group, config)
        ours(model, group.trajectories, loss, config.replay, ranks, decisions)


def _judge_shared(
    dtype: torch.dtype, count: int, shared: Outcome, alone: Outcome, reference: Outcome, own: Outcome | None
) -> Check:  # fmt: skip
    """E3: against one process's gradient, or, in 16-bit types, as its own check E4 against float32."""
    if own is not None:
        scale = comparison.compare(own.gradient, reference.gradient).global_relative
        value = comparison.compare(shared.gradient, reference.gradient).global_relative / scale
        what = f"error of {count} processes' gradient over conventional's own, against float32"
        return Check(value <= RATIO, value, RATIO, what)
    difference = comparison.compare(shared.gradient, alone.gradient)
    value = difference.worst if dtype == torch.float64 else difference.global_relative
    return Check(value <= BOUNDS[dtype], value, BOUNDS[dtype], f"{count} processes' gradient against one process's")


def _prepare(model: nn.Module, group: Group, config: VerifyConfig) -> tuple[conventional.Loss, Decisions]:
    """The loss around the reference's log-probabilities, and its decisions."""
    decisions = Decisions()
    with torch.no_grad(), decisions.recorded(model):
        spans = [(t.tokens, conventional.loss_positions(t)) for t in group.trajectories]
        logp_N = torch.cat([conventional.log_probabilities(model, *span) for span in spans])
    return make_loss(group, logp_N, config.seed), decisions


class _ready:
    """Within the block the model is in evaluation mode and its experts run eagerly where float64 needs it."""

    def __init__(self, model: Any) -> None:
        base: Any = unwrap(model)
        self._model, self._config = model, base.config.get_text_config()

    def __enter__(self) -> None:
        self._training = self._model.training
        self._experts = getattr(self._config, "_experts_implementation", None)
        if self._experts is not None and next(self._model.parameters()).dtype == torch.float64:
            self._config._experts_implementation = "eager"  # the grouped one refuses float64
        self._model.eval()

    def __exit__(self, *_: object) -> None:
        self._model.train(self._training)
        if self._experts is not None:
            self._config._experts_implementation = self._experts


def describe(model: nn.Module) -> dict[str, Any]:
    """What a verification's result depends on besides data and versions."""
    base: Any = unwrap(model)
    config = base.config.get_text_config()
    weight = base.get_input_embeddings().weight
    trained = sorted({comparison.parameter_class(n) for n, p in model.named_parameters() if p.requires_grad})
    return {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": weight.device.type,
        "trained": trained,
    }


def _judge(
    model: Any, dtype: torch.dtype, reference: Outcome, own: Outcome | None, replayed: Outcome, control: Outcome
) -> tuple[dict[str, Check], list[dict[str, Any]]]:
    """The checks, and the table of parameter classes."""
    difference = comparison.compare(replayed.gradient, reference.gradient)
    detached = comparison.compare(control.gradient, reference.gradient)
    own_difference = None if own is None else comparison.compare(own.gradient, reference.gradient)
    finite = all(bool(torch.isfinite(values).all()) for values in (replayed.logp_N, *replayed.gradient.values()))
    checks = {"E1": Check(finite, 0.0 if finite else 1.0, 0.0, "passes with numbers that are not finite")}
    if own is None or own_difference is None:
        bound, logp_bound = BOUNDS[dtype], LOGP_BOUNDS[dtype]
        distance = float((replayed.logp_N - reference.logp_N).abs().max())
        checks["E2"] = Check(distance <= logp_bound, distance, logp_bound, "largest difference of a log-probability, nats")
        measure = lambda d: d.worst if dtype == torch.float64 else d.global_relative
        what = f"worst parameter, {difference.worst_name}" if dtype == torch.float64 else "relative error of the whole gradient"
    else:
        rms = lambda outcome: float((outcome.logp_N.double() - reference.logp_N.double()).square().mean().sqrt())
        scale, bound = own_difference.global_relative, RATIO
        ratio = rms(replayed) / max(rms(own), 1e-12)
        checks["E2"] = Check(ratio <= RATIO, ratio, RATIO, "error of log-probabilities over conventional's own, against float32")
        measure = lambda d: d.global_relative / scale
        what = "error of the whole gradient over conventional's own, against float32"
    for kind, share in replayed.otherwise.items():
        most = FLIPS + (0.0 if own is None else 2 * own.otherwise[kind])
        what = f"share of decisions ({kind}) that differ from the reference's"
        checks[f"decisions: {kind}"] = Check(share <= most, share, most, what)
    value, off = measure(difference), measure(detached)
    checks["E4"] = Check(value <= bound, value, bound, what)
    base: Any = unwrap(model)
    applicable = trains_states(base.get_decoder())
    what = f"the same without the reverse pass, which must be above (cosine {detached.cosine:.4f})"
    checks["control"] = Check(off > bound if applicable else None, off, bound, what)
    return checks, _table(difference, own_difference, detached)


def _table(difference: Difference, own: Difference | None, detached: Difference) -> list[dict[str, Any]]:
    rows = []
    for label, found in sorted(difference.classes.items(), key=lambda item: -item[1].worst):
        row = {"class": label, "error": found.relative_error, "worst": found.worst, "worst_name": found.worst_name}
        if own is not None:
            row["conventional"] = own.classes[label].relative_error
        rows.append(row | {"detached": detached.classes[label].relative_error})
    return rows
