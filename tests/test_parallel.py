"""Several processes give the gradient of one: context, data and expert parallelism on gloo, in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_loop import config, model_folder  # noqa: F401  fixtures: a tiny model, and a run of two updates on it
from torch.distributed import HashStore

from longstraw_agents import config as toml
from longstraw_agents.errors import ConfigError, RankError
from longstraw_agents.launch import launch
from longstraw_agents.loop import RunConfig
from longstraw_agents.storage import Store
from longstraw_agents.trainer import watch
from longstraw_agents.trainer.ranks import Layout

ROOT = Path(__file__).resolve().parent.parent


def run_cases(tmp_path: Path, cases: list[dict[str, Any]], **layout: int) -> list[dict[str, Any]]:
    output = tmp_path / "results"
    command = [sys.executable, "-m", "tests.parallel_worker", str(output), json.dumps(cases), json.dumps(layout)]
    launch(command, Layout(**layout).size, environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.fixture(scope="module")
def shared_tokens(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes found: attention, windows, recurrences, selections; packed branches, long leaves, uneven spans."""
    cases = [
        {"name": "llama", "chunk": 50, "pack": 200, "score": True},
        {"name": "llama", "training": "lora", "gradient": "detached", "chunk": 64, "pack": 200},
        {"name": "gemma3", "chunk": 33, "pack": 1, "outputs": True},
        {"name": "qwen3_5", "chunk": 65, "pack": 200, "outputs": True},
        {"name": "glm_moe_dsa", "training": "lora", "chunk": 70, "pack": 200},
        {"job": "selections", "name": "glm_moe_dsa", "heads": 1},
        {"job": "selections", "name": "deepseek_v32", "heads": 1},
    ]
    return run_cases(tmp_path_factory.mktemp("cp2"), cases, cp=2)


def test_two_processes_share_tokens(shared_tokens: list[dict[str, Any]]) -> None:
    for found in shared_tokens[:5]:
        assert found["worst"] < 1e-10 and found["logp"] < 1e-10, found
        assert all(entry["sent_bytes"] for entry in found["ranks"])


def test_selections_are_those_of_one_process_ties_included(shared_tokens: list[dict[str, Any]]) -> None:
    """One index head: half of the scores are exactly zero, so the last places are tied all the time."""
    for found in shared_tokens[5:]:
        assert found["differing"] == 0 and found["ties"] > found["queries"] / 20, found


def test_two_processes_share_trees(tmp_path: Path) -> None:
    assert all(found["worst"] < 1e-10 for found in run_cases(tmp_path, [{"name": "llama", "trees": 2}], dp=2))


def test_two_processes_share_experts_and_their_checkpoint_is_whole(tmp_path: Path) -> None:
    saving = {"job": "checkpoint", "name": "qwen3_moe", "folder": str(tmp_path / "saved")}
    gradient, saved = run_cases(tmp_path, [{"name": "qwen3_moe"}, saving], ep=2)
    assert gradient["worst"] < 1e-10
    assert (saved["alone"], saved["again"], saved["moments"], saved["version"]) == (0, 0, 0, 1)


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="cp is 0"):
        Layout(cp=0)


def test_the_process_that_failed_is_named() -> None:
    script = "import os, sys, time; r = int(os.environ['RANK']); time.sleep(0.3 if r else 0); sys.exit([75, 3][r])"
    with pytest.raises(RankError, match="process 1 of 2 ended with exit status 3"):
        launch([sys.executable, "-c", script], 2, grace=5)
    script = "import os, signal, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)"
    with pytest.raises(RankError, match="process 1 of 3 was killed by SIGKILL"):
        launch([sys.executable, "-c", script], 3, grace=0.2)


def test_the_watch_names_who_died_and_who_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BEAT", 0.02)
    monkeypatch.setattr(watch, "DEAD_AFTER", 1.0)

    class Told(watch.Watch):
        verdict = ""

        def _end(self, verdict: str) -> None:
            self.verdict = verdict
            self._left.set()

    def pair(timeout: float) -> list[Told]:
        store = HashStore()
        both = [Told(store, number, 2, timeout) for number in range(2)]
        for one in both:
            one.phase = "replay"
            one.start()
        return both

    first, second = pair(timeout=600)
    second._left.set()  # it ends without a word
    first.join(30)
    assert "process 1 (last seen in phase 'replay') of 2 gave no sign of life" in first.verdict
    first, second = pair(timeout=1.0)
    first.entered, first.waiting = 7, True  # in an exchange that the other one does not come to
    first.join(30)
    second.join(30)
    assert "process 1 (phase 'replay', 0 exchanges begun) of 2 hangs" in first.verdict
    assert second._hung and not first._hung
    first, second = pair(timeout=600)
    second.leave()
    first.join(1.5)
    assert first.verdict == ""  # who leaves in good order is not missed
    first.leave()


def run_loop(file: Path, processes: int, trial: str | None = None) -> None:
    """`longstraw run FILE` in some processes, with a trial of `tests.parallel_run` or without."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | ({} if trial is None else {"LONGSTRAW_TRIAL": trial})
    launch([sys.executable, "-m", "tests.parallel_run", "run", str(file)], processes, environment=environment)


def test_a_killed_process_is_named_and_torchrun_goes_on_with_another_number(config: RunConfig, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "run.toml"
    file.write_text(toml.dump(config))
    with pytest.raises(RankError, match="process 1 of 2 was killed by SIGKILL"):
        run_loop(file, 2, "1 reverse 2 kill")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    subprocess.run([*torchrun, "-m", "tests.parallel_run", "run", str(file)], env=environment, check=True)
    with Store.open(str(config.run.folder / "store.sqlite")) as store:
        (run,) = store.runs()
        steps = store.steps(run.run_id)
        assert [(step.step, step.last_version) for step in steps] == [(1, 1), (2, 2)]
        assert sorted(group.step or 0 for group in store.groups(run.run_id, purpose="train")) == [1, 1, 2, 2]
        told = [entry for step in steps for entry in step.receipt["ranks"]]
        assert [entry["rank"] for entry in steps[-1].receipt["ranks"]] == [0, 1, 2]
        for entry in told:
            assert entry["state_bytes"]["state"] > 0 and entry["peak_mib"] > 0 and sum(entry["sent_bytes"].values()) > 0
            assert 0 <= entry["idle_seconds"] <= entry["exchange_seconds"]


def test_verify_compares_two_processes_with_one(model_folder: str, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "verification.json"
    size = ["--length", "64", "--branch", "16", "--group", "2"]
    command = ["longstraw_agents.cli", "verify", "--model", model_folder, "--cp", "2", *size, "--json", str(path)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    subprocess.run([sys.executable, "-m", *command], env=environment, check=True)
    found = json.loads(path.read_text())["checks"]["E3"]
    assert found["holds"] and 0 < found["value"] < found["bound"]
