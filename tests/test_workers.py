"""Environments on a Ray cluster started here: the same episodes as in threads, and a host that dies costs nothing but time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'longstraw-agents[ray]'")

import letters
from click.testing import CliRunner

from longstraw_agents import config as toml
from longstraw_agents.cli import main
from longstraw_agents.collection import CollectConfig, CollectResult, collect
from longstraw_agents.errors import ConfigError
from longstraw_agents.storage import Store
from longstraw_agents.types import Task
from tests.chat import countdown, make_countdown, make_dying
from tests.test_collection import RENDERER, Repeater, contents

pytestmark = pytest.mark.ray


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "store.sqlite")) as store:
        yield store


def run(store: Store, tasks: list[Task], workers: str, **options: Any) -> CollectResult:
    config = CollectConfig(concurrency=6, max_action_tokens=40, workers=workers)  # type: ignore[arg-type]
    settings = {"run_id": store.create_run("r", {}), "group_size": 4, "make": make_countdown, **options}
    return asyncio.run(collect(store, Repeater(), RENDERER, tasks, config, **settings))


def test_episodes_are_those_of_threads(store: Store) -> None:
    tasks = [countdown(1), countdown(2), countdown(3, raise_at=2)]
    here, there = run(store, tasks, "threads"), run(store, tasks, "ray")
    assert there.complete and there.progress.failures == here.progress.failures == {"environment_error": 4}
    assert contents(store, here) == contents(store, there)


def test_a_host_that_dies_is_replaced(store: Store, tmp_path: Path) -> None:
    tasks = [countdown(1, mark=str(tmp_path / "mark"))]
    result = run(store, tasks, "ray", make=make_dying)
    assert (tmp_path / "mark").exists() and result.complete
    assert not result.progress.failures and result.progress.retried > 0


def test_the_command_spreads_a_runs_environments(tmp_path: Path) -> None:
    config = letters.letters_config(letters.make_model(tmp_path / "model"), tmp_path / "run")
    path = tmp_path / "run.toml"
    path.write_text(toml.dump(replace(config, tasks=replace(config.tasks, env="longstraw/Lookup-v0"))))
    collected = CliRunner().invoke(main, ["collect", str(path), "--workers", "ray"])
    assert collected.exit_code == 0, collected.output
    with Store.open(str(tmp_path / "run" / "store.sqlite")) as store:
        assert [group.complete for group in store.groups("r1")] == [True, True]
        assert store.runs()[0].config["collect"]["workers"] == "ray"
    again = CliRunner().invoke(main, ["collect", str(path), "--workers", "threads"])  # where they run is nothing that counts
    assert again.exit_code == 0, again.output


def test_a_wrong_environment_is_the_users_mistake_there_too(store: Store) -> None:
    from longstraw_agents.episodes import make_registered

    with pytest.raises(ConfigError, match="unknown environment"):
        run(store, [Task("Nowhere-v0", 0)], "ray", make=make_registered)
