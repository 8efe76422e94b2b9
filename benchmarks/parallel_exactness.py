"""Several processes against one, on CPU (gloo), in lifted float64: the full matrix behind the figures `parallel.*`.

    python benchmarks/parallel_exactness.py [--parts cp2,cp4,dp2,ep2,mixed,selections,steps,bytes,traffic] [--record]

    cp2, cp4     every architecture of the zoo: exact and detached, all weights and (cp2) LoRA, trees of depth 3, lengths that the
                 processes do not divide, processes that own nothing of a run (of fewer tokens than processes), kept outputs
    dp2, ep2     trees shared out, every architecture; experts shared out, those that have them
    mixed        dp = 2 with cp = 2; cp = 2 with ep = 2; all three at once, in eight processes
    selections   the picks of sparse index attention, cp = 2 and 4 against one process, with one index head (ties) and with 16
    steps        50 optimizer steps in two processes; weights compared bit by bit after each
    bytes        state bytes per process at cp = 4 against a quarter of one process's
    traffic      bytes sent per replayed token behind prefixes of three lengths
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


def gradients(jobs: list[dict[str, Any]], **layout: int) -> dict[str, Any]:
    """Worst parameter over all jobs, and over each architecture; `empty` counts spans of runs without a token."""
    worst: dict[str, float] = {}
    logp, empty = 0.0, dict[str, int]()
    for found in run_worker(jobs, **layout):
        name = found["name"]
        worst[name] = max(worst.get(name, 0.0), found["worst"])
        empty[name] = empty.get(name, 0) + found["empty"]
        logp = max(logp, found["logp"])
    whole = {"worst": max(worst.values()), "by_architecture": worst, "empty": empty, "logp": logp}
    return whole | {"cases": len(jobs), "layout": layout}


def part_context(processes: int) -> dict[str, Any]:
    """Single branches in chunks that leave a run of one token; with two processes also all weights with packed branches."""
    single = {"training": "lora"} if processes == 2 else {"outputs": True}
    jobs: list[dict[str, Any]] = [{"name": name, "chunk": 33, "pack": 1, **single} for name in zoo.NAMES]
    packed = zoo.NAMES if processes == 2 else ("llama", "qwen3_5", "glm_moe_dsa")
    jobs += [{"name": name, "chunk": 50, "pack": 200, "score": True} for name in packed]
    jobs += [{"name": name, "gradient": "detached", "chunk": 64, "pack": 200} for name in ("llama", "qwen3_5")]
    return gradients(jobs, cp=processes)


def part_mixed() -> dict[str, Any]:
    """Two dimensions at a time, and all three."""
    found = [
        gradients([{"name": "qwen3_5", "trees": 3}, {"name": "llama", "trees": 3, "training": "lora"}], dp=2, cp=2),
        gradients([{"name": "qwen3_moe"}, {"name": "glm_moe_dsa", "chunk": 33, "pack": 1}], cp=2, ep=2),
        gradients([{"name": "qwen3_5_moe", "trees": 2}], dp=2, cp=2, ep=2),
    ]
    return {"worst": max(entry["worst"] for entry in found), "layouts": found}


def part_selections() -> dict[str, Any]:
    """Queries whose picks differ, over all cases."""
    jobs = [
        {"job": "selections", "name": name, "heads": heads} for name in ("glm_moe_dsa", "deepseek_v32") for heads in (1, 16)
    ]  # fmt: skip
    found = [case | {"cp": cp} for cp in (2, 4) for case in run_worker(jobs, cp=cp)]
    kept = [{key: case[key] for key in ("name", "heads", "cp", "queries", "differing", "ties")} for case in found]
    return {"differing": sum(case["differing"] for case in kept), "cases": kept}


def part_steps() -> dict[str, Any]:
    """Steps, and how often the weights of the processes differed."""
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
    """Bytes that process 0 sends per input of the leaves' replay, and their ratio between prefixes."""
    jobs = [{"job": "traffic", "name": name, "lengths": [512, 2048, 8192]} for name in ("llama", "qwen3_5")]
    per_token = {found["name"]: found["bytes_per_token"] for found in run_worker(jobs, cp=2)}
    spread = max(max(values.values()) / min(values.values()) for values in per_token.values())
    return {"longest_over_shortest": spread, "bytes_per_token": per_token}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "cp2": lambda: part_context(2),
    "cp4": lambda: part_context(4),
    "dp2": lambda: gradients([{"name": name, "trees": 3} for name in zoo.NAMES], dp=2),
    "ep2": lambda: gradients([{"name": name} for name in EXPERTS], ep=2),
    "mixed": part_mixed,
    "selections": part_selections,
    "steps": part_steps,
    "bytes": part_bytes,
    "traffic": part_traffic,
}


def record(part: str, found: dict[str, Any]) -> None:
    """Write a part's figure."""
    command = f"python benchmarks/parallel_exactness.py --parts {part} --record"
    write = lambda figure, value: figures.record(figure, value, command=command, extra=found)
    match part:
        case "cp2" | "cp4" | "dp2" | "ep2" | "mixed":
            write(f"parallel.float64_lifted.{part}", found["worst"])
        case "selections":
            write("parallel.selections_differing", found["differing"])
        case "traffic":
            write("parallel.traffic_longest_over_shortest", found["longest_over_shortest"])
        case "steps":
            write("parallel.rank_digest_mismatches", found["mismatches"])
        case "bytes":
            write("parallel.state_bytes_ratio_cp4", found["ratio"])


def main() -> None:
    """See the module's head."""
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
