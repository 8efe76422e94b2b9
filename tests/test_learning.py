"""The learning experiments: their reading task, the arms' gradients, and what is reported of them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[1]))
import letters  # noqa: E402
import models  # noqa: E402
from trees import short_tree  # noqa: E402

from benchmarks import documents, learning_report  # noqa: E402
from benchmarks.learning import Arms  # noqa: E402
from benchmarks.learning_arms import Arm, ConventionalReplay  # noqa: E402
from benchmarks.learning_long import StagedLoop, ending, run_long  # noqa: E402
from longstraw_agents.segmenter import segment  # noqa: E402
from longstraw_agents.trainer.replay import Engine  # noqa: E402
from longstraw_agents.types import Group, Task  # noqa: E402


@pytest.mark.parametrize("ask", ["number", "name"])
@pytest.mark.parametrize("questions", [1, 4])
def test_the_documents_solver_earns_everything_and_a_wrong_value_a_little(questions: int, ask: str) -> None:
    env = gymnasium.make(documents.ENV_ID)
    options = {"chars": 2000, "facts": 5, "questions": questions, "ask": ask}
    for seed in range(4):
        text, _ = env.reset(seed=seed, options=options)
        task = env.unwrapped
        assert all(text.count(f"The number of {name} is") == 1 for name in task.names)
        assert (task.values[0] if ask == "name" else task.names[0]) in text.splitlines()[-1]
        rewards = [env.step(action) for action in list(task.solver())]
        assert rewards[-1][4]["success"] and sum(step[1] for step in rewards) == pytest.approx(1.2)
        env.reset(seed=seed, options=options)
        values = task.names if ask == "name" else task.values
        wrong = [env.step(f"It is {values[-1 if asked == 0 else 0]}.") for asked in range(questions)]
        assert not wrong[-1][4]["success"] and sum(step[1] for step in wrong) == pytest.approx(0.2)


def test_the_conventional_arm_has_the_exact_gradient() -> None:
    model, tree = models.build("llama", training="lora"), segment(short_tree())
    weights = torch.linspace(-1.0, 1.0, len(tree.entry_node))
    found = []
    for replay in (Engine(model).open(tree), ConventionalReplay(model, tree)):
        model.zero_grad()
        before = replay.score()
        scores = replay.backward(weights)
        torch.testing.assert_close(before.logp, scores.logp, atol=1e-5, rtol=1e-5)
        found.append((scores.logp, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    (logp, exact), (seen, conventional) = found
    torch.testing.assert_close(logp, seen, atol=1e-4, rtol=1e-4)
    assert exact.keys() == conventional.keys() and exact
    for name, gradient in exact.items():
        torch.testing.assert_close(gradient, conventional[name], atol=1e-4, rtol=1e-3)


def test_an_ending_keeps_the_last_tokens_and_begins_with_an_observation() -> None:
    group = Group("g", Task("e", 0), tuple(short_tree()))
    shortest = min(len(trajectory.tokens) for trajectory in group.trajectories)
    for limit in range(1, shortest + 1):
        cut = ending(group, limit)
        assert not any(trajectory.action_mask[0] for trajectory in cut.trajectories)
        for whole, kept in zip(group.trajectories, cut.trajectories, strict=True):
            np.testing.assert_array_equal(whole.tokens[-len(kept.tokens) :], kept.tokens)
            assert kept.turn_ends[-1] == len(kept.tokens)
        assert limit <= min(len(trajectory.tokens) for trajectory in cut.trajectories)


@pytest.mark.parametrize("fails", ["sampling", "training"])
def test_a_long_arm_evaluates_last_whatever_a_stage_does(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def collect(loop: StagedLoop) -> list[str]:
        with monkeypatch.context() as patch:
            if fails == "sampling" and loop.stage.name == "own":
                patch.setattr(loop.policy._runner, "run", no_memory)
            return plain_collect(loop)

    def update(loop: StagedLoop, number: int, groups: list[Group]) -> dict[str, object]:
        return no_memory() if fails == "training" and loop.stage.name == "shown" else plain_update(loop, number, groups)

    plain_collect, plain_update = StagedLoop.collect, StagedLoop._update
    monkeypatch.setattr(StagedLoop, "collect", collect)
    monkeypatch.setattr(StagedLoop, "_update", update)
    folder, out = tmp_path / "run", tmp_path / "long-0.json"
    model = letters.make_model(tmp_path / "model")
    run_long(Arm("long-0", model, "cpu", "small", folder, out, time.time() + 600, 0.48))
    found = json.loads(out.read_text())
    assert list(found["failed"]) == [{"sampling": "own", "training": "shown"}[fails]] and found["ended"] == "updates"
    assert [row["name"] for row in found["evaluations"]] == ["before", "after"]
    assert all(answer is not None for row in found["evaluations"] for answer in row["answers"])


def test_two_long_arms_on_one_gpu_halve_its_memory() -> None:
    for kinds, gpus, wanted in ((("long", "truncated"), 1, "0.48"), (("long", "truncated", "trl"), 1, "0.3"),
                                (("long", "truncated"), 2, None), (("long",), 1, None)):  # fmt: skip
        arms = Arms([f"{kind}-0" for kind in kinds], 9, gpus, Path(), [])
        assert arms._memory("long-0") == ([] if wanted is None else ["--memory", wanted])
        assert arms._memory("trl-0") == []


def arm(success: dict[int, list[float]]) -> dict[str, object]:
    rows = [{"update": at, "success": of_tasks, "returns": of_tasks} for at, of_tasks in success.items()]
    updates = [{"seconds": float(max(success)), "sampled": 5}] * max(success)
    return {"code": 0, "progress": {"evaluations": rows, "updates": updates, "scale": "full"}}


def test_arms_are_compared_at_their_last_common_update() -> None:
    arms = {
        "exact-0": arm({0: [0, 0], 5: [1, 0], 10: [1, 1]}), "detached-0": arm({0: [0, 0], 5: [0, 0]}),
        "exact-1": arm({0: [0, 0], 5: [1, 1]}), "detached-1": arm({0: [0, 0], 5: [0, 1], 10: [1, 1]}),
        "tree-0": {"code": 1, "progress": None},
    }  # fmt: skip
    report = learning_report.Report({"measured": {}, "command": "", "arms": arms})
    assert report._differences(("detached", "exact"), "success") == {0: 50.0, 1: 50.0}
    tables = report.tables()
    assert "exact minus detached, at the end: +50.0 points [+50.0, +50.0]" in tables and "Arms that failed: tree-0." in tables
    assert "mean over all updates" not in tables, "one common update after the first has no mean of its own"


def test_arms_with_curves_are_also_compared_by_their_mean_over_all_updates() -> None:
    arms = {
        "exact-0": arm({0: [0, 0], 5: [1, 1], 10: [1, 1]}), "detached-0": arm({0: [0, 0], 5: [0, 0], 10: [1, 1]}),
        "exact-1": arm({0: [0, 0], 5: [1, 1], 10: [1, 1]}), "detached-1": arm({0: [0, 0], 5: [0, 0], 10: [1, 1]}),
    }  # fmt: skip
    tables = learning_report.Report({"measured": {}, "command": "", "arms": arms}).tables()
    assert "exact minus detached, at the end: +0.0 points" in tables
    assert "exact minus detached, mean over all updates: +50.0 points" in tables


def test_a_later_files_arm_replaces_an_earlier_ones() -> None:
    wrong = {"measured": {}, "command": "first", "arms": {"exact-0": {"code": 1, "progress": None}, "trl-0": arm({0: [0, 0]})}}
    right = {"measured": {}, "command": "second", "arms": {"exact-0": arm({0: [0, 0], 5: [1, 0]})}}
    report = learning_report.Report(wrong, right)
    assert not report.failed and report.heads["exact-0"][1] == "second" and report.heads["trl-0"][1] == "first"
