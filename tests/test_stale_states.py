"""Every public way to read a state that was captured under other weights, and what it meets: a refusal, or fresh numbers.

`attempts` is also what benchmarks/recapture.py counts: it yields one result per way and change, True where a stale state was
served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from longstraw_agents.errors import CorruptionError, StaleStateError
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer.architectures import make_state
from longstraw_agents.trainer.recapture import Prefix, Recapture
from longstraw_agents.trainer.replay import Engine
from longstraw_agents.trainer.shelf import ShelfConfig
from longstraw_agents.trainer.state import Run
from tests import models as zoo
from tests.test_recapture import CONFIG, group, run


def _layer(model: nn.Module, index: int) -> nn.Module:
    return model.get_base_model().model.layers[index]


def _optimizer_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1e-2 for name, value in model.state_dict().items() if "lora_" in name}, strict=False)


def _scale(model: nn.Module) -> None:
    _layer(model, 1).self_attn.v_proj.scaling["default"] *= 1.5


def _another_parameter(model: nn.Module) -> None:
    base = _layer(model, 1).self_attn.k_proj.base_layer
    base.weight = nn.Parameter(base.weight.detach() + 1e-3, requires_grad=False)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "optimizer step": _optimizer_step,
    "trained weight behind torch's back": lambda m: _layer(m, 1).self_attn.k_proj.lora_A.default.weight.data.add_(1e-2),
    "one trained element": lambda m: _layer(m, 2).mlp.up_proj.lora_B.default.weight.data.view(-1)[5:6].mul_(-1),
    "loaded adapter": _load,
    "adapter's scaling": _scale,
    "adapter switched off": lambda m: m.base_model.disable_adapter_layers(),
    "adapter merged": lambda m: m.merge_adapter(),
    "frozen weight in place": lambda m: nn.init.normal_(_layer(m, 0).self_attn.v_proj.base_layer.weight),
    "another parameter": _another_parameter,
    "rotary frequencies": lambda m: m.get_base_model().model.rotary_emb.inv_freq.mul_(1.1),
    "type": lambda m: m.to(torch.float64),
}


class Subject:
    """A model with kept states of one group, in memory and on disk, and everything through which they can be read."""

    def __init__(self, folder: Path) -> None:
        self.model = zoo.build("llama", training="lora")
        self.engine = Engine(self.model, CONFIG)
        self.config = ShelfConfig(disk_bytes=2**24, directory=str(folder))
        self.recapture = Recapture.of(self.engine, self.config)
        self.tree = segment(group())
        self.inputs = self.tree.nodes[0].tokens[:-1]
        self.c = torch.ones(len(self.tree.entry_node))
        run(self.engine, group(), self.recapture)
        self.replay = self.engine.open(self.tree, self.recapture)
        self.replay.score()
        self.fresh = self.recapture.under(self.engine.stamps.stamps())
        self.spans = list(self.fresh.walk("", self.inputs, 0, CONFIG.chunk))
        self.prefix = Prefix(self.recapture, 200)
        list(self.prefix.refresh(self.inputs, CONFIG.chunk))
        self.refreshing = self.recapture.refresh(np.r_[self.inputs, 5, 6, 7], 30)
        next(self.refreshing)

    def extended(self) -> None:
        """A growing prefix goes on where it was only under the weights it was captured with."""
        tokens = np.r_[self.inputs, 5, 6, 7]
        spans = list(self.prefix.refresh(tokens, CONFIG.chunk))
        state = make_state(self.engine.base, 200)
        with self.engine.attached(), torch.no_grad():
            for span in [*self.spans, *spans[-1:]]:
                run = Run(span.start, span.stop - span.start, 1, writes=True, gradient=False)
                self.engine.decode(tokens[None, span.start : span.stop], run, state)
                for layer in range(len(state.layers)):
                    ours, full = (s.export(layer, span.start, span.stop) for s in (self.prefix.state, state))
                    if not all(torch.allclose(ours[name], value, rtol=1e-4, atol=1e-6) for name, value in full.items()):
                        raise AssertionError("served")
        raise StaleStateError("nothing stale was read")

    def equal_to_fresh(self, recapture: Recapture) -> None:
        """An update under the new weights gives what one without kept states gives; else it served a stale one."""
        ours, full = run(self.engine, group(), recapture)[0], run(self.engine, group(), None)[0]
        if not all(torch.allclose(ours[name], value, rtol=1e-4, atol=1e-6) for name, value in full.items()):
            raise AssertionError("served")
        raise StaleStateError("nothing stale was read")


WAYS: dict[str, Callable[[Subject], object]] = {
    "score an open tree": lambda s: s.replay.score(),
    "replay an open tree": lambda s: s.replay.backward(s.c),
    "take over a span": lambda s: s.fresh.capture(s.spans[0], s.inputs[:48], make_state(s.engine.base, 200)),
    "start from a stored input": lambda s: s.fresh.entry(s.spans[0]),
    "go on refreshing": lambda s: list(s.refreshing),
    "ask the shelf": lambda s: s.recapture.shelf.get(f"{s.spans[0].chain}-above", s.engine.stamps.layers()),
    "restart from disk": lambda s: s.equal_to_fresh(Recapture.of(s.engine, s.config)),
    "open the tree again": lambda s: s.equal_to_fresh(s.recapture),
    "extend a prefix": lambda s: s.extended(),
}
ANEW = {"restart from disk", "open the tree again", "extend a prefix"}  # these refresh by themselves, so they come last


def attempts(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """(way, change, whether a stale state was served) for all of them."""
    for number, (change, alter) in enumerate(CHANGES.items()):
        subject = Subject(folder / str(number))
        with torch.no_grad():
            alter(subject.model)
        for way, read in WAYS.items():
            try:
                read(subject)
                served = True
            except StaleStateError:
                served = False
            except AssertionError:
                served = True
            yield way, change, served


def test_no_public_way_serves_a_stale_state(tmp_path: Path) -> None:
    served = [(way, change) for way, change, stale in attempts(tmp_path) if stale]
    assert served == []


def test_the_ways_work_where_nothing_changed(tmp_path: Path) -> None:
    subject = Subject(tmp_path)
    for way, read in WAYS.items():
        if way in ANEW:
            with pytest.raises(StaleStateError, match="nothing stale"):
                read(subject)
        else:
            read(subject)


def test_frozen_weights_written_behind_torch_are_seen_at_the_next_refresh(tmp_path: Path) -> None:
    subject = Subject(tmp_path)
    _layer(subject.model, 0).self_attn.k_proj.base_layer.weight.data.mul_(1.1)
    subject.engine.stamps.forget()  # what Trainer.update does first
    with pytest.raises(StaleStateError, match="nothing stale"):
        subject.equal_to_fresh(subject.recapture)
    subject.recapture.report()
    for _ in subject.recapture.refresh(subject.inputs, CONFIG.chunk):
        pass
    assert subject.recapture.report()["hit"] == len(subject.inputs)


@pytest.mark.parametrize("fault", ["flipped", "cut", "swapped", "empty"])
def test_files_that_are_not_what_was_written_are_captured_again(tmp_path: Path, fault: str) -> None:
    subject = Subject(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    data = bytearray(files[0].read_bytes())
    if fault == "flipped":
        data[-7] ^= 4
    files[0].write_bytes({"flipped": data, "cut": data[:-9], "swapped": files[1].read_bytes(), "empty": b""}[fault])
    again = Recapture.of(subject.engine, subject.config)
    key = files[0].name.removesuffix(".state.safetensors")
    with pytest.raises((CorruptionError, StaleStateError)):
        again.shelf.get(key, subject.engine.stamps.layers())
    files[0].write_bytes(files[1].read_bytes())
    with pytest.raises(StaleStateError, match="nothing stale"):
        subject.equal_to_fresh(Recapture.of(subject.engine, subject.config))
