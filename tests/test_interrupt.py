"""Ctrl-C on the command line: exit status 130, a line that says how to go on, and that command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import letters

from longstraw_agents import config as toml
from longstraw_agents.storage import Store

ROOT = Path(__file__).resolve().parents[1]


def test_an_interrupted_run_says_how_to_go_on_and_goes_on(tmp_path: Path) -> None:
    config = letters.letters_config(letters.make_model(tmp_path / "model"), tmp_path / "run")
    config = replace(config, tasks=replace(config.tasks, env="letters:tests/Letters-v0"))
    path = tmp_path / "run.toml"
    path.write_text(toml.dump(replace(config, run=replace(config.run, updates=10_000))))
    command = [sys.executable, "-m", "longstraw_agents.cli", "run", str(path), "--set", "run.updates=9999"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT / "tests", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a CI job in the background has it ignored
    )  # fmt: skip
    store_path, deadline = tmp_path / "run" / "store.sqlite", time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if store_path.exists() and (tmp_path / "run" / "steps" / "000002").exists():
            break
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert f"Go on with: longstraw run {path} --set run.updates=9999" in errors and "Traceback" not in errors
    with Store.open(str(store_path)) as store:
        latest = store.latest_step("r1")
        assert latest is not None
        done = latest.step
    again = subprocess.run(
        [*command, "--set", f"run.updates={done + 1}"], cwd=ROOT / "tests", env=environment, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    with Store.open(str(store_path)) as store:
        assert [step.step for step in store.steps("r1")] == list(range(1, done + 2))
