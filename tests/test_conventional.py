"""The reference side of exactness: the zoo, lifting to float64, conventional gradients, and their comparison."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longstraw_agents.errors import ModelError, NonFiniteError
from longstraw_agents.trainer import comparison, conventional
from longstraw_agents.trainer.lifting import lifted
from longstraw_agents.types import StopReason, Trajectory
from tests import models


def trajectory(tokens: np.ndarray, positions: list[int], name: str = "t") -> Trajectory:
    mask = np.zeros(len(tokens), dtype=bool)
    mask[positions] = True
    return Trajectory(
        trajectory_id=name,
        tokens=tokens.astype(np.int32),
        action_mask=mask,
        behaviour=np.where(mask, -1.0, np.nan).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        turn_ends=(len(tokens),),
        turn_rewards=(0.0,),
        reward=0.0,
        stop_reason=StopReason.ANSWERED,
    )


def random_trajectories(lengths: tuple[int, ...], seed: int = 0) -> list[Trajectory]:
    draw = np.random.default_rng(seed)
    return [
        trajectory(draw.integers(0, models.VOCABULARY, length), [3, length // 2, length - 1], f"t{index}")
        for index, length in enumerate(lengths)
    ]


def loss(logp_N: torch.Tensor) -> torch.Tensor:
    weights_N = torch.linspace(-1.0, 2.0, len(logp_N), dtype=logp_N.dtype)
    return (weights_N * logp_N).sum() + (logp_N.mean()).square()


class SeenTypes(TorchDispatchMode):
    """Counts the operators that made a float32 tensor out of anything but one."""

    def __init__(self) -> None:
        super().__init__()
        self.float32: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 for leaf in tree_leaves(result)):
            if not any(leaf.dtype == torch.float32 for leaf in inputs):
                self.float32[str(func)] += 1
        return result


@pytest.mark.parametrize("name", models.NAMES)
def test_lifted_model_makes_no_float32(name: str) -> None:
    model = models.build(name, dtype=torch.float64)
    data = random_trajectories((80,))
    with SeenTypes() as untouched:
        conventional.backward(model, data, loss)
    with lifted(), SeenTypes() as seen:
        conventional.backward(model, data, loss, checkpointing=True)
    assert untouched.float32, "every architecture up-casts to float32 somewhere; the check would see nothing"
    assert not seen.float32


def test_lifting_ends_with_its_block() -> None:
    one = torch.ones((), dtype=torch.float64)
    with pytest.raises(RuntimeError, match="inside"):
        with lifted():
            assert one.float().dtype == one.to(torch.float32).dtype == torch.float64
            raise RuntimeError("inside")
    assert one.float().dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_moe", "glm_moe_dsa"])
def test_lifted_gradient_equals_finite_difference(name: str) -> None:
    model = models.build(name, training="lora", dtype=torch.float64)
    data = random_trajectories((100,))
    chosen = [p for n, p in model.named_parameters() if p.requires_grad and "layers.0" in n][::3]
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) * p.abs().mean() for p in chosen]

    def value_at(step: float) -> float:
        with torch.no_grad():
            for parameter, direction in zip(chosen, directions, strict=True):
                parameter.add_(direction, alpha=step)
            logp_N = conventional.log_probabilities(model, data[0].tokens, conventional.loss_positions(data[0]))
            for parameter, direction in zip(chosen, directions, strict=True):
                parameter.sub_(direction, alpha=step)
        return float(loss(logp_N))

    with lifted():
        conventional.backward(model, data, loss)
        analytic = sum(float((p.grad * d).sum()) for p, d in zip(chosen, directions, strict=True))
        numeric = (value_at(1e-6) - value_at(-1e-6)) / 2e-6  # larger steps may change what a router picks
    assert numeric == pytest.approx(analytic, rel=1e-6)


def test_in_series_and_checkpointed_equal_one_graph() -> None:
    data = random_trajectories((90, 70, 81))
    results = []
    for options in ({}, {"in_series": True}, {"in_series": True, "checkpointing": True}):
        model = models.build("qwen3_next", dtype=torch.float64)
        with lifted():
            value, _ = conventional.backward(model, data, loss, **options)
        results.append((float(value), comparison.gradients(model)))
    for value, gradient in results[1:]:
        assert value == pytest.approx(results[0][0], rel=1e-12)
        assert comparison.compare(gradient, results[0][1]).worst < 1e-11


def test_comparison_names_the_wrong_tensor() -> None:
    model = models.build("llama", dtype=torch.float64)
    conventional.backward(model, random_trajectories((60,)), loss)
    reference = comparison.gradients(model)
    wrong = dict(reference)
    name = "model.layers.2.self_attn.k_proj.weight"
    wrong[name] = reference[name] * 1.001
    difference = comparison.compare(wrong, reference)
    assert difference.worst_name == name and difference.worst == pytest.approx(1e-3)
    assert difference.classes["self_attn.k_proj"].worst_name == name
    assert difference.classes["self_attn.q_proj"].worst == 0.0
    assert difference.cosine == pytest.approx(1.0) and 0 < difference.global_relative < 1e-3
    wrong[name] = reference[name] * float("nan")
    assert comparison.compare(wrong, reference).worst == float("inf")
    with pytest.raises(ModelError, match="different parameters"):
        comparison.compare({}, reference)
    with pytest.raises(ModelError, match="norm is 0"):
        comparison.compare(reference, {key: torch.zeros_like(value) for key, value in reference.items()})


def test_comparison_floor_keeps_noise_small() -> None:
    reference = {"a": torch.ones(4, dtype=torch.float64), "b": torch.full((4,), 1e-18, dtype=torch.float64)}
    ours = {"a": torch.ones(4, dtype=torch.float64), "b": torch.full((4,), 3e-18, dtype=torch.float64)}
    assert comparison.compare(ours, reference).worst == pytest.approx(2e-18 / comparison.FLOOR)


def test_non_finite_loss_is_refused() -> None:
    model = models.build("llama")
    with pytest.raises(NonFiniteError):
        conventional.backward(model, random_trajectories((20,)), lambda logp_N: logp_N.sum() * float("nan"))


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("base_model.model.model.layers.3.self_attn.q_proj.lora_A.default.weight", "self_attn.q_proj.lora_A"),
        ("model.layers.0.mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
        ("model.language_model.layers.11.linear_attn.A_log", "linear_attn.A_log"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_parameter_class(name: str, label: str) -> None:
    assert comparison.parameter_class(name) == label
