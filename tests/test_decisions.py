"""Routing and selection imposed on both ways of computing a gradient."""

from __future__ import annotations

import copy

import pytest
import torch

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer import comparison, verification
from longstraw_agents.trainer.decisions import Decisions
from longstraw_agents.trainer.lifting import lifted
from longstraw_agents.trainer.replay import ReplayConfig
from tests import models, trees


def loss(logp_N: torch.Tensor) -> torch.Tensor:
    return (torch.linspace(-1.0, 2.0, len(logp_N), dtype=logp_N.dtype) * logp_N).mean()


def recorded(model: torch.nn.Module, data: list) -> tuple[Decisions, dict]:
    decisions = Decisions()
    with decisions.recorded(model):
        return decisions, verification.theirs(model, data, loss).gradient


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe", "glm_moe_dsa"])
@pytest.mark.parametrize("replay", [ReplayConfig(chunk=33), ReplayConfig(chunk=10**6), ReplayConfig("exact", 20, 1)])
def test_both_ways_take_any_decisions_that_they_are_given(name: str, replay: ReplayConfig) -> None:
    """Those of another model: nothing but what is imposed could make both agree."""
    data, model = trees.unequal_tree(), models.build(name, dtype=torch.float64)
    with lifted():
        decisions, _ = recorded(models.build(name, dtype=torch.float64, seed=1), data)
        _, free = recorded(model, data)
        theirs = verification.theirs(model, data, loss, decisions)
        ours = verification.ours(model, data, loss, replay, decisions=decisions)
    assert comparison.compare(ours.gradient, theirs.gradient).worst <= 1e-10
    assert comparison.compare(free, theirs.gradient).global_relative > 0.1
    kinds = {"routing", "selection"} if name in models.SPARSE else {"routing"}
    assert ours.otherwise.keys() == theirs.otherwise.keys() == kinds
    assert all(0.2 < share < 1 for way in (ours, theirs) for share in way.otherwise.values())


def test_a_model_s_own_decisions_change_nothing_and_it_is_left_as_it_was() -> None:
    model, data = models.build("glm_moe_dsa"), trees.unequal_tree()
    decisions, gradient = recorded(model, data)
    again = verification.theirs(model, data, loss, decisions)
    ours = verification.ours(model, data, loss, ReplayConfig(chunk=33), decisions=decisions)
    assert again.otherwise == ours.otherwise == {"routing": 0.0, "selection": 0.0}
    assert comparison.compare(again.gradient, gradient).worst == 0.0
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert verification.theirs(model, data, loss).otherwise == {}


def test_sixteen_bit_types_decide_otherwise_and_both_ways_about_as_often() -> None:
    model, data = models.build("qwen3_moe", dtype=torch.bfloat16, smooth=True), trees.unequal_tree()
    decisions, _ = recorded(copy.deepcopy(model).float(), data)
    ours = verification.ours(model, data, loss, ReplayConfig(chunk=33), decisions=decisions).otherwise["routing"]
    theirs = verification.theirs(model, data, loss, decisions).otherwise["routing"]
    assert 0 < ours < 0.05 and 0 < theirs < 0.05


def test_what_was_not_recorded_can_not_be_imposed() -> None:
    model, data = models.build("qwen3_moe"), trees.unequal_tree()
    decisions, _ = recorded(model, data[:2])
    with pytest.raises(ModelError, match="no routing was recorded"):
        verification.ours(model, data, loss, ReplayConfig(), decisions=decisions)
