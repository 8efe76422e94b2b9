"""The loss is a function of log-probabilities alone; its derivative with respect to each is one number per token.

After the score pass the loss is evaluated once per step on flat vectors over all loss entries of the update, and autograd gives
c_t = dL/dlogp_t (and dL/dH_t for an entropy bonus). Everything that couples tokens is settled here: sequence ratios, group and
global normalizers, tokens that several trajectories share. So any such loss is exact on any tree, any chunking, any number of
ranks, and a user's own callable `(logp, batch, entropy) -> scalar` works in place of the named ones.

Per token, with A the advantage:

    ratio     = exp(logp - old)
    surrogate = min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
    w         = min(exp(old - behaviour), mismatch_cap), a constant: the sampler's numbers differ from the trainer's
    kl        = exp(reference - logp) - (reference - logp) - 1
    loss      = -w * surrogate + kl_weight * kl - entropy_weight * H

By name, with its source and how tokens are averaged:

    grpo        arXiv:2402.03300; over a trajectory's tokens, then over the group, then over the groups
    dapo        arXiv:2503.14476; over all tokens of the update
    dr_grpo     arXiv:2503.20783; a trajectory's sum over a constant, then over the group, then over the groups
    gspo        arXiv:2507.18071; the ratio is the whole sequence's (geometric mean over its tokens); averaged as grpo
    cispo       arXiv:2506.13585; the clipped ratio is a constant in front of A * logp; averaged as dapo
    supervised  -A * logp, averaged as dapo: c_t does not depend on logp

Where one episode became several trajectories, each has a share of it as its weight. Means over trajectories use that weight;
means over tokens count each token once. So splitting an episode by its shares of tokens leaves the loss as it was (but for
gspo, whose sequence is the trajectory). One mask stands above and below every fraction: the entries themselves.

Shapes: N loss entries ordered by (trajectory, position), M trajectories, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longstraw_agents.errors import ConfigError, GroupError, NonFiniteError, TokenError
from longstraw_agents.types import Group

#: Clip range (low, high) by name, from the sources above; cispo bounds only large ratios (at 5, as arXiv:2510.13786 does).
CLIP_RANGES: dict[str, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "supervised": (0.2, 0.2),
}

_TOKEN_MEANS = frozenset({"dapo", "cispo", "supervised"})


@dataclass(frozen=True)
class LossConfig:
    """Which loss, and its constants.

    name: a key of CLIP_RANGES. clip_low, clip_high: None takes the name's. kl_weight > 0 needs reference log-probabilities.
    mismatch_cap: the largest weight for the mismatch between sampler and trainer (truncated importance sampling); None: no
    weight. length_constant: the tokens that `dr_grpo` divides a trajectory's sum by; needed by it alone.
    """

    name: str = "grpo"
    clip_low: float | None = None
    clip_high: float | None = None
    kl_weight: float = 0.0
    entropy_weight: float = 0.0
    mismatch_cap: float | None = 2.0
    length_constant: int | None = None

    def __post_init__(self) -> None:
        if self.name not in CLIP_RANGES:
            raise ConfigError(f"unknown loss {self.name!r}; choose one of {', '.join(CLIP_RANGES)}, or pass a callable")
        for field in ("clip_low", "clip_high", "kl_weight", "entropy_weight"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"loss {field} must be a finite number of at least 0, got {value!r}")
        if self.clip_range[0] > 1:
            raise ConfigError(f"loss clip_low must be at most 1 (a ratio is never negative), got {self.clip_low!r}")
        if self.mismatch_cap is not None and not self.mismatch_cap > 0:
            raise ConfigError(f"loss mismatch_cap must be above 0, or None for no weight, got {self.mismatch_cap!r}")
        if self.name == "dr_grpo" and not (self.length_constant and self.length_constant > 0):
            raise ConfigError(
                f"loss dr_grpo divides by a constant: set length_constant to the most action tokens of a trajectory, "
                f"got {self.length_constant!r}"
            )

    @property
    def clip_range(self) -> tuple[float, float]:
        """(low, high) distances of the clip bounds from 1."""
        low, high = CLIP_RANGES[self.name]
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def first_step_needs_scores(self) -> bool:
        """Whether c_t depends on current log-probabilities even where they equal the old ones.

        If not, an update's first step may take `logp = old = 0` and skip the score pass.
        """
        return self.name != "supervised" and (self.mismatch_cap is not None or self.kl_weight > 0)


@dataclass(frozen=True, eq=False)
class LossBatch:
    """What the loss of one update reads besides the current log-probabilities.

    trajectory, group [N] int64: indices below M and G. advantage, behaviour, old, weight [N] floating; reference [N] or None.
    group_weight [G]: the sum of the weights of a group's trajectories, those without a loss entry included: they add a zero to
    a mean, never a NaN. trajectory_ids [M] and group_ids [G] name what an error is about.
    """

    trajectory: Tensor
    group: Tensor
    advantage: Tensor
    behaviour: Tensor
    old: Tensor
    reference: Tensor | None
    weight: Tensor
    group_weight: Tensor
    trajectory_ids: tuple[str, ...]
    group_ids: tuple[str, ...]

    @property
    def token_counts(self) -> Tensor:
        """[M] int64: loss entries of each trajectory."""
        return torch.bincount(self.trajectory, minlength=len(self.trajectory_ids))

    def name(self, entry: int) -> str:
        """The group and trajectory of a loss entry, for messages."""
        return f"group {self.group_ids[int(self.group[entry])]}, trajectory {self.trajectory_ids[int(self.trajectory[entry])]}"


#: A loss: (logp [N], batch, entropy [N] or None) -> a scalar, or a scalar and metrics.
Loss: TypeAlias = Callable[[Tensor, LossBatch, Tensor | None], "Tensor | tuple[Tensor, dict[str, float]]"]


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The loss and its derivatives: logp [N] is c_t, entropy [N] is dL/dH_t or None where no entropy was given."""

    loss: float
    logp: Tensor
    entropy: Tensor | None
    metrics: dict[str, float]


def make_batch(
    groups: Sequence[tuple[Group, Sequence[npt.NDArray[np.float64]]]],
    old: Tensor,
    reference: Tensor | None = None,
) -> LossBatch:
    """The batch of `Prepared.kept` groups, on the device and in the type of `old` [N].

    Entries run over the groups' trajectories in order, each by position: the order of a PrefixTree of the same trajectories,
    and of several trees one after another. Raises GroupError for a group without a loss token, TokenError where numbers of
    entries differ.
    """
    trajectories = [(g, t) for g, (group, _) in enumerate(groups) for t in group.trajectories]
    advantages = [a for _, of_group in groups for a in of_group]
    counts = [int(t.action_mask.sum()) for _, t in trajectories]
    if counts != [len(a) for a in advantages] or sum(counts) != len(old):
        raise TokenError(
            f"{sum(counts)} loss positions, {sum(map(len, advantages))} advantages and {len(old)} old log-probabilities do not "
            "fit together; give one of each for every loss position"
        )
    with_loss = {g for count, (g, _) in zip(counts, trajectories, strict=True) if count}
    for index, (group, _) in enumerate(groups):
        if index not in with_loss:
            raise GroupError(f"group {group.group_id} has no token with loss; leave it out of the update")
    repeat = torch.tensor(counts, dtype=torch.int64)
    of_group = torch.tensor([g for g, _ in trajectories], dtype=torch.int64)
    weights = torch.tensor([t.weight for _, t in trajectories], dtype=torch.float64)
    behaviour = np.concatenate([np.zeros(0, np.float32), *(t.behaviour[t.action_mask] for _, t in trajectories)])
    return LossBatch(
        trajectory=torch.arange(len(counts)).repeat_interleave(repeat).to(old.device),
        group=of_group.repeat_interleave(repeat).to(old.device),
        advantage=torch.from_numpy(np.concatenate([np.zeros(0), *advantages])).to(old),
        behaviour=torch.from_numpy(behaviour).to(old),
        old=old,
        reference=reference,
        weight=weights.repeat_interleave(repeat).to(old),
        group_weight=torch.zeros(len(groups), dtype=torch.float64).index_add(0, of_group, weights).to(old),
        trajectory_ids=tuple(t.trajectory_id for _, t in trajectories),
        group_ids=tuple(group.group_id for group, _ in groups),
    )


def coefficients(loss: LossConfig | Loss, logp: Tensor, batch: LossBatch, entropy: Tensor | None = None) -> Coefficients:
    """Evaluates `loss` at logp [N] (and entropy [N]) and differentiates it with respect to both.

    Raises NonFiniteError, naming group and trajectory, where an input, the loss or a derivative is not finite.
    """
    logp = logp.detach().requires_grad_()
    entropy = None if entropy is None else entropy.detach().requires_grad_()
    with torch.enable_grad():
        value = policy_loss(logp, batch, loss, entropy) if isinstance(loss, LossConfig) else loss(logp, batch, entropy)
        scalar, metrics = value if isinstance(value, tuple) else (value, {})
        if scalar.numel() != 1:
            raise ConfigError(f"a loss must return one number, got a tensor of shape {tuple(scalar.shape)}")
        if not bool(torch.isfinite(scalar)):
            raise NonFiniteError(f"the loss is {scalar.item()} over {len(logp)} tokens of groups {', '.join(batch.group_ids)}")
        if not scalar.requires_grad:
            raise ConfigError("the loss does not depend on the log-probabilities; compute it from `logp` without detaching it")
        wanted = (logp,) if entropy is None else (logp, entropy)
        derivatives = torch.autograd.grad(scalar, wanted, materialize_grads=True)
    for derivative in derivatives:
        _refuse_nonfinite("the loss's derivative", derivative, batch)
    return Coefficients(float(scalar.detach()), derivatives[0], derivatives[1] if entropy is not None else None, metrics)


def policy_loss(
    logp: Tensor, batch: LossBatch, config: LossConfig, entropy: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """The named loss at logp [N] float32 or wider, and what a practitioner watches.

    Raises NonFiniteError for inputs that are not finite (naming group and trajectory) and ConfigError where the configuration
    needs a vector that is missing.
    """
    _check_inputs(logp, batch, config, entropy)
    logp = logp if logp.dtype == torch.float64 else logp.float()
    scale = _scales(batch, config).to(logp)
    advantage, metrics = batch.advantage.to(logp), {"tokens": float(len(logp)), "trajectories": float(len(batch.trajectory_ids))}
    metrics["masked_trajectories"] = float((batch.token_counts == 0).sum())
    if config.name == "supervised":
        per_token = -advantage * logp
    else:
        per_token = -_mismatch_weight(batch, config, metrics).to(logp) * _surrogate(logp, batch, config, metrics)
    if config.kl_weight and batch.reference is not None:
        gap = batch.reference.to(logp) - logp
        kl = torch.expm1(gap) - gap
        per_token = per_token + config.kl_weight * kl
        metrics["kl_reference"] = _mean(kl)
    if entropy is not None:
        per_token = per_token - config.entropy_weight * entropy.to(logp)
        metrics["entropy"] = _mean(entropy)
    loss = (scale * per_token).sum()
    if not bool(torch.isfinite(loss)):
        _refuse_nonfinite("the loss", per_token, batch)
    return loss, metrics | {"loss": float(loss.detach())}


def _scales(batch: LossBatch, config: LossConfig) -> Tensor:
    """[N]: each entry's share, so that the loss is sum(scale * per_token)."""
    if config.name in _TOKEN_MEANS:
        return torch.full_like(batch.weight, 1.0 / max(len(batch.weight), 1))
    per_group = 1.0 / (batch.group_weight[batch.group] * max(len(batch.group_ids), 1))
    if config.name == "dr_grpo":
        assert config.length_constant is not None
        return per_group / config.length_constant
    return batch.weight * per_group / batch.token_counts[batch.trajectory]


def _surrogate(logp: Tensor, batch: LossBatch, config: LossConfig, metrics: dict[str, float]) -> Tensor:
    """[N]: the clipped objective of each token, before mismatch weight and scale."""
    difference = logp - batch.old.to(logp)
    log_ratio = _sequence_log_ratio(difference, batch) if config.name == "gspo" else difference
    ratio, advantage = log_ratio.exp(), batch.advantage.to(logp)
    low, high = config.clip_range
    clipped = ratio.clamp(1 - low, 1 + high)
    if config.name == "cispo":
        surrogate = clipped.detach() * advantage * logp
        too_low, too_high = ratio < 1 - low, ratio > 1 + high
    else:
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        too_low, too_high = (ratio < 1 - low) & (advantage < 0), (ratio > 1 + high) & (advantage > 0)
    metrics["ratio_mean"] = _mean(ratio)
    metrics["ratio_min"], metrics["ratio_max"] = _extremes(ratio)
    metrics["clip_low_fraction"], metrics["clip_high_fraction"] = _mean(too_low), _mean(too_high)
    metrics["clip_fraction"] = metrics["clip_low_fraction"] + metrics["clip_high_fraction"]
    metrics["kl_old"] = _mean(torch.expm1(difference) - difference)
    metrics["advantage_absolute"] = _mean(advantage.abs())
    return surrogate


def _sequence_log_ratio(difference: Tensor, batch: LossBatch) -> Tensor:
    """[N]: the mean log-ratio of each entry's trajectory, with the entry's own derivative (GSPO-token, section 4.3).

    Where the advantage is one number per trajectory, value and gradient are those of the sequence form.
    """
    sums = torch.zeros(len(batch.trajectory_ids), dtype=difference.dtype, device=difference.device)
    means = sums.index_add(0, batch.trajectory, difference.detach()) / batch.token_counts.clamp(min=1)
    return means[batch.trajectory] + difference - difference.detach()


def _mismatch_weight(batch: LossBatch, config: LossConfig, metrics: dict[str, float]) -> Tensor:
    """[N]: min(exp(old - behaviour), cap), without a gradient; ones where no cap is set."""
    gap = (batch.old - batch.behaviour).detach()
    weight = gap.exp()
    metrics["mismatch_kl"] = _mean(weight - 1 - gap)
    metrics["mismatch_max"] = _extremes(gap.abs())[1]
    if config.mismatch_cap is None:
        return torch.ones_like(weight)
    metrics["mismatch_capped_fraction"] = _mean(weight > config.mismatch_cap)
    return weight.clamp(max=config.mismatch_cap)


def _check_inputs(logp: Tensor, batch: LossBatch, config: LossConfig, entropy: Tensor | None) -> None:
    """Fails closed on vectors that are missing, of another length, or not finite."""
    if config.kl_weight and batch.reference is None:
        raise ConfigError(f"loss kl_weight is {config.kl_weight}, but no reference log-probabilities were given")
    if config.entropy_weight and entropy is None:
        raise ConfigError(f"loss entropy_weight is {config.entropy_weight}, but no entropies were given")
    inputs = {"the log-probability": logp, "the advantage": batch.advantage}
    if config.name != "supervised":
        inputs |= {"the old log-probability": batch.old, "the behaviour log-probability": batch.behaviour}
    if config.kl_weight and batch.reference is not None:
        inputs["the reference log-probability"] = batch.reference
    if entropy is not None:
        inputs["the entropy"] = entropy
    for what, vector in inputs.items():
        if vector.shape != batch.trajectory.shape:
            raise TokenError(f"{what} has shape {tuple(vector.shape)}, the batch {tuple(batch.trajectory.shape)}")
        _refuse_nonfinite(what, vector, batch)


def _refuse_nonfinite(what: str, vector: Tensor, batch: LossBatch) -> None:
    """Raises NonFiniteError that names the first trajectory where `vector` [N] is not finite."""
    wrong = torch.nonzero(~torch.isfinite(vector.detach())).flatten()
    if len(wrong):
        entry = int(wrong[0])
        raise NonFiniteError(
            f"{what} is {float(vector.detach()[entry])} in {batch.name(entry)} (at loss token {entry}, and {len(wrong)} in all); "
            "no step was made"
        )


def _mean(vector: Tensor) -> float:
    """The mean, 0 of nothing."""
    return float(vector.detach().double().mean()) if len(vector) else 0.0


def _extremes(vector: Tensor) -> tuple[float, float]:
    """Smallest and largest, 0 of nothing."""
    return (float(vector.detach().min()), float(vector.detach().max())) if len(vector) else (0.0, 0.0)
