"""NaN and infinities put into an update, one at a time: nothing may be applied, and the error must name the batch.

    python benchmarks/nonfinite.py --record

Places: a reward, a behaviour log-probability, the model's log-probabilities (its head), the loss, the loss's derivative, and the
gradient of one parameter. A trial is bad if no NonFiniteError comes, a weight or the version changes, or the group is not named.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers

from longstraw_agents import figures
from longstraw_agents.errors import NonFiniteError
from longstraw_agents.trainer.loss import LossBatch
from longstraw_agents.trainer.models import LoraSettings, add_adapter
from longstraw_agents.trainer.update import Trainer
from longstraw_agents.types import Group, StopReason, Task, Trajectory

VALUES = (math.nan, math.inf, -math.inf)


def make_model() -> Any:
    """A tiny model with an adapter."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return add_adapter(transformers.LlamaForCausalLM(config).eval(), LoraSettings(rank=4))


def make_group() -> Group:
    """Three trajectories with a shared prompt and rewards that differ."""
    rng = np.random.default_rng(0)
    prompt, members = rng.integers(0, 61, 12), []
    for index in range(3):
        tokens = np.concatenate([prompt, rng.integers(0, 61, 6)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        members.append(
            Trajectory(
                f"t{index}", tokens, mask, np.where(mask, -4.0, np.nan).astype(np.float32),
                np.where(mask, 0, -1).astype(np.int32), (len(tokens),), (float(index),), float(index), StopReason.ANSWERED,
            )  # fmt: skip
        )
    return Group("g7", Task("tests/Nonfinite", 0), tuple(members))


def poisoned_member(group: Group, **changes: Any) -> Group:
    """The group with its second trajectory changed."""
    first, second, third = group.trajectories
    return replace(group, trajectories=(first, replace(second, **changes), third))


def cases(value: float) -> Iterator[tuple[str, Callable[[Any], Trainer], Group]]:
    """(name, how the trainer is made of a model, the group)."""
    group = make_group()
    yield "reward", lambda model: Trainer(model), poisoned_member(group, reward=value)
    behaviour = group.trajectories[1].behaviour.copy()
    behaviour[14] = value
    yield "behaviour", lambda model: Trainer(model), poisoned_member(group, behaviour=behaviour)

    def head(model: Any) -> Trainer:
        model.get_base_model().lm_head.weight.data[3, 5] = value
        return Trainer(model)

    yield "log-probability", head, group

    def loss(logp: torch.Tensor, batch: LossBatch, entropy: torch.Tensor | None) -> torch.Tensor:
        return logp.sum() * value

    yield "loss", lambda model: Trainer(model, loss=loss), group

    def derivative(logp: torch.Tensor, batch: LossBatch, entropy: torch.Tensor | None) -> torch.Tensor:
        return _Poison.apply(logp, value).sum()  # type: ignore[no-untyped-call,no-any-return]

    yield "derivative", lambda model: Trainer(model, loss=derivative), group

    def gradient(model: Any) -> Trainer:
        parameter = next(p for p in model.parameters() if p.requires_grad)
        parameter.register_hook(lambda grad: grad * value)
        return Trainer(model)

    yield "gradient", gradient, group


class _Poison(torch.autograd.Function):
    """The identity, with a derivative of one's choice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        """Its input, unchanged."""
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """A gradient that is not finite."""
        return grad * ctx.value, None


def fault_of(make: Callable[[Any], Trainer], group: Group) -> str:
    """What is wrong with how an update met the poison, or an empty string."""
    trainer = make(make_model())
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    try:
        trainer.update([group])
    except NonFiniteError as error:
        fault = "" if "g7" in str(error) or "t1" in str(error) else f"the batch is not named: {error}"
    except Exception as error:
        fault = f"{type(error).__name__} in place of NonFiniteError: {error}"
    else:
        fault = "no error"
    changed = [n for n, p in trainer.model.named_parameters() if not torch.equal(p.nan_to_num(7.0), before[n].nan_to_num(7.0))]
    if changed or trainer.version or trainer.stepper.steps:
        fault += f" {len(changed)} weights changed, version {trainer.version}"
    return fault


def main() -> None:
    """All places with all values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write operate.nonfinite_updates_applied")
    arguments = parser.parse_args()
    bad, count = 0, 0
    for value in VALUES:
        for name, make, group in cases(value):
            fault = fault_of(make, group)
            count, bad = count + 1, bad + bool(fault)
            print(f"{name:<16} {value:<5} {fault or 'refused, nothing changed'}")
    print(f"{bad} of {count} trials are bad")
    if arguments.record:
        figures.record("operate.nonfinite_updates_applied", bad, "updates", trials=count)


if __name__ == "__main__":
    main()
