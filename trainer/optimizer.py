"""AdamW with the settings people expect: warm-up, a schedule, global gradient clipping, weight decay on matrices only.

The moments are kept in the parameters' own type (adapters are float32). Biases, norms and other vectors are not decayed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from longstraw_agents.errors import ConfigError, ModelError
from longstraw_agents.trainer.ranks import Ranks
from longstraw_agents.trainer.reduction import squared_norm

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimizerConfig:
    """warmup: steps of linear rise. total: the step at which "linear" and "cosine" reach `floor` times the learning rate.

    clip: largest global gradient norm (2-norm over all trained parameters); None leaves gradients as they are.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup: int = 0
    total: int | None = None
    floor: float = 0.0
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"unknown schedule {self.schedule!r}; choose one of {', '.join(SCHEDULES)}")
        if self.schedule != "constant" and (self.total is None or self.total <= self.warmup):
            raise ConfigError(
                f"schedule {self.schedule!r} ends at step `total`: set it above warmup={self.warmup}, got {self.total!r}"
            )
        for name in ("learning_rate", "epsilon"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"optimizer {name} must be a finite number above 0, got {getattr(self, name)!r}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer {name} must be at least 0 and below 1, got {getattr(self, name)!r}")
        if self.weight_decay < 0 or self.warmup < 0 or not 0 <= self.floor <= 1:
            raise ConfigError("optimizer weight_decay and warmup must be at least 0, and floor between 0 and 1")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"optimizer clip must be above 0, or None for no clipping, got {self.clip!r}")

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        if self.schedule == "constant" or self.total is None:
            return self.learning_rate
        progress = min(1.0, (step - self.warmup) / (self.total - self.warmup))
        left = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * (self.floor + (1 - self.floor) * left)


class Stepper:
    """Owns the optimizer of one model's trained parameters; one `step` clips, sets the rate and updates the weights."""

    def __init__(
        self, model: nn.Module, config: OptimizerConfig = OptimizerConfig(), ranks: Ranks | None = None,
        sharded: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """sharded: names of parameters of which each process of "ep" in `ranks` holds another part."""
        self.config, self.ranks = config, ranks or Ranks()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.sharded = {id(p) for name, p in model.named_parameters() if name in sharded}
        if not self.parameters:
            raise ModelError("the model has no parameter that requires a gradient; add an adapter, or unfreeze what is to train")
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.learning_rate,
            betas=(config.beta1, config.beta2), eps=config.epsilon,
        )  # fmt: skip
        self.steps = 0

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def gradient_norm(self) -> float:
        """The 2-norm over all gradients, those of others' experts included, before clipping (float32 or wider)."""
        given = [p for p in self.parameters if p.grad is not None]
        own = squared_norm(p.grad for p in given if id(p) not in self.sharded)  # type: ignore[misc]
        if self.sharded:
            experts = squared_norm(p.grad for p in given if id(p) in self.sharded).to(self.ranks.device)  # type: ignore[misc]
            own = own.to(experts) + self.ranks.sum(experts, "ep", "gradients")
        return math.sqrt(float(own))

    def step(self) -> float:
        """Clip and update; returns the learning rate used. Gradients are dropped."""
        rate = self.config.rate(self.steps)
        if self.config.clip is not None:
            factor = self.config.clip / max(self.gradient_norm(), self.config.clip)
            if factor < 1:
                torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.zero_grad()
        self.steps += 1
        return rate

    def state_dict(self) -> dict[str, Any]:
        """Moments and step count."""
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = int(state["steps"])
