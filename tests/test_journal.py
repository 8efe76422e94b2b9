"""An update that is stopped at any border, or within a write, goes on in a new process to the same bits."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longstraw_agents.errors import ConfigError, CorruptionError, NonFiniteError, StaleStateError, UpdateStoppedError
from longstraw_agents.segmenter import PrefixTree, segment
from longstraw_agents.trainer import attention, comparison, journal, sparse, wholefile
from longstraw_agents.trainer.bounded import BoundedConfig
from longstraw_agents.trainer.journal import Journal, JournalConfig, stamps_of
from longstraw_agents.trainer.loss import LossConfig
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.trainer.routing import RoutingState
from longstraw_agents.trainer.shelf import ShelfConfig
from longstraw_agents.trainer.state import RecurrentState, Run
from longstraw_agents.trainer.update import Trainer, TrainerConfig
from longstraw_agents.types import Group, Task
from tests import models as zoo
from tests.test_replay import coefficients
from tests.trees import trajectory, unequal_tree

ROOT = Path(__file__).resolve().parents[1]


class Killed(BaseException):
    """What ends a process, as far as its journal can tell: nothing is caught, nothing is closed."""


@pytest.fixture(autouse=True)
def _every_border(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are as frequent as is asked for."""
    monkeypatch.setattr(journal, "_PAUSE", 0)


def killed_after(engine: Engine, runs: int | None) -> list[int]:
    """Let an engine die before it begins run number `runs`; the list counts the runs that it began."""
    decode, begun = engine.decode, [0]

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        if begun[0] == runs:
            raise Killed
        begun[0] += 1
        return decode(*args, **kwargs)

    engine.decode = counted  # type: ignore[method-assign]
    return begun


def process(
    model: torch.nn.Module, tree: PrefixTree, config: ReplayConfig, folder: Path | None, runs: int | None = None
) -> dict[str, Any] | None:
    """Score a tree and differentiate it, in what stands for a process; None where it was killed."""
    model.zero_grad()
    engine = Engine(model, config)
    begun = killed_after(engine, runs)
    kept = None if folder is None else Journal(JournalConfig(folder, seconds=0))
    try:
        with nullcontext() if kept is None else kept.update(stamps_of(engine, [tree])):
            replay = engine.open(tree, journal=kept)
            scored = replay.score(entropy=True)
            seen = replay.backward(coefficients(len(tree.entry_node)), 0.1 * coefficients(len(tree.entry_node)))
    except Killed:
        return None
    found = comparison.gradients(model) | {"scored": scored.logp, "entropy": scored.entropy, "seen": seen.logp}
    return {"tensors": found, "counts": dict(replay.counts), "report": replay.report(), "begun": begun[0], "journal": kept}


def require_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same bits, the same counts, and as much memory for cotangents (of state, what is dead is not put back)."""
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        assert torch.equal(found["tensors"][name], tensor), name
    ours, theirs = found["report"], expected["report"]
    assert found["counts"] == expected["counts"] and ours["flips"] == theirs["flips"]
    assert ours["bytes"]["cotangent"] == theirs["bytes"]["cotangent"] and ours["bytes"]["state"] <= theirs["bytes"]["state"]


PLACES: dict[str, Callable[[Path], Placement]] = {
    "device": lambda path: Placement(),
    "outputs": lambda path: Placement(outputs=True),
    "host": lambda path: Placement("host", page=19),
    "disk": lambda path: Placement("disk", page=23, directory=path),
}
CASES = [
    ("llama", "exact", "device", torch.float64), ("llama", "exact", "outputs", torch.bfloat16),
    ("llama", "detached", "disk", torch.float32), ("qwen3_5", "exact", "device", torch.float64),
    ("qwen3_5", "detached", "host", torch.float32), ("gemma3", "exact", "outputs", torch.float32),
    ("deepseek_v3", "exact", "host", torch.float32), ("glm_moe_dsa", "exact", "disk", torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(("name", "gradient", "place", "dtype"), CASES)
def test_a_process_for_every_run_gives_the_gradient_of_one_process(
    name: str, gradient: str, place: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, tree = zoo.build(name, dtype=dtype), segment(unequal_tree())
    config = ReplayConfig(gradient, chunk=30, pack=60, placement=PLACES[place](tmp_path))
    folder = tmp_path / "journal"
    expected = process(model, tree, config, None)
    assert expected is not None
    processes = 0
    while (found := process(model, tree, config, folder, runs=1)) is None:
        processes += 1
        assert processes < expected["begun"]
    assert processes == expected["begun"] - 1 > 15 and found["begun"] == 1  # each did one run
    assert found["journal"].report()["resumed"]
    require_same(found, expected)


SWEEP = [  # every model in both modes, and so in two of the four places
    (name, gradient, list(PLACES)[(index + 2 * (gradient == "detached")) % len(PLACES)])
    for index, name in enumerate(zoo.NAMES)
    for gradient in ("exact", "detached")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gradient", "place"), SWEEP)
def test_an_update_stopped_at_any_border_is_finished_by_one_process(
    name: str, gradient: str, place: str, tmp_path: Path
) -> None:
    model, tree = zoo.build(name, dtype=torch.float32), segment(unequal_tree())
    config = ReplayConfig(gradient, chunk=30, pack=60, placement=PLACES[place](tmp_path))
    expected = process(model, tree, config, None)
    assert expected is not None
    for runs in range(1, expected["begun"] + 1):
        assert process(model, tree, config, tmp_path / "journal", runs) is None or runs == expected["begun"]
        found = process(model, tree, config, tmp_path / "journal")
        assert found is not None and found["begun"] == expected["begun"] - runs
        require_same(found, expected)
        found["journal"].settle()
        assert not list((tmp_path / "journal").iterdir())


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_process_that_dies_between_two_writes_leaves_the_checkpoint_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tree = zoo.build(name, dtype=torch.float32), segment(unequal_tree())
    config, folder = ReplayConfig(chunk=30, pack=60), tmp_path / "journal"
    expected = process(model, tree, config, None)
    assert expected is not None
    save, left = wholefile.save_file, [0]
    monkeypatch.setattr(wholefile, "AT_ONCE", 1)

    def dying(tensors: Any, path: Path, metadata: Any) -> None:
        left[0] -= 1
        save(tensors, path, metadata)
        if left[0] < 0:
            path.write_bytes(path.read_bytes()[:-20])  # torn, and not yet in its place
            raise Killed

    monkeypatch.setattr(wholefile, "save_file", dying)
    for attempt in range(200):
        left[0] = 3 + attempt % 17
        if (found := process(model, tree, config, folder)) is not None:
            break
        assert list(folder.glob(".writing-*"))
    assert found is not None and attempt > 10 and found["journal"].report()["resumed"]
    require_same(found, expected)
    assert not list(folder.glob(".writing-*"))


def test_counts_of_changed_decisions_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tree, config = zoo.build("glm_moe_dsa"), prompt_tree(), ReplayConfig(chunk=20)
    calls = iter(range(10**6))
    monkeypatch.setattr(sparse, "_digest", lambda picks_Tn: torch.full((len(picks_Tn),), next(calls)))  # never the same twice
    decide = RoutingState.decide

    def changing(self: RoutingState, run: Run, picks_Tk: torch.Tensor, experts: int) -> torch.Tensor:
        self.flips += int(run.gradient)
        return decide(self, run, picks_Tk, experts)

    monkeypatch.setattr(RoutingState, "decide", changing)
    expected = process(model, tree, config, None)
    assert expected is not None and all(expected["report"]["flips"].values())
    for _ in range(expected["begun"]):
        found = process(model, tree, config, tmp_path, runs=1)
    assert found is not None
    require_same(found, expected)


@pytest.mark.parametrize("place", PLACES)
def test_an_outline_gives_a_stack_the_bytes_that_it_had(place: str, tmp_path: Path) -> None:
    stack, again = (PLACES[place](tmp_path).stack(50) for _ in range(2))
    assert stack.outline() == {}
    stack.write(0, torch.ones(1, 2, 30, 8, dtype=torch.bfloat16))
    stack.add(20, torch.ones(1, 2, 5, 8), 10)  # no cotangent before position 10
    again.restore_outline(stack.outline(), torch.device("cpu"))
    assert again.nbytes() == stack.nbytes() and stack.nbytes()["cotangent"] == 40 * 2 * 8 * 4
    again.restore_cotangent(10, stack.seen_cotangent(10, 30))
    assert torch.equal(again.take(15, 30), stack.take(15, 30)) and again.take(0, 5) is None


def prompt_tree() -> PrefixTree:
    """Two answers of three tokens to a prompt of 101, which carries no loss."""
    paths = [np.r_[5 + np.arange(101) % 50, end, end + 1, end + 2] for end in (7, 9)]
    return segment([trajectory(str(index), path, np.arange(101, 104)) for index, path in enumerate(paths)])


def test_files_are_of_what_is_not_yet_reversed(tmp_path: Path) -> None:
    model, tree, config = zoo.build("qwen3_5"), prompt_tree(), ReplayConfig(chunk=20)
    seen = []
    for runs in range(1, 12):
        assert process(model, tree, config, tmp_path, runs=1) is None
        seen.append((runs, len(list(tmp_path.glob("state-*"))), len(list(tmp_path.glob("cotangent-*")))))
    captured = [(1, 1, 0), (2, 2, 0), (3, 3, 0), (4, 4, 0), (5, 5, 0), (6, 5, 0)]  # and the answers scored
    reversed_ = [(7, 5, 5), (8, 4, 4), (9, 3, 3), (10, 2, 2), (11, 1, 1)]
    assert seen == captured + reversed_
    assert process(model, tree, config, tmp_path) is not None


def test_a_recurrent_state_that_was_let_go_stays_away(tmp_path: Path) -> None:
    model, tree, config = zoo.build("qwen3_5"), prompt_tree(), ReplayConfig("detached", chunk=20)
    for _ in range(4):
        assert process(model, tree, config, tmp_path, runs=1) is None
    engine, kept = Engine(model, config), Journal(JournalConfig(tmp_path, seconds=0))
    with kept.update(stamps_of(engine, [tree])):
        replay = engine.open(tree, journal=kept)
        replay.score(entropy=True)
    states = [layer for layer in replay.state.layers if isinstance(layer, RecurrentState)]
    assert kept.report()["resumed"] and states and all(set(state._borders) == {100} for state in states)


def stopped(folder: Path, runs: int = 25, **settings: Any) -> tuple[torch.nn.Module, PrefixTree, ReplayConfig]:
    """An update that was killed within its backward pass."""
    model, tree, config = zoo.build("llama"), segment(unequal_tree()), ReplayConfig(chunk=30, pack=60)
    assert process(model, tree, config, folder, runs) is None
    assert list(folder.glob("cotangent-*")) and (folder / "checkpoint.safetensors").exists()
    return model, tree, config


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_other_weights_tokens_and_settings_are_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    model, tree, config = stopped(tmp_path)
    before = contents(tmp_path)
    for wrong, of, name in (
        (replace(config, chunk=31), tree, "chunk"),
        (replace(config, gradient="detached"), tree, "gradient"),
        (replace(config, placement=Placement("host")), tree, "placement"),
        (config, segment(unequal_tree(seed=1)), "tokens"),
    ):
        with pytest.raises(StaleStateError, match=f"{name} differ"):
            process(model, of, wrong, tmp_path)
    for parameter in ("lm_head.weight", "model.norm.weight", "model.layers.3.mlp.down_proj.weight", "model.embed_tokens.weight"):
        weight = model.get_parameter(parameter)
        held = weight.detach().clone()
        weight.data.view(-1)[3] += 1e-3
        with pytest.raises(StaleStateError, match="weights differ"):
            process(model, tree, config, tmp_path)
        weight.data.copy_(held)
    model.get_parameter("lm_head.weight").requires_grad_(False)
    with pytest.raises(StaleStateError, match="trained differ"):
        process(model, tree, config, tmp_path)
    model.get_parameter("lm_head.weight").requires_grad_(True)
    assert contents(tmp_path) == before
    assert process(model, tree, config, tmp_path) is not None


def test_other_coefficients_are_refused(tmp_path: Path) -> None:
    model, tree, config = stopped(tmp_path)
    engine, kept = Engine(model, config), Journal(JournalConfig(tmp_path, seconds=0))
    with kept.update(stamps_of(engine, [tree])):
        replay = engine.open(tree, journal=kept)
        replay.score(entropy=True)
        with pytest.raises(StaleStateError, match="other coefficients"):
            replay.backward(2 * coefficients(len(tree.entry_node)))


def test_a_damaged_file_is_not_used(tmp_path: Path) -> None:
    model, tree, config = stopped(tmp_path)
    for path in (tmp_path / "checkpoint.safetensors", *sorted(tmp_path.glob("state-*"))[:1], *sorted(tmp_path.glob("cota*"))[:1]):
        whole = path.read_bytes()
        for damaged in (whole[:-7], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], b"", None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            if path.exists() or not path.name.startswith("checkpoint"):  # without a checkpoint nothing is begun
                with pytest.raises(CorruptionError, match="begin the update anew"):
                    process(model, tree, config, tmp_path)
            path.write_bytes(whole)
    first, second = sorted(tmp_path.glob("state-*"))[:2]
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(CorruptionError, match="was written as"):
        process(model, tree, config, tmp_path)
    first.write_bytes(whole)
    assert process(model, tree, config, tmp_path) is not None


def test_kept_outputs_spare_the_reverse_their_attention_in_a_new_process_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tree = zoo.build("llama"), segment(unequal_tree())
    config, calls = ReplayConfig(chunk=30, pack=60, placement=Placement(outputs=True)), [0]
    attend = attention.PrefixAttention._attend

    def counted(*given: Any) -> Any:
        calls[0] += 1
        return attend(*given)

    monkeypatch.setattr(attention.PrefixAttention, "_attend", staticmethod(counted))
    assert process(model, tree, config, None) is not None
    alone, calls[0] = calls[0], 0
    assert process(model, tree, config, tmp_path, runs=20) is None
    assert process(model, tree, config, tmp_path) is not None
    assert calls[0] == alone


def test_a_full_disk_and_a_folder_that_is_none_leave_the_update_as_it_is(tmp_path: Path) -> None:
    model, tree, config = zoo.build("llama"), segment(unequal_tree()), ReplayConfig(chunk=30, pack=60)
    expected = process(model, tree, config, None)
    assert expected is not None
    (tmp_path / "file").write_text("")
    found = process(model, tree, config, tmp_path / "file" / "journal")
    assert found is not None and found["journal"].report()["checkpoints"] == 0 and found["journal"].report()["failed"]
    require_same(found, expected)
    folder, limit = tmp_path / "journal", resource.getrlimit(resource.RLIMIT_FSIZE)
    assert process(model, tree, config, folder, runs=4) is None
    before = contents(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))  # writes beyond fail, as on a full disk
    try:
        found = process(model, tree, config, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert found is not None and found["begun"] == expected["begun"] - 4
    assert found["journal"].report()["failed"] and contents(folder) == before  # the checkpoint before stays
    require_same(found, expected)
    require_same(process(model, tree, config, folder) or {}, expected)


def test_two_processes_do_not_share_a_journal(tmp_path: Path) -> None:
    one, other = Journal(JournalConfig(tmp_path)), Journal(JournalConfig(tmp_path))
    with one.update({}), pytest.raises(ConfigError, match="another process"), other.update({}):
        pass
    with other.update({}):
        pass


def test_what_it_cannot_hold_is_refused() -> None:
    where = JournalConfig(Path("x"))
    bits = ReplayConfig(placement=Placement(bits=8))
    wrong: list[dict[str, Any]] = [
        {"recapture": ShelfConfig()}, {"bounded": BoundedConfig()}, {"steps": 2}, {"replay": bits},
    ]  # fmt: skip
    for settings in wrong:
        with pytest.raises(ConfigError, match="trainer.journal"):
            TrainerConfig(journal=where, **settings)
    with pytest.raises(ConfigError, match="journal"):
        Engine(zoo.build("llama"), bits).open(segment(unequal_tree()), journal=Journal(where))
    with pytest.raises(ConfigError, match="current folder"):
        JournalConfig(Path(""))
    for settings in ({"seconds": -1}, {"seconds": float("nan")}, {"stop_after": -1.0}):
        with pytest.raises(ConfigError):
            JournalConfig(Path("x"), **settings)


def test_files_that_are_not_the_journals_own_stay(tmp_path: Path) -> None:
    others = {name: tmp_path / f"{name}.safetensors" for name in ("state-dict", "cotangent-3-copy", "model")}
    for path in others.values():
        path.write_text("somebody's")
    model, tree, config = zoo.build("llama"), segment(unequal_tree()), ReplayConfig(chunk=30, pack=60)
    assert process(model, tree, config, tmp_path, runs=8) is None
    done = process(model, tree, config, tmp_path)
    assert done is not None
    done["journal"].settle()
    assert set(tmp_path.iterdir()) == set(others.values())


def test_a_folder_that_cannot_be_synced_leaves_a_checkpoint_with_all_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tree, config = zoo.build("llama"), segment(unequal_tree()), ReplayConfig(chunk=30, pack=60)
    expected = process(model, tree, config, None)
    assert process(model, tree, config, tmp_path, runs=8) is None
    sync, synced = wholefile.sync, [""]

    def failing(path: Path) -> None:
        synced.append(path.name)
        if synced[-2].endswith("-checkpoint.safetensors"):  # the file is in place, and its folder is next
            raise OSError(5, "Input/output error")
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(wholefile, "sync", failing)
        assert process(model, tree, config, tmp_path, runs=3) is None
    require_same(process(model, tree, config, tmp_path) or {}, expected or {})


# -- whole updates ----------------------------------------------------------------------------------------------------------

GROUPS = [Group(f"g{seed}", Task("none", seed), tuple(unequal_tree(seed))) for seed in (0, 1)]


def trainer_of(folder: Path | None, **settings: Any) -> Trainer:
    """A trainer of two trees with a KL term, so that an update has three kinds of passes."""
    config = TrainerConfig(
        replay=ReplayConfig(chunk=40, pack=100), loss=LossConfig(kl_weight=0.1, mismatch_cap=2.0),
        journal=None if folder is None else JournalConfig(folder, **({"seconds": 0} | settings)),
    )  # fmt: skip
    return Trainer(zoo.build("llama", training="lora"), config)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def test_a_step_over_many_processes_is_that_of_one(tmp_path: Path) -> None:
    alone = trainer_of(None)
    expected = alone.update(GROUPS)
    processes, receipt = 0, None
    while receipt is None:
        trainer = trainer_of(tmp_path)
        killed_after(trainer.engine, 9)
        try:
            receipt = trainer.update(GROUPS)
        except Killed:
            processes += 1
            assert processes < 100
    assert processes > 10
    assert all(torch.equal(p, weights_of(alone)[name]) for name, p in weights_of(trainer).items())
    assert receipt.steps == expected.steps and receipt.log_ratio == expected.log_ratio and receipt.flips == expected.flips
    assert sum(receipt.inputs.values()) >= sum(expected.inputs.values())  # states of two trees are not kept between passes
    assert receipt.state_bytes == expected.state_bytes
    report = receipt.journal
    assert report["resumed"] and not report["failed"]
    assert sum(report["inputs_before"].values()) > sum(report["inputs_now"].values())
    trainer.settle()
    assert not list(tmp_path.iterdir())


def test_a_piece_ends_at_a_border_with_a_checkpoint(tmp_path: Path) -> None:
    alone, pieces = trainer_of(None), 0
    alone.update(GROUPS)
    while True:
        trainer = trainer_of(tmp_path, seconds=1000.0, stop_after=0.3)
        try:
            trainer.update(GROUPS)
            break
        except UpdateStoppedError:
            pieces += 1
            assert pieces < 100 and trainer.version == 0 and (tmp_path / "checkpoint.safetensors").exists()
    assert pieces > 1 and all(torch.equal(p, weights_of(alone)[name]) for name, p in weights_of(trainer).items())


def test_what_an_earlier_step_left_is_removed_and_an_unsaved_step_is_made_again(tmp_path: Path) -> None:
    first = trainer_of(tmp_path, seconds=0.2)
    first.update(GROUPS)
    assert (tmp_path / "checkpoint.safetensors").exists()  # nobody said that the step was saved
    again = trainer_of(tmp_path, seconds=0.2)
    assert again.update(GROUPS).journal["resumed"]
    assert all(torch.equal(p, weights_of(first)[name]) for name, p in weights_of(again).items())
    assert not again.update(GROUPS).journal["resumed"]  # the next one, under other weights


def test_what_another_update_left_is_not_removed_by_weights_of_a_later_version(tmp_path: Path) -> None:
    unfinished, later = trainer_of(tmp_path), trainer_of(tmp_path)
    killed_after(unfinished.engine, 9)
    with pytest.raises(Killed):
        unfinished.update(GROUPS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    later.version = 5  # of another run, to which the folder was given too
    with pytest.raises(StaleStateError, match="version"):
        later.update(GROUPS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_a_saved_step_left_is_removed_in_a_new_process(tmp_path: Path) -> None:
    first, second = trainer_of(tmp_path / "journal"), trainer_of(tmp_path / "journal")
    first.update(GROUPS)
    first.save(tmp_path / "step")  # and the process dies before it settles
    second.restore(tmp_path / "step")
    receipt = second.update(GROUPS)
    assert receipt.first_version == 1 and not receipt.journal["resumed"]


def test_what_a_step_left_is_removed_though_it_was_made_beside_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    folder = tmp_path / "journal"
    first, second, third = trainer_of(folder), trainer_of(folder), trainer_of(folder)
    killed_after(first.engine, 9)
    with pytest.raises(Killed):
        first.update(GROUPS)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", read_only)
        assert not second.update(GROUPS).journal["resumed"]
        second.settle()
    second.save(tmp_path / "step")
    third.restore(tmp_path / "step")
    assert not third.update(GROUPS).journal["resumed"]


def test_settling_leaves_what_another_update_wrote_since(tmp_path: Path) -> None:
    first, other = trainer_of(tmp_path, seconds=1000.0), trainer_of(tmp_path)
    first.update(GROUPS[:1])  # too short for a checkpoint
    killed_after(other.engine, 9)
    with pytest.raises(Killed):
        other.update(GROUPS)
    before = sorted(tmp_path.iterdir())
    first.settle()
    assert sorted(tmp_path.iterdir()) == before
    assert trainer_of(tmp_path).update(GROUPS).journal["resumed"]


def test_a_number_that_went_wrong_before_a_checkpoint_is_named_with_its_journal(tmp_path: Path) -> None:
    first, begun = trainer_of(tmp_path), []
    decode = first.engine.decode

    def once_wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        begun.append(1)
        return decode(*args, **kwargs) * (float("nan") if len(begun) == 30 else 1.0)

    first.engine.decode = once_wrong  # type: ignore[method-assign]
    for trainer in (first, trainer_of(tmp_path)):
        with pytest.raises(NonFiniteError, match=f"no step was made; .* remove {tmp_path} to compute the update anew"):
            trainer.update(GROUPS)
    for path in tmp_path.iterdir():
        path.unlink()
    assert trainer_of(tmp_path).update(GROUPS).steps


# -- killed processes -------------------------------------------------------------------------------------------------------

_CHILD = """
import sys
from pathlib import Path
from longstraw_agents.trainer import journal
from tests.test_journal import GROUPS, trainer_of
journal._PAUSE = 0
trainer = trainer_of(Path(sys.argv[1]))
decode = trainer.engine.decode
def told(*args, **kwargs):
    print("run", flush=True)
    return decode(*args, **kwargs)
trainer.engine.decode = told
trainer.update(GROUPS)
"""


def kill_child(folder: Path, runs: int) -> None:
    """Run an update in a process, and kill it once it has begun run number `runs`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _CHILD, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        begun = 0
        for line in running.stdout:
            begun += line == "run\n"
            if begun == runs:
                running.send_signal(signal.SIGKILL)
                break
    assert running.returncode == -signal.SIGKILL


@pytest.mark.parametrize("kills", [(40,), pytest.param((3, 9, 14, 2, 21, 8, 30, 5), marks=pytest.mark.slow)])
def test_killed_processes(kills: tuple[int, ...], tmp_path: Path) -> None:
    for runs in kills:
        kill_child(tmp_path, runs)
        assert list(tmp_path.iterdir())
    alone, last = trainer_of(None), trainer_of(tmp_path)
    alone.update(GROUPS)
    assert last.update(GROUPS).journal["resumed"]
    last.settle()
    assert all(torch.equal(p, weights_of(alone)[name]) for name, p in weights_of(last).items())
    assert not list(tmp_path.iterdir())
