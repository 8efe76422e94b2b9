"""Stored episodes are scored again without sampling, and two evaluations are compared from the store alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from click.testing import CliRunner
from letters import Letters
from test_loop import config, model_folder  # noqa: F401

from longstraw_agents import config as toml
from longstraw_agents.cli import main
from longstraw_agents.evaluation import outcomes
from longstraw_agents.loop import Loop, RunConfig
from longstraw_agents.rescoring import rescore


class Chosen(Letters):
    """Letters that count only the option's letters, and that may greet."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.letters = (options or {}).get("letters", "")
        observation, info = super().reset(seed=seed)
        if (options or {}).get("greet"):
            info["messages"] = [replace(info["messages"][0], content="hello")]
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.letters:
            reward = float(any(letter in self.letters for letter in action))
            info["success"] = bool(reward)
        return observation, reward, terminated, truncated, info


gymnasium.register("tests/Chosen-v0", Chosen)


@pytest.fixture
def chosen(config: RunConfig) -> RunConfig:  # noqa: F811
    run = replace(config.run, updates=1)
    return replace(config, run=run, tasks=replace(config.tasks, env="tests/Chosen-v0"))


def test_episodes_are_scored_again_as_they_are_or_under_other_options(chosen: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with Loop(chosen) as loop:
        loop.evaluate("before")
        groups = loop.store.evaluations(loop.run_id)[0].metrics["sampled"]["groups"]
        monkeypatch.setattr(loop.policy, "sample", None)
        recorded = outcomes(loop.store, groups)
        assert rescore(loop.store, loop.renderer, groups) == recorded
        everything = rescore(loop.store, loop.renderer, groups, {"letters": "abcdefghijklmnopqrstuvwxyz"})
        answered = [[row for row in loop.store.trajectories(group)] for group in groups]
        for row, outcome in zip(sum(answered, []), sum(everything, []), strict=True):
            text = loop.renderer.text(loop.store.turns(row.trajectory_id)[0].action)
            cut = row.stop_reason == "action_cut"
            assert outcome.success == (not cut and any(letter.isalpha() and letter.islower() for letter in text))
        assert outcomes(loop.store, groups) == recorded, "the store is as it was"


def test_an_environment_that_says_something_else_gives_no_score(chosen: RunConfig) -> None:
    with Loop(chosen) as loop:
        loop.evaluate("before")
        groups = loop.store.evaluations(loop.run_id)[0].metrics["sampled"]["groups"]
        found = rescore(loop.store, loop.renderer, groups, {"greet": True})
        assert all(outcome.reward is None and not outcome.success for task in found for outcome in task)


def test_any_step_and_adapter_is_evaluated_beside_the_run_and_compared_with_it(chosen: RunConfig, tmp_path: Path) -> None:
    with Loop(chosen) as loop:
        loop.run()
        adapter, steps = loop.step_folder, len(loop.store.evaluations(loop.run_id))
    file = tmp_path / "run.toml"
    file.write_text(toml.dump(chosen))

    def call(*arguments: str) -> str:
        return str(CliRunner().invoke(main, list(arguments), catch_exceptions=False).output)

    assert "step 1: sampled" in call("eval", str(file), "--step", "1", "--k", "1", "--k", "2", "--json", str(tmp_path / "1.json"))
    found = json.loads((tmp_path / "1.json").read_text())["sampled"]
    assert found["pass@1"]["value"] == pytest.approx(found["success"]) and found["success"] <= found["pass@2"]["value"]
    call("eval", str(file), "--adapter", str(adapter), "--name", "same weights")
    call("eval", str(file), "--step", "0", "--name", "untrained")
    assert "0 tasks better, 0 worse, 3 alike" in call("compare", str(file), "step 1", "same weights")
    assert "0 tasks better, 0 worse, 3 alike" in call("compare", str(file), "before", "untrained")
    assert "elsewhere: sampled" in call("eval", str(file), "--env", "tests/Letters-v0", "--name", "elsewhere")
    assert "different tasks" in CliRunner().invoke(main, ["compare", str(file), "elsewhere", "step 1"]).output
    assert "adapter_model" in CliRunner().invoke(main, ["eval", str(file), "--step", "7"]).output
    with Loop(chosen) as loop:
        assert len(loop.store.evaluations(loop.run_id)) == steps and loop.done == 1


def test_the_command_compares_from_the_store(chosen: RunConfig, tmp_path: Path) -> None:
    with Loop(chosen) as loop:
        loop.run()
    file = tmp_path / "run.toml"
    file.write_text(toml.dump(chosen))
    plain = CliRunner().invoke(main, ["compare", str(file), "before", "after", "--k", "2"], catch_exceptions=False)
    assert plain.exit_code == 0 and "pass@2" in plain.output and "tasks better" in plain.output
    same = CliRunner().invoke(main, ["compare", str(file), "before", "before"], catch_exceptions=False)
    assert "+0.0 points [+0.0, +0.0], p = 1; 0 tasks better, 0 worse, 3 alike" in same.output
    changed = ["compare", str(file), "before", "after", "--rescore", 'letters="#"']
    again = CliRunner().invoke(main, changed, catch_exceptions=False)
    assert again.exit_code == 0 and again.output.count("success   0.0%") == 2
    missing = CliRunner().invoke(main, ["compare", str(file), "before", "update 9"])
    assert missing.exit_code == 1 and "no evaluation 'update 9'" in missing.output and "before (sampled)" in missing.output
