"""The run as a whole, on a tiny model and an environment that it can learn: stored, resumed, refused, the same bit for bit."""

from __future__ import annotations

import asyncio
import json
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import letters
import numpy as np
import peft
import pytest
import torch
import transformers
from click.testing import CliRunner

from longstraw_agents import cli
from longstraw_agents import config as toml
from longstraw_agents import loop as loop_module
from longstraw_agents.collection import collect
from longstraw_agents.errors import ConfigError, CorruptionError, StoreError
from longstraw_agents.evaluation import EvaluateSettings, heldout_tasks
from longstraw_agents.loop import Loop, RunConfig
from longstraw_agents.metrics import MetricsSettings
from longstraw_agents.policies import Sampling
from longstraw_agents.policies.opening import PolicySettings
from longstraw_agents.trainer.journal import JournalConfig
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.ranks import Layout


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return letters.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model_folder: str, tmp_path: Path) -> RunConfig:
    return letters.letters_config(model_folder, tmp_path / "run")


def adapter_of(folder: Path, step: int) -> bytes:
    return (folder / "steps" / f"{step:06d}" / "adapter_model.safetensors").read_bytes()


def test_a_run_stores_trains_and_evaluates(config: RunConfig) -> None:
    with Loop(config) as loop:
        report = loop.run()
        assert [row["update"] for row in report["updates"]] == [1, 2]
        assert set(report["evaluations"]) == {"before", "after"}
        assert set(report["evaluations"]["after"]) == {"sampled", "greedy"}
        assert {"load", "collect", "train", "commit", "evaluate"} <= set(report["phases"])
        for group in loop.store.groups(loop.run_id, purpose="train"):
            assert group.complete and group.task.split == "train" and group.step in (1, 2)
        for group in loop.store.groups(loop.run_id, purpose="eval"):
            assert group.complete and group.task.split == "heldout" and group.step is None
        gain, (low, high) = loop.gain("before", "after")
        assert low <= gain <= high
        assert "reward" in loop.summary() and str(loop.step_folder) in loop.summary()
        assert json.loads((loop.step_folder / "receipt.json").read_text())["last_version"] == loop.trainer.version
    json.dumps(report)


def test_a_finished_loop_keeps_no_model(config: RunConfig) -> None:
    with Loop(config) as loop:
        loop.collect()
        loop.train()
        model = weakref.ref(loop.model)
    assert loop.config is config and model() is None


def test_the_saved_adapter_gives_the_same_logits_in_plain_peft(config: RunConfig, model_folder: str) -> None:
    with Loop(config) as loop:
        loop.run()
        base = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
        plain = peft.PeftModel.from_pretrained(base, loop.step_folder)
        ids = torch.arange(20)[None]
        with torch.no_grad():
            assert torch.equal(plain(ids).logits, loop.model(ids).logits)
            with plain.disable_adapter():
                assert not torch.equal(plain(ids).logits, loop.model(ids).logits)


def test_training_in_another_process_gives_the_same_bits(config: RunConfig, tmp_path: Path) -> None:
    """Everything that training uses comes from the store: a loop that only loaded gives what the loop that collected gives."""
    with Loop(config) as first:
        first.collect()
        first.train()
        first.collect()
        shutil.copytree(config.run.folder, tmp_path / "copy")
        first.train()
    other = replace(config, run=replace(config.run, folder=tmp_path / "copy"))
    with Loop(other) as second:
        assert second.done == 1
        second.train()
    assert adapter_of(config.run.folder, 2) == adapter_of(tmp_path / "copy", 2)
    assert adapter_of(config.run.folder, 2) != adapter_of(config.run.folder, 1)


def test_a_run_interrupted_while_collecting_goes_on(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Iterator[int] = iter(range(100))

    def interrupt(self: Any, done: float, note: str = "") -> None:
        if next(seen) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, Loop(config) as loop:
        loop.evaluate("before")
        patch.setattr("longstraw_agents.terminal.Progress.update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.run()
        finished = {
            row.trajectory_id: row.length
            for group in loop.store.groups(loop.run_id, purpose="train")
            for row in loop.store.trajectories(group.group_id)
            if row.stop_reason is not None
        }
    with Loop(config) as again:
        again.run()
        groups = again.store.groups(again.run_id, purpose="train")
        assert len(groups) == 4 and all(group.complete for group in groups)
        rows = {row.trajectory_id: row for group in groups for row in again.store.trajectories(group.group_id)}
        assert len(rows) == 16
        for trajectory_id, length in finished.items():
            assert rows[trajectory_id].length == length
        assert [step.step for step in again.store.steps(again.run_id)] == [1, 2]


def test_a_crash_between_writing_and_committing_repeats_the_step(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def die(*arguments: Any, **named: Any) -> None:
        raise Killed

    with Loop(config) as loop, monkeypatch.context() as patch:
        loop.collect()
        patch.setattr(loop.store, "commit_step", die)
        with pytest.raises(Killed):
            loop.train()
    written = adapter_of(config.run.folder, 1)
    with Loop(config) as again:
        assert again.done == 0 and again.trainer.version == 0
        again.train()
        assert again.done == 1 and again.trainer.version == 1
    assert adapter_of(config.run.folder, 1) == written


def test_another_configuration_is_refused_and_more_updates_are_not(config: RunConfig) -> None:
    with Loop(config) as loop:
        loop.collect()
        loop.train()
    optimizer = OptimizerConfig(learning_rate=2e-2)
    with pytest.raises(ConfigError, match=r"trainer.optimizer.learning_rate = 0.01, and 0.02"):
        Loop(replace(config, trainer=replace(config.trainer, optimizer=optimizer)))
    with Loop(replace(config, run=replace(config.run, updates=1))) as loop:
        assert len(loop.run()["updates"]) == 1


def test_what_was_sampled_otherwise_is_not_trained_on(config: RunConfig) -> None:
    """The configuration can't ask for it; groups that came into the run by another way are refused by their turns' notes."""
    hot = replace(config.collect, sampling=Sampling(temperature=0.7))
    with pytest.raises(ConfigError, match="must be the one that was sampled"):
        replace(config, collect=hot)
    shared = replace(config, parallel=Layout(ep=2), policy=PolicySettings("server", model="served"))
    with pytest.raises(ConfigError, match="shares experts out"):
        replace(shared, model=replace(config.model, weights="host"))
    with pytest.raises(ConfigError, match="top_p is 0.9"):
        replace(config, collect=replace(config.collect, sampling=Sampling(top_p=0.9)))
    with Loop(config) as loop:
        tasks = loop.tasks(1)
        work = collect(loop.store, loop.policy, loop.renderer, tasks, hot, run_id=loop.run_id, group_size=4)
        (first, *_) = asyncio.run(work).group_ids
        assert {note["temperature"] for t in loop.store.load_group(str(first)).trajectories for note in t.turn_notes} == {0.7}
        with pytest.raises(ConfigError, match="sampled with temperature 0.7"):
            loop.train()
        assert loop.done == 0


def test_training_without_groups_says_what_to_do(config: RunConfig) -> None:
    with Loop(config) as loop, pytest.raises(StoreError, match="collect first"):
        loop.train()


def test_a_damaged_adapter_is_not_trained_on(config: RunConfig) -> None:
    with Loop(config) as loop:
        loop.collect()
        loop.train()
        path = loop.step_folder / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CorruptionError, match="adapter_model"):
        Loop(config)


def test_evaluation_tasks_are_the_same_for_every_run_and_apart_from_training() -> None:
    settings = EvaluateSettings(tasks=50)
    tasks = heldout_tasks(settings, "tests/Letters-v0", {"a": 1})
    assert tasks == heldout_tasks(settings, "tests/Letters-v0", {"a": 1})
    assert len({task.seed for task in tasks}) == 50 and {task.split for task in tasks} == {"heldout"}
    assert {loop_module.task_seed(seed, index) for seed in (0, 1) for index in range(1000)}.__len__() == 2000


def test_an_update_whose_groups_are_all_skipped_is_recorded_and_the_run_goes_on(config: RunConfig) -> None:
    def nothing(groups: Any) -> Any:
        from longstraw_agents.trainer.advantages import AdvantageConfig, prepare

        flat = [replace(group, trajectories=tuple(replace(t, reward=1.0) for t in group.trajectories)) for group in groups]
        return prepare(flat, AdvantageConfig())

    with Loop(config, credit=nothing) as loop:
        report = loop.run()
        assert [row["skipped"] for row in report["updates"]] == [2, 2]
        assert loop.trainer.version == 0
    assert np.array_equal(*(np.frombuffer(adapter_of(config.run.folder, step), np.uint8) for step in (1, 2)))


def test_the_stored_configuration_is_the_one_in_the_folder(config: RunConfig) -> None:
    with Loop(config) as loop:
        assert toml.load(config.run.folder / "run.toml", RunConfig) == config
        assert loop.store.runs()[0].config == toml.plain(config)


def test_a_merged_model_needs_no_peft_and_its_card_has_the_figures(config: RunConfig, tmp_path: Path) -> None:
    with Loop(config) as loop:
        loop.run()
        scores, version = loop.evaluate("after"), loop.trainer.version
        ids = torch.arange(20)[None]
        with torch.no_grad():
            adapted = loop.model(ids).logits
    path = config.run.folder / "run.toml"
    result = CliRunner().invoke(cli.main, ["merge", str(path), str(tmp_path / "merged"), "--json", str(tmp_path / "merge.json")])
    assert result.exit_code == 0, result.output
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert torch.allclose(plain(ids).logits, adapted, atol=1e-4)
    assert json.loads((tmp_path / "merge.json").read_text())["relative_logit_difference"] < 1e-5
    card = (tmp_path / "merged" / "README.md").read_text()
    assert f"| after | {version} | sampled | {scores['sampled'].success:.1%} |" in card and "gradient: exact" in card
    again = CliRunner().invoke(cli.main, ["merge", str(path), str(tmp_path / "merged")])
    assert again.exit_code == 1 and "not empty" in again.output


def test_show_tells_what_the_store_holds(config: RunConfig, tmp_path: Path) -> None:
    with Loop(config) as loop:
        loop.run()
        url = str(config.run.folder / "store.sqlite")
        group = loop.store.groups(loop.run_id, purpose="train")[0].group_id
        trajectory = loop.store.trajectories(group)[0].trajectory_id

    def show(*arguments: str) -> str:
        result = CliRunner().invoke(cli.main, ["show", url, *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    assert "r1" in show() and "after" in show("r1")
    assert trajectory in show(group) and "stop_reason" in show(group)
    report = tmp_path / "show.json"
    assert "-- action" in show(trajectory, "--json", str(report))
    assert json.loads(report.read_text())["turns"][0]["observation"].startswith("<|im_start|>user")
    for wrong in ("x1", "t", "t99999"):
        result = CliRunner().invoke(cli.main, ["show", url, wrong])
        assert result.exit_code == 1 and result.output.startswith("Error: ")


def test_a_run_hands_its_numbers_on(config: RunConfig) -> None:
    with Loop(replace(config, metrics=MetricsSettings(("prometheus",)))) as loop:
        loop.run()
    text = (config.run.folder / "metrics.prom").read_text()
    for name in ("collect_reward", "train_gradient_norm", "phases_replay_seconds", "evaluate_sampled_success"):
        assert f'longstraw_{name}{{run="run"}}' in text


def test_a_longer_run_is_evaluated_anew_at_its_end_and_keeps_what_was_before(config: RunConfig) -> None:
    with Loop(config) as loop:
        before = loop.run()["evaluations"]["before"]
        after = loop.trainer.version
    with Loop(replace(config, run=replace(config.run, updates=3))) as loop:
        report = loop.run()
        versions = [(row.name, row.policy_version) for row in loop.store.evaluations(loop.run_id)]
        assert versions == [("before", 0), ("after", after), ("after", loop.trainer.version)]
        assert loop.trainer.version > after and report["evaluations"]["before"] == before


def test_a_run_killed_within_an_update_goes_on_there(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Loop(config) as alone:
        alone.collect()
        shutil.copytree(config.run.folder, tmp_path / "other")
        alone.train()
    journal = JournalConfig(tmp_path / "journal", seconds=0)
    other = replace(config.run, folder=tmp_path / "other")
    resumed = replace(config, run=other, trainer=replace(config.trainer, journal=journal))
    with Loop(resumed) as first:
        decode, left = first.trainer.engine.decode, iter(range(7))

        def dying(*args: Any, **kwargs: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return decode(*args, **kwargs)

        monkeypatch.setattr(first.trainer.engine, "decode", dying)
        with pytest.raises(KeyboardInterrupt):
            first.train()
    assert (tmp_path / "journal" / "checkpoint.safetensors").exists()
    path = tmp_path / "run.toml"
    path.write_text(toml.dump(resumed))
    with Loop(toml.load(path, RunConfig)) as second:
        receipt = second.train()
    assert receipt["journal"]["resumed"] and not list((tmp_path / "journal").iterdir())
    assert adapter_of(other.folder, 1) == adapter_of(config.run.folder, 1)


def test_a_command_that_stops_as_asked_ends_with_a_status_of_its_own_and_goes_on(config: RunConfig, tmp_path: Path) -> None:
    run = replace(config.run, updates=1, evaluate_every=0)
    journal = JournalConfig(tmp_path / "journal", seconds=0, stop_after=0)
    path = tmp_path / "run.toml"
    path.write_text(toml.dump(replace(config, run=run, trainer=replace(config.trainer, journal=journal))))
    stopped = CliRunner().invoke(cli.main, ["run", str(path)])
    assert stopped.exit_code == 75 and "as asked for" in stopped.stderr and f"longstraw run {path}" in stopped.stderr
    again = CliRunner().invoke(cli.main, ["run", str(path), "--set", "trainer.journal.stop_after=1000.0"])
    assert again.exit_code == 0, again.output
    assert adapter_of(run.folder, 1)


def test_the_journal_of_a_committed_step_goes_when_the_run_is_opened(config: RunConfig, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    config = replace(config, trainer=replace(config.trainer, journal=JournalConfig(journal, seconds=0)))
    with Loop(config) as loop:
        loop.collect()
        loop.trainer.settle = lambda: None  # type: ignore[method-assign]  # it dies there
        loop.train()
    assert list(journal.iterdir())
    with Loop(config):
        assert not list(journal.iterdir())


def test_a_step_that_was_not_committed_is_not_made_twice_by_the_same_process(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    with Loop(config) as loop:
        loop.collect()
        with monkeypatch.context() as patch:
            patch.setattr(loop_module, "write_step", full)
            with pytest.raises(OSError, match="No space"):
                loop.train()
        assert loop.done == 0 and loop.trainer.version == 1
        with pytest.raises(StoreError, match="version 1, but .* version 0; open the run again"):
            loop.train()
        assert loop.done == 0
    with Loop(config) as again:
        assert again.train()["first_version"] == 0


def test_a_step_that_another_process_committed_meanwhile_keeps_its_files(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Loop(config) as slow:
        slow.collect()
        train = slow._train_alone

        def outrun(*arguments: Any) -> Any:
            receipt = train(*arguments)
            with Loop(config) as fast:
                fast.train()
            return receipt

        monkeypatch.setattr(slow, "_train_alone", outrun)
        with pytest.raises(StoreError, match="step 1 .* another process"):
            slow.train()
    with Loop(config) as again:
        assert again.done == again.trainer.version == 1


def test_weights_that_another_process_left_behind_are_not_trained(config: RunConfig) -> None:
    with Loop(config) as slow:
        slow.collect()
        with Loop(config) as fast:
            fast.train()
        slow.collect()
        with pytest.raises(StoreError, match="version 0, but .* version 1"):
            slow.train()
        assert slow.done == 1
