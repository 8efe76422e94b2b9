"""Kept states: what a step leaves fresh is taken over bit for bit, and nothing stale is read in any public way."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import comparison, wholefile
from longstraw_agents.trainer.lifting import lifted
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.recapture import KINDS, Prefix, Recapture
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.trainer.shelf import ShelfConfig
from longstraw_agents.trainer.state import StateCache
from longstraw_agents.trainer.update import Trainer, TrainerConfig
from longstraw_agents.types import Group, Trajectory
from tests import models as zoo
from tests.made import make_group, make_trajectory
from tests.test_frontier import KNOWN, freeze_below
from tests.test_replay import trajectory

CONFIG = ReplayConfig(chunk=48, pack=200)
ROOT = 139


def group(seed: int = 0, root: int = ROOT, members: int = 3, loss_in_root: bool = False) -> list[Trajectory]:
    """Members that share `root` tokens; the same seed gives the same tokens, a longer root begins with the shorter one."""
    tokens = np.random.default_rng(seed).integers(3, zoo.VOCABULARY, 600).tolist()
    tails = [np.random.default_rng([seed, i]).integers(3, zoo.VOCABULARY, 8 + 5 * i).tolist() for i in range(members)]
    found = []
    for i, tail in enumerate(tails):
        path = tokens[:root] + [i + 3] + tail
        mask = np.arange(len(path)) >= root
        mask[5 : root : 7] = loss_in_root
        found.append(trajectory(str(i), path, mask))
    return found


def step(model: torch.nn.Module, size: float = 1e-2) -> None:
    """What an optimizer step does to the weights: each trained one moves."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator).to(parameter))


def run(engine: Engine, members: list[Trajectory], recapture: Recapture | None) -> tuple[dict[str, torch.Tensor], StateCache]:
    """Score, replay and reverse; the gradient with the log-probabilities among it, and the state left behind."""
    tree = segment(members)
    replay = engine.open(tree, recapture)
    engine.model.zero_grad()
    scores = replay.score()
    c = torch.linspace(-1, 1, len(tree.entry_node), dtype=torch.float64)
    seen = replay.backward(c)
    found = comparison.gradients(engine.model)
    engine.model.zero_grad()
    return found | {"score": scores.logp, "seen": seen.logp}, replay.state


def require_equal(ours: tuple[dict[str, torch.Tensor], StateCache], full: tuple[dict[str, torch.Tensor], StateCache]) -> None:
    for name, value in full[0].items():
        assert torch.equal(ours[0][name], value), name
    for mine, theirs in zip(ours[1].layers, full[1].layers, strict=True):
        for start, stop in ((0, 48), (48, 96), (96, ROOT - 1)):
            for name, tensor in theirs.export(start, stop).items():
                assert torch.equal(mine.export(start, stop)[name], tensor), name


@pytest.mark.parametrize("name", KNOWN)
def test_frontier_equals_full_bit_for_bit_in_state_and_next_gradient(name: str) -> None:
    model = zoo.build(name, dtype=torch.float64)
    layers = len(model.get_decoder().layers)
    for layer in (1, layers // 2, layers):
        freeze_below(model, layer)
        engine = Engine(model, CONFIG)
        recapture = Recapture.of(engine, ShelfConfig())
        with lifted():
            for expected in ({"missed": ROOT - 1}, {"refreshed" if layer < layers else "hit": ROOT - 1}):
                require_equal(run(engine, group(), recapture), run(engine, group(), None))
                counted = recapture.report()
                assert {k: counted[k] for k in ("missed", "refreshed", "hit") if counted[k]} == expected
                step(model)
        if "refreshed" in expected and engine.frontier > 0:  # a layer that reads another's selection can't start a run
            assert counted["from_frontier"] == ROOT - 1 and counted["whole"] == 0


@pytest.mark.parametrize("kept", [True, False])
def test_the_reverse_pass_stops_at_the_frontier(kept: bool) -> None:
    """With a recurrent model, whose states are leaves that could draw gradients through every layer."""
    model = zoo.build("qwen3_5")
    freeze_below(model, 3)
    engine = Engine(model, CONFIG)
    reached: set[int] = set()
    for index, layer in enumerate(model.get_decoder().layers):
        layer.register_full_backward_pre_hook(lambda *_, index=index: reached.add(index))
    run(engine, group(loss_in_root=True), Recapture.of(engine, ShelfConfig()) if kept else None)
    assert reached == {3, 4}


def test_steps_that_change_nothing_refresh_nothing() -> None:
    model = zoo.build("qwen3_5")
    engine = Engine(model, CONFIG)
    recapture = Recapture.of(engine, ShelfConfig())
    first = run(engine, group(), recapture)
    recapture.report()
    step(model, size=0.0)
    require_equal(run(engine, group(), recapture), first)
    report = recapture.report()
    assert {kind: report[kind] for kind in KINDS if report[kind]} == {"hit": ROOT - 1}


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "mistral"])
def test_an_extension_runs_only_the_new_tokens(name: str) -> None:
    model = zoo.build(name, dtype=torch.float64)
    engine = Engine(model, CONFIG)
    recapture = Recapture.of(engine, ShelfConfig())
    with lifted():
        run(engine, group(), recapture)
        recapture.report()
        ours, _ = run(engine, group(root=200), recapture)
        full, _ = run(engine, group(root=200), None)
    report = recapture.report()
    assert (report["hit"], report["extended"]) == (ROOT - 1, 61) and report["missed"] == 0
    for key, value in full.items():  # the borders differ, so only nearly: the last kept span ends where the shorter prefix did
        assert torch.allclose(ours[key], value, rtol=1e-9, atol=1e-12), key


def test_a_growing_prefix_runs_each_token_once() -> None:
    engine = Engine(zoo.build("qwen3_5"), CONFIG)
    recapture = Recapture.of(engine, ShelfConfig(host_bytes=0))  # nothing kept: what is in place is enough
    prefix = Prefix(recapture, 200)
    tokens = segment(group(root=200)).nodes[0].tokens[:-1]
    for length in (100, 101, 101, 160):
        list(prefix.refresh(tokens[:length], CONFIG.chunk))
    report = recapture.report()
    assert report["whole"] == 160 and report["hit"] == 0
    list(prefix.refresh(np.r_[tokens[:50], 3, tokens[51:80]], CONFIG.chunk))  # other tokens: all of them run again
    assert recapture.report()["whole"] == 80


def test_loss_tokens_of_a_kept_span_are_scored_all_the_same() -> None:
    model = zoo.build("llama", dtype=torch.float64)
    freeze_below(model, 2)
    engine = Engine(model, CONFIG)
    recapture = Recapture.of(engine, ShelfConfig())
    for _ in range(2):
        require_equal(run(engine, group(loss_in_root=True), recapture), run(engine, group(loss_in_root=True), None))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(0, 1), st.sampled_from([40, 97, ROOT, 180])),
        st.tuples(st.just("step")),
        st.tuples(st.just("restore")),
        st.tuples(st.just("restart")),
        st.tuples(st.just("frontier"), st.integers(0, 4)),
    ),
    min_size=2, max_size=8,
)  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(OPERATIONS, st.sampled_from([0, 40_000, 2**30]), st.booleans(), st.sampled_from(["device", "host"]))
def test_any_history_of_updates_equals_one_without_kept_states(
    operations: list[tuple], limit: int, disk: bool, place: str
) -> None:
    model = zoo.build("llama", dtype=torch.float64)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    engine = Engine(model, replace(CONFIG, placement=Placement(place, page=32)))
    with tempfile.TemporaryDirectory() as folder, lifted():
        config = ShelfConfig(host_bytes=limit, disk_bytes=10**6 if disk else 0, directory=folder if disk else None)
        recapture = Recapture.of(engine, config)
        for operation, *values in operations:
            if operation == "update":
                members = group(seed=values[0], root=values[1])
                ours, full = run(engine, members, recapture)[0], run(engine, members, None)[0]
                for name, value in full.items():
                    assert torch.allclose(ours[name], value, rtol=1e-8, atol=1e-11), name
                assert sum(recapture.shelf.nbytes().values()) <= limit + (10**6 if disk else 0)
            elif operation == "step":
                step(model)
            elif operation == "restore":
                model.load_state_dict(start)
            elif operation == "restart":
                recapture = Recapture.of(engine, config)
            else:
                freeze_below(model, values[0])
                if values[0] == 0:
                    model.get_decoder().embed_tokens.requires_grad_(True)


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, so what lies on disk is what a killed process leaves."""


@pytest.mark.parametrize("frontier", [0, 2])
def test_a_recapture_killed_anywhere_is_completed_and_mixed_states_are_never_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frontier: int
) -> None:
    model = zoo.build("qwen3_5", dtype=torch.float64)
    if frontier:
        freeze_below(model, frontier)
    engine = Engine(model, CONFIG)
    tokens = segment(group()).nodes[0].tokens[:-1]
    config = ShelfConfig(disk_bytes=2**30, directory=str(tmp_path / "states"))
    for _ in Recapture.of(engine, config).refresh(tokens, CONFIG.chunk):
        pass
    step(model)
    shutil.copytree(tmp_path / "states", tmp_path / "before")
    full, _ = run(engine, group(), None)
    finished: list[int] = []
    for point in count():
        shutil.rmtree(tmp_path / "states")
        shutil.copytree(tmp_path / "before", tmp_path / "states")
        with monkeypatch.context() as patched:
            die_at(patched, point)
            spans = 0
            try:
                for _ in Recapture.of(engine, config).refresh(tokens, CONFIG.chunk):
                    spans += 1
                break
            except Killed:
                finished.append(spans)
        again = Recapture.of(engine, config)
        assert not list((tmp_path / "states").glob(".writing-*"))
        ours, _ = run(engine, group(), again)
        assert all(torch.equal(ours[name], value) for name, value in full.items())
        assert again.report()["hit"] >= min(spans * CONFIG.chunk, len(tokens))
    assert set(finished) == {0, 1, 2} and len(finished) >= 12


def die_at(patched: pytest.MonkeyPatch, point: int) -> None:
    """The process ends at the `point`-th of the calls that change what lies on disk, or just after it."""
    calls = count()

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            if next(calls) == point:
                raise Killed
            result = call(*args, **kwargs)
            if next(calls) == point:
                raise Killed
            return result

        return wrapped

    patched.setattr(wholefile, "save_file", dying(wholefile.save_file))
    patched.setattr(os, "replace", dying(os.replace))
    patched.setattr(Path, "unlink", dying(Path.unlink))


def test_a_full_disk_costs_nothing_but_what_would_have_been_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wholefile, "save_file", full)
    engine = Engine(zoo.build("llama"), CONFIG)
    recapture = Recapture.of(engine, ShelfConfig(host_bytes=0, disk_bytes=2**30, directory=str(tmp_path)))
    for _ in range(2):
        require_equal(run(engine, group(), recapture), run(engine, group(), None))
    report = recapture.report()
    assert report["evicted_disk"] > 0 and report["hit"] == 0 and report["bytes"]["disk"] == 0


def test_a_trainer_with_kept_states_makes_the_same_steps_and_says_what_it_saved() -> None:
    """Two groups on one document, two steps an update, two updates: the same weights bit for bit, and less run."""
    document = np.random.default_rng(1).integers(3, zoo.VOCABULARY, 96).tolist()

    def groups() -> list[Group]:
        made = []
        for question in range(2):
            paths = [document + [question + 3] * 9 + [i + 5, 7 * i + 4, 9] for i in range(3)]
            members = [
                make_trajectory(path, [at >= 105 for at in range(len(path))], name=f"{question}/{i}", reward=float(i))
                for i, path in enumerate(paths)
            ]
            made.append(make_group(members, name=str(question)))
        return made

    results, receipts = [], []
    for kept in (None, ShelfConfig()):
        model = zoo.build("qwen3", dtype=torch.float64)
        freeze_below(model, 3)
        settings = TrainerConfig(
            replay=ReplayConfig(chunk=32), steps=2, recapture=kept, optimizer=OptimizerConfig(learning_rate=1e-2)
        )
        trainer = Trainer(model, settings)
        with lifted():
            receipts.append([trainer.update(groups()) for _ in range(2)])
        results.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    first, second = (receipt.recapture for receipt in receipts[1])
    assert receipts[0][0].recapture == {}
    document_inputs, question_inputs = 96, 8  # the question's last token is input with each answer
    assert first["missed"] == document_inputs + question_inputs
    assert first["extended"] == question_inputs  # the second group's question, on the document that the first one captured
    assert first["hit"] >= document_inputs and second["missed"] == second["extended"] == 0
    assert second["whole"] == 0 and second["from_frontier"] == second["refreshed"]
    assert second["frontier"] == 3 and "1 of 4 layers" in second["saving"]
