"""Sums of many small gradients in a 16-bit type."""

from __future__ import annotations

import pytest
import torch

from longstraw_agents.trainer import verification
from longstraw_agents.trainer.accumulation import accumulated
from longstraw_agents.trainer.replay import ReplayConfig
from tests import models, trees


def test_a_thousand_small_summands_are_all_there() -> None:
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    model.bias.grad = torch.full((2,), 0.5, dtype=torch.bfloat16)
    add = lambda: (model.bias.sum() * 1e-3).backward()
    with accumulated(model):
        for _ in range(1000):
            add()
    assert model.bias.grad.dtype == torch.bfloat16 and model.weight.grad is None
    assert model.bias.grad.tolist() == pytest.approx([1.5, 1.5], rel=1e-2)
    for _ in range(1000):  # plain summation stands still: the block ended with its hooks
        add()
    assert model.bias.grad.tolist() == [1.5, 1.5]


def test_wide_gradients_are_left_alone_and_an_error_ends_the_block() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="inside"), accumulated(model):
        model[0].weight.sum().backward()
        assert model[0].weight.grad is not None
        model[1].weight.sum().backward()
        assert model[1].weight.grad is None
        raise RuntimeError("inside")
    assert model[1].weight.grad.tolist() == [[1, 1], [1, 1]]
    model[1].weight.sum().backward()
    assert model[1].weight.grad.tolist() == [[2, 2], [2, 2]]


def test_a_tree_s_gradient_is_rounded_once() -> None:
    model, data = models.build("llama", dtype=torch.bfloat16, smooth=True), trees.unequal_tree()
    parameters = dict(model.named_parameters())
    summands: dict[str, list[torch.Tensor]] = {name: [] for name in parameters}
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: summands[name].append(p.grad.clone()))
        for name, parameter in parameters.items()
    ]
    loss = lambda logp_N: (torch.linspace(-1.0, 2.0, len(logp_N)) * logp_N).mean()
    gradient = verification.ours(model, data, loss, ReplayConfig(chunk=8)).gradient
    for hook in hooks:
        hook.remove()
    assert min(map(len, summands.values())) > 20
    for name, parts in summands.items():
        assert torch.allclose(gradient[name].double(), torch.stack(parts).double().sum(0), rtol=2**-8, atol=1e-7), name
