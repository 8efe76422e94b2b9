"""A warm start through the engine equals plain supervised training, and the run that begins with one goes on with its guards."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import models as zoo
import pytest
import torch
from letters import Letters
from made import flat_group, make_group, make_trajectory
from test_loop import config, model_folder  # noqa: F401

from longstraw_agents.errors import ConfigError, StoreError
from longstraw_agents.forking import TreeConfig
from longstraw_agents.guards import Guards
from longstraw_agents.loop import Loop, RunConfig
from longstraw_agents.trainer import comparison
from longstraw_agents.trainer.advantages import Reason
from longstraw_agents.trainer.imitation import imitate
from longstraw_agents.trainer.loss import LossConfig
from longstraw_agents.trainer.update import Trainer, TrainerConfig
from longstraw_agents.types import StopReason
from longstraw_agents.warmstart import WarmStart, stored_groups


class Solved(Letters):
    """Letters whose solver knows that every e counts."""

    def solver(self) -> Generator[str, str, None]:
        yield "eee"


gymnasium.register("tests/Solved-v0", Solved)


@pytest.fixture
def solved(config: RunConfig) -> RunConfig:  # noqa: F811
    return replace(config, tasks=replace(config.tasks, env="tests/Solved-v0"))


def test_what_is_good_enough_is_imitated_with_constant_coefficients():
    failed = make_trajectory([7, 8, 9], stop_reason=StopReason.ENVIRONMENT_ERROR, reward=None, name="failed")
    silent = make_trajectory([7, 8], [0, 0], name="silent")
    group = make_group([failed, silent, *flat_group([1.0, 0.0], [2, 3]).trajectories])
    found = imitate([group, flat_group([0.0], name="bad")], minimum_reward=0.5)
    assert [(name, reason) for _, name, reason in found.dropped] == [
        ("failed", Reason.NO_REWARD), ("silent", Reason.NO_ACTION), ("g/1", Reason.LOW_REWARD), ("bad/0", Reason.LOW_REWARD),
    ]  # fmt: skip
    assert found.skipped == [("bad", Reason.NOTHING_TO_IMITATE)]
    (kept, advantages), = found.kept
    assert [t.trajectory_id for t in kept.trajectories] == ["g/0"] and advantages[0].tolist() == [1, 1]
    everything, = imitate([flat_group([None, 0.0])]).kept
    assert len(everything[0].trajectories) == 2


def test_its_gradient_is_that_of_plain_supervised_training(monkeypatch):
    """Against transformers' own loss with labels, sequence by sequence, weighted to the mean over all action tokens."""
    model = zoo.build("llama", dtype=torch.float64)
    group = make_group(
        [
            make_trajectory([5, 6, 7, 8, 9], [0, 0, 1, 1, 1], name="a"),
            make_trajectory([5, 6, 7, 3], [0, 0, 1, 1], name="b"),
            make_trajectory([4, 2, 1], [0, 0, 1], name="c"),
        ]
    )
    for trajectory in group.trajectories:
        ids = torch.tensor(trajectory.tokens[None].astype("int64"))
        logp = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        (-logp[torch.from_numpy(trajectory.action_mask[1:])].sum() / 6).backward()
    wanted = comparison.gradients(model)
    model.zero_grad(set_to_none=True)
    trainer = Trainer(model, TrainerConfig(loss=LossConfig("supervised")), credit=imitate)
    seen: dict[str, torch.Tensor] = {}

    def keep() -> float:
        seen.update(comparison.gradients(model))
        return 0.0

    monkeypatch.setattr(trainer.stepper, "step", keep)
    receipt = trainer.update([group])
    assert comparison.compare(seen, wanted).worst < 1e-6
    assert receipt.to_dict()["credit"] == {"a": [(2, 5, 1.0)], "b": [(2, 4, 1.0)], "c": [(2, 3, 1.0)]}


def test_a_run_begins_with_demonstrations_and_goes_on_with_its_own_loss(solved: RunConfig) -> None:
    settings = replace(solved, warm_start=WarmStart(updates=6), run=replace(solved.run, updates=7))
    with Loop(settings) as loop:
        report = loop.run()
        steps = loop.store.steps(loop.run_id)
        before, after = (report["evaluations"][name]["sampled"]["mean_return"] for name in ("before", "after"))
        assert after > before + 0.2, "it answers like the demonstrations"
        sizes = [len(loop.store.trajectories(group)) for group in steps[0].group_ids]
        assert sizes == [1, 1] and [len(loop.store.trajectories(g)) for g in steps[6].group_ids] == [4, 4]
        shown = loop.store.load_group(steps[0].group_ids[0]).trajectories[0]
        assert loop.renderer.text(shown.tokens[shown.action_mask]) == "eee" and shown.reward == 1.0
        assert loop.trainer.loss == solved.trainer.loss
        losses = [step.receipt["steps"][0]["loss"] for step in steps[:6]]
        assert losses[-1] < losses[0]


def test_a_warm_start_from_own_samples_keeps_the_good_ones(config: RunConfig) -> None:  # noqa: F811
    start = WarmStart(updates=1, source="samples", minimum_reward=0.6)
    with Loop(replace(config, warm_start=start)) as loop:
        loop.collect()
        receipt = loop.train()
        groups = loop.store.groups(loop.run_id)
        rewards = {row.trajectory_id: row.reward for group in groups for row in loop.store.trajectories(group.group_id)}
    imitated = set(receipt["credit"])
    assert imitated == {name for name, reward in rewards.items() if reward >= 0.6} and imitated != set(rewards)


def test_a_warm_start_from_another_store(solved: RunConfig, tmp_path: Path) -> None:
    with Loop(replace(solved, warm_start=WarmStart(updates=1))) as loop:
        loop.collect()
        loop.train()
    start = WarmStart(updates=2, source="store", store=str(solved.run.folder / "store.sqlite"), run="run")
    other = replace(solved, warm_start=start, run=replace(solved.run, folder=tmp_path / "other"))
    with Loop(other) as loop:
        report = loop.run()
        assert [row["trained"] for row in report["updates"]] == [report["updates"][0]["trained"]] * 2
        assert report["updates"][0]["trained"] > 0 and loop.store.groups(loop.run_id, purpose="train") == []
    missing = replace(other, warm_start=replace(start, run="nobody"), run=replace(other.run, folder=tmp_path / "missing"))
    with Loop(missing) as loop, pytest.raises(StoreError, match="nobody"):
        loop.train()


def test_training_groups_may_branch_but_evaluation_and_demonstrations_never_do(solved: RunConfig) -> None:
    collect = replace(solved.collect, tree=TreeConfig(trunks=1))
    with Loop(replace(solved, collect=collect, warm_start=WarmStart(updates=1))) as loop:
        loop.run()
        of_purpose = {
            purpose: [loop.store.trajectories(group.group_id) for group in loop.store.groups(loop.run_id, purpose=purpose)]
            for purpose in ("train", "eval")
        }
    assert all(row.parent is None for rows in of_purpose["eval"] for row in rows)
    shown, branched = of_purpose["train"][:2], of_purpose["train"][2:]
    assert [len(rows) for rows in shown] == [1, 1] and [len(rows) for rows in branched] == [4, 4]
    assert all([row.parent is None for row in rows] == [True, False, False, False] for rows in branched)


def test_a_breach_stops_the_run_and_a_wider_guard_lets_it_go_on(config: RunConfig) -> None:  # noqa: F811
    strict = replace(config, guards=Guards(min_entropy=100.0))
    with Loop(strict) as loop:
        report = loop.run()
        assert len(report["updates"]) == 1 and "below min_entropy 100" in report["stopped"][0]
        assert "after" in report["evaluations"]
        collected = loop.store.steps(loop.run_id)[0].receipt["collected"]
        assert collected["entropy"] > 0 and set(collected["degenerate"]) >= {"empty", "looping", "truncated"}
    with Loop(strict) as loop:
        assert len(loop.run()["updates"]) == 1
    with Loop(config) as loop:
        assert len(loop.run()["updates"]) == 2


def test_the_best_step_is_kept_and_patience_stops(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    run = replace(config.run, updates=9, evaluate_every=1, keep=1)
    patient = replace(config, run=run, guards=Guards(patience=3))
    successes = iter([0.1, 0.2, 0.9, 0.3, 0.3, 0.3])

    def scored(mode: str, outcomes: Any) -> Any:
        from longstraw_agents import scores

        real = scores.score(mode, outcomes)
        return replace(real, success=next(successes)) if mode == "sampled" else real

    monkeypatch.setattr("longstraw_agents.loop.score", scored)
    with Loop(patient) as loop:
        loop.evaluate("before")
        while not loop.stops():
            loop.collect()
            loop.train()
            loop.evaluate(f"update {loop.done}")
        assert loop.done == 5 and "no better success" in loop.stops()[0]
        best = loop.best()
        assert best is not None and (best["evaluation"], best["step"], best["success"]) == ("update 2", 2, 0.9)
        assert sorted(path.name for path in loop.steps.iterdir()) == ["000002", "000005"]
        assert Path(best["folder"]).is_dir()


@pytest.mark.parametrize(
    "settings",
    [
        {"updates": -1},
        {"source": "store"},
        {"source": "solver", "store": "x", "run": "y"},
        {"source": "samples"},
        {"source": "books"},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        WarmStart(**settings)


def test_a_store_that_is_not_there_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        stored_groups(WarmStart(updates=1, source="store", store=str(tmp_path / "none.sqlite"), run="r"), 1, 1)
    assert list(tmp_path.iterdir()) == []
