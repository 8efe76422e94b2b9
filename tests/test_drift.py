"""Twenty steps of real gradients on 2,048 tokens of SmolLM2: what the frontier keeps, and what approximation leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from longstraw_agents.trainer.models import SMOLLM2, cache_folder

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.smollm2
@pytest.mark.skipif(not (cache_folder() / SMOLLM2 / "config.json").exists(), reason="needs the real SmolLM2-135M weights")
def test_after_twenty_steps_the_frontier_is_exact_and_refreshing_beats_leaving_states_stale() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "recapture.py"), "drift", "--steps", "20", "--every", "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    row, last = (line for line in done.stdout.splitlines() if line.startswith(("{", "values of frontier")))
    found = json.loads(row[: row.rindex("}") + 1])
    assert last == "values of frontier states that differ from full ones: 0"
    assert found["step"] == 20 and 0 < found["random"]["kl"] < found["stale"]["kl"]
    assert found["random"]["cosine"] > found["stale"]["cosine"]
