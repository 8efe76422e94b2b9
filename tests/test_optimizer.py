"""The optimizer's settings do what their names say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from longstraw_agents.errors import ConfigError, ModelError
from longstraw_agents.trainer.optimizer import OptimizerConfig, Stepper


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


def give_gradients(net: nn.Module, value: float) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, value)


@pytest.mark.parametrize(
    "schedule, rates",
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.1 + 0.45 * (1 - math.sqrt(0.5)), 0.1, 0.1]),
    ],
)
def test_schedules(schedule, rates):
    """Warm-up of two steps, then down to a tenth at step 6."""
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup=2, total=6, floor=0.1)
    assert [config.rate(step) for step in range(8)] == pytest.approx(rates)


def test_clipping_is_global():
    net = model()
    stepper = Stepper(net, OptimizerConfig(clip=1.0))
    give_gradients(net, 2.0)
    assert stepper.gradient_norm() == pytest.approx(2.0 * math.sqrt(12 + 4 + 4 + 4))
    seen = {}
    stepper.optimizer.register_step_pre_hook(lambda *_: seen.update({n: p.grad.clone() for n, p in net.named_parameters()}))
    stepper.step()
    assert math.sqrt(sum(float((g**2).sum()) for g in seen.values())) == pytest.approx(1.0)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("clip, value", [(None, 2.0), (100.0, 2.0)])
def test_small_gradients_are_left(clip, value):
    net = model()
    stepper = Stepper(net, OptimizerConfig(clip=clip))
    give_gradients(net, value)
    seen = []
    stepper.optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in net.parameters()))
    stepper.step()
    assert all(bool((g == value).all()) for g in seen)


def test_only_matrices_decay():
    """With a zero gradient AdamW's step is the decay alone."""
    net = model()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    stepper = Stepper(net, OptimizerConfig(learning_rate=0.1, weight_decay=0.5))
    give_gradients(net, 0.0)
    stepper.step()
    for name, parameter in net.named_parameters():
        factor = 0.95 if name == "0.weight" else 1.0
        assert torch.allclose(parameter, before[name] * factor), name


def test_state_goes_on_where_it_was():
    """Two steps, against one step, a copy through the state, and another step."""
    whole, halves, other = model(), model(), model()
    config = OptimizerConfig(learning_rate=0.1, warmup=3)
    first = Stepper(whole, config)
    for value in (1.0, -0.5):
        give_gradients(whole, value)
        first.step()
    second = Stepper(halves, config)
    give_gradients(halves, 1.0)
    second.step()
    other.load_state_dict(halves.state_dict())
    third = Stepper(other, config)
    third.load_state_dict(second.state_dict())
    give_gradients(other, -0.5)
    assert third.step() == pytest.approx(0.1 * 2 / 3)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), other.parameters(), strict=True))


def test_nothing_to_train_is_refused():
    net = model().requires_grad_(False)
    with pytest.raises(ModelError, match="requires a gradient"):
        Stepper(net)


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "step"},
        {"schedule": "cosine"},
        {"schedule": "linear", "warmup": 5, "total": 5},
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
        {"beta2": 1.0},
        {"weight_decay": -0.1},
        {"floor": 1.5},
        {"clip": 0.0},
    ],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        OptimizerConfig(**settings)
