"""States in host memory give the numbers of states on the device, page by page, and own exactly their bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longstraw_agents.errors import ConfigError, StaleStateError
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import attention, comparison
from longstraw_agents.trainer.pages import HostStack, Placement
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.trainer.stack import Stack
from longstraw_agents.trainer.state import RecurrentState
from tests import models as zoo
from tests.test_replay import coefficients, deep_group, trajectory


@pytest.mark.parametrize("gradient", ["exact", "detached"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_5", "deepseek_v3", "glm_moe_dsa"])
def test_host_pages_give_the_gradient_of_device_pages(name: str, gradient: str) -> None:
    model = zoo.build(name, dtype=torch.float64)
    tree = segment(deep_group(model.config.get_text_config().vocab_size))
    gradients = []
    for placement in (Placement(), Placement("host", page=19), Placement("host", page=19, outputs=True)):
        config = ReplayConfig(gradient, chunk=40, pack=100, placement=placement)
        replay = Engine(model, config).open(tree)
        replay.score()
        replay.backward(coefficients(len(tree.entry_node)))
        gradients.append(comparison.gradients(model))
        model.zero_grad()
    # not to the bit: a prefix in pages is a sum of more parts (and the models' own float32 parts see other roundings)
    assert comparison.compare(gradients[1], gradients[0]).worst < 1e-6
    assert comparison.compare(gradients[2], gradients[0]).worst < 1e-6


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "qwen3_moe", "deepseek_v3"])
def test_kept_attention_outputs_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build(name, dtype=torch.float32)
    tree = segment(deep_group(model.config.get_text_config().vocab_size))
    gradients, calls = [], []
    attend = attention.PrefixAttention._attend
    monkeypatch.setattr(attention.PrefixAttention, "_attend", staticmethod(lambda *given: calls.append(1) or attend(*given)))
    for outputs in (False, True):
        calls.clear()
        replay = Engine(model, ReplayConfig(chunk=40, pack=100, placement=Placement(outputs=outputs))).open(tree)
        replay.score()
        replay.backward(coefficients(len(tree.entry_node)))
        gradients.append((comparison.gradients(model), len(calls)))
        model.zero_grad()
    (without, many), (kept, fewer) = gradients
    assert fewer < many and all(torch.equal(kept[name], without[name]) for name in without)


@pytest.mark.parametrize("gradient", ["exact", "detached"])
def test_recurrent_states_inside_a_prompt_are_kept_only_where_it_is_reversed(gradient: str) -> None:
    model = zoo.build("qwen3_5", dtype=torch.float32)
    tokens = [[5 + i % 50 for i in range(101)] + [end, end + 1, end + 2] for end in (7, 9)]
    tree = segment([trajectory(str(i), path, np.arange(104) > 100) for i, path in enumerate(tokens)])
    replay = Engine(model, ReplayConfig(gradient, chunk=20)).open(tree)
    replay.score()
    inside = {20, 40, 60, 80} if gradient == "exact" else set()
    states = [layer for layer in replay.state.layers if isinstance(layer, RecurrentState)]
    assert states and all(set(state._borders) == inside | {100} for state in states)


@pytest.mark.parametrize("make", [Stack, lambda capacity: HostStack(capacity, page=7)])
def test_a_stack_owns_exactly_its_bytes_and_refuses_what_does_not_fit(make) -> None:
    stack = make(50)
    with pytest.raises(StaleStateError, match="before anything was captured"):
        stack.read(0, 1)
    stack.write(0, torch.ones(1, 2, 30, 8))
    stack.add(10, torch.ones(1, 2, 20, 8), 0)
    stack.add(25, torch.ones(1, 2, 5, 8), 0)
    assert stack.nbytes() == {"state": 50 * 2 * 8 * 4, "cotangent": 50 * 2 * 8 * 4}
    for tensor in (stack.values_PKD, stack.cotangent_PKD):
        assert tensor.untyped_storage().nbytes() == 50 * 2 * 8 * 4
    taken = stack.take(20, 30)
    assert taken.shape == (1, 2, 10, 8) and taken[0, 0, :, 0].tolist() == [1.0] * 5 + [2.0] * 5
    assert not stack.take(20, 30).any() and stack.take(10, 20).all()
    with pytest.raises(StaleStateError, match="made for 50"):
        stack.write(45, torch.ones(1, 2, 6, 8))


def test_a_place_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="device, host"):
        Placement("moon")
