"""Runs that start from the first trained layer, against runs of the whole model: equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer.architectures import MODEL_TYPES, make_state
from longstraw_agents.trainer.frontier import Entry, find_frontier, kept_input
from longstraw_agents.trainer.lifting import lifted
from longstraw_agents.trainer.replay import Engine
from longstraw_agents.trainer.stamps import WeightStamps, first_trained_layer
from longstraw_agents.trainer.state import Run
from tests import models as zoo

KNOWN = [name for name in zoo.NAMES if zoo.CONFIGS[name]()[1].model_type in MODEL_TYPES]
SPANS = ((0, 70), (70, 75), (75, 140))


def freeze_below(model: torch.nn.Module, layer: int) -> None:
    """Only layers from `layer` on, the final norm and the head train."""
    for parameter in model.get_decoder().parameters():
        parameter.requires_grad_(False)
    for module in [*model.get_decoder().layers[layer:], model.get_decoder().norm]:
        module.requires_grad_(True)


@pytest.mark.parametrize("name", KNOWN)
def test_a_run_from_the_frontier_equals_the_whole_run_bit_for_bit(name: str) -> None:
    model = zoo.build(name, dtype=torch.float64)
    engine = Engine(model)
    ids = np.random.default_rng(0).integers(3, zoo.VOCABULARY, (1, 140))
    for layer in range(1, len(model.get_decoder().layers) + 1, 2):  # the others: test_recapture
        freeze_below(model, layer)
        frontier = engine.frontier
        whole, part = make_state(model, 140), make_state(model, 140)
        with lifted(), engine.attached(), torch.no_grad():
            inputs, outputs = [], []
            for state in (whole, part):  # the lower layers' states come from a run of their own
                for start, stop in SPANS:
                    with kept_input(engine.decoder, frontier) as kept:
                        outputs.append(engine.decode(ids[:, start:stop], Run(start, stop - start, 1, True, False), state))
                    inputs.append(kept[0])
            for at, (start, stop) in enumerate(SPANS):
                run = Run(start, stop - start, 1, True, False)
                again = engine.decode(ids[:, start:stop], run, part, Entry(frontier, inputs[at]))
                assert torch.equal(again, outputs[at])
        assert frontier == layer or getattr(model.config, "indexer_types", None)


def test_the_frontier_is_the_lowest_layer_that_trains() -> None:
    model = zoo.build("llama")
    decoder = model.get_decoder()
    assert first_trained_layer(decoder) == 0
    for layer in range(zoo.LAYERS + 1):
        freeze_below(model, layer)
        assert find_frontier(decoder, model.config) == layer
    model.lm_head.requires_grad_(True)
    assert find_frontier(decoder, model.config) == zoo.LAYERS  # an untied head comes after every state
    model.lm_head.weight = decoder.embed_tokens.weight.requires_grad_(True)
    assert find_frontier(decoder, model.config) == 0  # a tied one is the embeddings
    assert find_frontier(zoo.build("llama", training="lora").get_base_model().get_decoder(), model.config) == 0


CHANGES: dict[str, tuple[Callable[[torch.nn.Module], torch.Tensor], int, int]] = {
    # what changes -> the first layer whose state, and the first whose input, is another one
    "lm_head": (lambda m: m.lm_head.weight, 4, 5),
    "final norm": (lambda m: m.model.norm.weight, 4, 5),
    "embeddings": (lambda m: m.model.embed_tokens.weight, 0, 0),
    "keys of layer 2": (lambda m: m.model.layers[2].self_attn.k_proj.weight, 2, 3),
    "values of layer 2": (lambda m: m.model.layers[2].self_attn.v_proj.weight, 2, 3),
    "norm before layer 2": (lambda m: m.model.layers[2].input_layernorm.weight, 2, 3),
    "queries of layer 2": (lambda m: m.model.layers[2].self_attn.q_proj.weight, 3, 3),
    "output of layer 2": (lambda m: m.model.layers[2].self_attn.o_proj.weight, 3, 3),
    "MLP of layer 2": (lambda m: m.model.layers[2].mlp.down_proj.weight, 3, 3),
    "MLP of the last layer": (lambda m: m.model.layers[3].mlp.down_proj.weight, 4, 4),
}


@pytest.mark.parametrize("change", CHANGES)
def test_stamps_differ_from_the_first_state_that_depends_on_a_parameter(change: str) -> None:
    model = zoo.build("llama")
    weight, state, entry = CHANGES[change]
    stamps = WeightStamps(model.get_decoder(), model.config)
    before = stamps.stamps()
    weight(model).data.view(-1)[3] += 1e-3  # behind torch's version counter
    now = stamps.stamps()
    assert [a != b for a, b in zip(before.states, now.states, strict=True)] == [i >= state for i in range(4)]
    assert [a != b for a, b in zip(before.inputs, now.inputs, strict=True)] == [i >= entry for i in range(5)]


def test_an_entry_of_another_run_is_refused() -> None:
    engine = Engine(zoo.build("llama"))
    run = Run(0, 5, 1, True, False)
    with engine.attached(), pytest.raises(ModelError, match="belong to another run"):
        engine.decode(np.ones((1, 5)), run, make_state(engine.base, 5), Entry(2, torch.zeros(1, 4, 32)))
    with engine.attached(), torch.no_grad():  # and the layers are themselves again
        assert engine.decode(np.ones((1, 5)), run, make_state(engine.base, 5)).shape == (1, 5, 32)
