"""Several processes against one, on CPU (gloo), in lifted float64: the full matrix behind the figures `parallel.*`.

    python benchmarks/parallel_exactness.py [--parts cp2,cp4,dp2,ep2,mixed,steps,bytes,traffic] [--record]

    cp2, cp4   every architecture of the zoo, all weights and (cp2) LoRA, exact and detached, lengths that the processes do not
               divide, a process that owns nothing (runs of fewer tokens than processes), trees of depth 3
    dp2, ep2   trees shared out; experts shared out (the architectures that have them)
    mixed      dp = 2 with cp = 2, and cp = 2 with ep = 2
    steps      50 optimizer steps in two processes; weights compared bit by bit after each
    bytes      state bytes per process at cp = 4 against a quarter of one process's
    traffic    bytes sent per replayed token behind prefixes of three lengths
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from longstraw_agents import figures  # noqa: E402
from longstraw_agents.launch import launch  # noqa: E402
from longstraw_agents.trainer.ranks import Layout  # noqa: E402
from tests import models as zoo  # noqa: E402

EXPERTS = [name for name in zoo.NAMES if "moe" in name or name.startswith(("deepseek", "qwen3_next"))]


def run_worker(jobs: list[dict[str, Any]], **layout: int) -> list[dict[str, Any]]:
    """Run jobs of `tests.parallel_worker` in one set of processes; their results in order."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results"
        command = [sys.executable, "-m", "tests.parallel_worker", str(output), json.dumps(jobs), json.dumps(layout)]
        launch(command, Layout(**layout).size, environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
        return [json.loads(line) for line in output.read_text().splitlines()]


def cases(names: list[str], **settings: Any) -> list[dict[str, Any]]:
    """For each architecture: all weights with packed branches, LoRA with single ones; exact, and detached for the first."""
    found: list[dict[str, Any]] = []
    for name in names:
        found.append({"name": name, "chunk": 50, "pack": 200, "score": True, **settings})
        found.append({"name": name, "training": "lora", "chunk": 33, "pack": 1, **settings})
    return found


def gradients(jobs: list[dict[str, Any]], **layout: int) -> dict[str, Any]:
    """Worst parameter over all jobs, and over each architecture."""
    worst: dict[str, float] = {}
    logp = 0.0
    for found in run_worker(jobs, **layout):
        worst[found["name"]] = max(worst.get(found["name"], 0.0), found["worst"])
        logp = max(logp, found["logp"])
    return {"worst": max(worst.values()), "by_architecture": worst, "logp": logp, "cases": len(jobs), "layout": layout}


def part_context(processes: int) -> dict[str, Any]:
    jobs = [job for job in cases(list(zoo.NAMES)) if processes == 2 or "training" not in job]
    jobs += [{"name": name, "gradient": "detached", "chunk": 64, "pack": 200} for name in ("llama", "qwen3_5")]
    jobs += [{"name": "qwen3_5", "chunk": 50, "pack": 1}] if processes == 4 else []
    return gradients(jobs, cp=processes)


def part_mixed() -> dict[str, Any]:
    first = gradients([{"name": "qwen3_5", "trees": 3}, {"name": "llama", "trees": 3, "training": "lora"}], dp=2, cp=2)
    second = gradients([{"name": "qwen3_moe"}, {"name": "glm_moe_dsa"}], cp=2, ep=2)
    return {"worst": max(first["worst"], second["worst"]), "dp2_cp2": first, "cp2_ep2": second}


def part_steps() -> dict[str, Any]:
    (found,) = run_worker([{"job": "steps", "name": "llama", "steps": 50}], cp=2)
    return found


def part_bytes() -> dict[str, Any]:
    """A long chain of several runs, where whole positions are what is counted."""
    jobs = [{"job": "bytes", "name": name, "length": 1024, "chunk": 128} for name in ("llama", "glm_moe_dsa", "qwen3_5")]
    ratios = {}
    for found in run_worker(jobs, cp=4):
        ratios[found["name"]] = max(found["shared"]) / (found["alone"] / 4)
    return {"ratio": max(ratios.values()), "by_architecture": ratios}


def part_traffic() -> dict[str, Any]:
    jobs = [{"job": "traffic", "name": name, "lengths": [512, 2048, 8192]} for name in ("llama", "qwen3_5")]
    return {found["name"]: found["bytes_per_token"] for found in run_worker(jobs, cp=2)}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "cp2": lambda: part_context(2),
    "cp4": lambda: part_context(4),
    "dp2": lambda: gradients(cases(["llama", "qwen3_5"], trees=3), dp=2),
    "ep2": lambda: gradients([{"name": name} for name in EXPERTS], ep=2),
    "mixed": part_mixed,
    "steps": part_steps,
    "bytes": part_bytes,
    "traffic": part_traffic,
}


def record(part: str, found: dict[str, Any]) -> None:
    """Write a part's figure."""
    command = f"python benchmarks/parallel_exactness.py --parts {part} --record"
    write = lambda figure, value: figures.record(figure, value, command=command, extra=found)
    match part:
        case "cp2" | "cp4" | "dp2" | "ep2":
            write(f"parallel.float64_lifted.{part}", found["worst"])
        case "steps":
            write("parallel.rank_digest_mismatches", found["mismatches"])
        case "bytes":
            write("parallel.state_bytes_ratio_cp4", found["ratio"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    for part in options.parts.split(","):
        found = PARTS[part]()
        print(part, json.dumps(found), flush=True)
        if options.record:
            record(part, found)


if __name__ == "__main__":
    main()
