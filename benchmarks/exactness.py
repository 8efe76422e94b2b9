"""The matrix of exactness: every architecture x LoRA or full training x chunking x type, against conventional training.

    python benchmarks/exactness.py --record                       all of it (about an hour on one core)
    python benchmarks/exactness.py --record --only llama,qwen3    some architectures; --parts bfloat16,lifted some parts
    python benchmarks/exactness.py --page                         write docs/exactness.md from what was recorded

Models are tiny, of the real transformers classes with random weights (tests/models.py); trees are four nodes deep with loss on
inner nodes and unequal branches (tests/trees.py). The loss's coefficients are fixed functions of log-probabilities.

    lifted     float64 with all up-casts to float32 lifted on both sides: worst parameter
    untouched  float64, the model as it is. Without recurrent layers: worst parameter. With them: our worst parameter's error
               over that of the model's own differentiable split at the same borders, median of five seeds
    float32    relative error of the whole gradient
    bfloat16   our error over conventional training's own error, both against float32: median of seven seeds, with weights that
               do not amplify rounding, and with float32's routing and selection imposed on both ways (trainer/decisions.py)
    detached   relative error and cosine of the gradient without the reverse pass (lifted float64, LoRA)
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from longstraw_agents import figures  # noqa: E402
from longstraw_agents.segmenter import segment  # noqa: E402
from longstraw_agents.trainer import comparison, verification  # noqa: E402
from longstraw_agents.trainer.decisions import Decisions  # noqa: E402
from longstraw_agents.trainer.lifting import lifted  # noqa: E402
from longstraw_agents.trainer.receipt import versions  # noqa: E402
from longstraw_agents.trainer.replay import ReplayConfig  # noqa: E402
from longstraw_agents.types import Trajectory  # noqa: E402
from tests import models, splits, trees  # noqa: E402

RESULTS = ROOT / "docs" / "exactness.json"
PAGE = ROOT / "docs" / "exactness.md"
PARTS = ("bfloat16", "untouched", "lifted", "float32", "detached")
TRAININGS = ("full", "lora")
#: Inputs of a run: one, fewer than the window, two numbers that divide nothing, a delta chunk, all.
CHUNKS = {"one": 1, "short": 20, "odd": 33, "sixty-four": 64, "whole": 10**6}
SEEDS = {"untouched": range(5), "bfloat16": range(7)}
FAILED = 1e9  # what a combination that raised counts as


def loss(logp_N: torch.Tensor) -> torch.Tensor:
    """Any smooth function of the log-probabilities that couples all tokens."""
    weights_N = torch.linspace(-1.0, 2.0, len(logp_N), dtype=logp_N.dtype)
    return (weights_N * logp_N).mean() + logp_N.mean().square()


def against(model: Any, data: list[Trajectory], replay: ReplayConfig) -> comparison.Difference:
    """Our gradient against conventional training's."""
    reference = verification.theirs(model, data, loss)
    return comparison.compare(verification.ours(model, data, loss, replay).gradient, reference.gradient)


def run_lifted(name: str, training: str, chunking: str) -> float:
    """The worst parameter's relative difference, everything in float64."""
    model = models.build(name, training=training, dtype=torch.float64)
    with lifted():
        return against(model, trees.unequal_tree(), ReplayConfig(chunk=CHUNKS[chunking])).worst


def run_untouched(name: str, training: str) -> float:
    """The worst parameter of the model as it is; of recurrent ones over their own split's, the median over seeds."""
    if name not in models.RECURRENT:
        model = models.build(name, training=training, dtype=torch.float64)
        return against(as_loaded(model), trees.unequal_tree(), ReplayConfig(chunk=CHUNKS["odd"])).worst
    ratios = []
    for seed in SEEDS["untouched"]:
        model = as_loaded(models.build(name, training=training, dtype=torch.float64, seed=seed))
        data = trees.unequal_tree(seed)
        reference = verification.theirs(model, data, loss).gradient
        ours = verification.ours(model, data, loss, ReplayConfig(chunk=CHUNKS["odd"])).gradient
        own = splits.gradient(model, data, segment(data), CHUNKS["odd"], loss)
        ratios.append(comparison.compare(ours, reference).worst / comparison.compare(own, reference).worst)
    return statistics.median(ratios)


def as_loaded(model: Any) -> Any:
    """The attention that a loaded model has by default, which keeps float64, where its class supports it."""
    config = verification.unwrap(model).config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) is None:
        config._attn_implementation = "sdpa"
    return model


def run_float32(name: str, training: str) -> float:
    """The global relative difference in float32."""
    model = models.build(name, training=training)
    return against(model, trees.unequal_tree(), ReplayConfig(chunk=CHUNKS["odd"])).global_relative


def run_bfloat16(name: str, training: str) -> float:
    """Our distance from float32 over conventional bfloat16's, the median over seeds."""
    ratios = []
    for seed in SEEDS["bfloat16"]:
        model = models.build(name, training=training, dtype=torch.bfloat16, seed=seed, smooth=True)
        wide, data, decisions = copy.deepcopy(model).float(), trees.unequal_tree(seed), Decisions()
        with decisions.recorded(wide):
            reference = verification.theirs(wide, data, loss).gradient
        own = verification.theirs(model, data, loss, decisions)
        ours = verification.ours(model, data, loss, ReplayConfig(chunk=CHUNKS["odd"]), decisions=decisions)
        mine, conventional = (comparison.compare(way.gradient, reference).global_relative for way in (ours, own))
        ratios.append(mine / conventional)
        said = f"decided otherwise than float32: ours {ours.otherwise}, conventional {own.otherwise}"
        print(f"    seed {seed}: {mine:.4f} / {conventional:.4f}; {said if own.otherwise else 'no decisions'}", flush=True)
    return statistics.median(ratios)


def run_detached(name: str) -> tuple[float, float]:
    """Relative error and cosine of the detached gradient."""
    model, data = models.build(name, training="lora", dtype=torch.float64), trees.unequal_tree()
    with lifted():
        difference = against(model, data, ReplayConfig("detached", chunk=CHUNKS["odd"]))
    return difference.global_relative, difference.cosine


def run_all(name: str, parts: Sequence[str], done: Callable[[str, dict[str, float]], None]) -> None:
    """The cells of one architecture, "part/training/chunking" -> value; `done` is given each part's name and cells."""

    def cell(key: str, run: Callable[..., float], *arguments: str) -> float:
        started = time.perf_counter()
        try:
            value = run(*arguments)
        except Exception as error:  # one that raises is a cell that fails; the rest of the matrix still runs
            print(f"{name} {key} raised {type(error).__name__}: {error}")
            value = FAILED
        print(f"{name:<13} {key:<24} {value:.3g}   {time.perf_counter() - started:.1f} s", flush=True)
        return value

    runs = {"lifted": run_lifted, "float32": run_float32, "untouched": run_untouched, "bfloat16": run_bfloat16}
    for part in parts:
        if part == "detached":
            error, cosine = run_detached(name)
            done(part, {"detached/error": error, "detached/cosine": cosine})
        else:
            done(part, {key: cell(key, runs[part], name, *key.split("/")[1:]) for key in expected_cells(part)})


def record(name: str, part: str, cells: dict[str, float]) -> None:
    """Write the figure of one part of one architecture, its cells and what they were run on, and the page."""
    untouched = "float64_untouched_over_own_split" if name in models.RECURRENT else "float64_untouched"
    named = {"lifted": "float64_lifted", "untouched": untouched, "float32": "float32_global"}
    named |= {"bfloat16": "bfloat16_over_conventional"}
    if part == "detached":
        values = {"detached_relative_error": cells["detached/error"], "detached_cosine": cells["detached/cosine"]}
    else:
        values = {named[part]: max(cells.values())}
    for figure, value in values.items():
        unit = "ratio" if "over" in figure else "cosine" if "cosine" in figure else "relative error"
        command = f"python benchmarks/exactness.py --record --only {name} --parts {part}"
        entry = figures.record(f"exact.{figure}.{name}", value, unit, command=command)
    with figures.locked(RESULTS):
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        about = {"versions": versions(), "commit": entry["commit"], "date": entry["date"][:10]}
        known.setdefault(name, {})[part] = {"cells": cells} | about
        RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(page())


def expected_cells(part: str | None = None) -> list[str]:
    """The keys that an architecture must have, of one part or all; one that is missing counts as failing."""
    if part is None:
        return [key for each in ("lifted", "untouched", "float32", "bfloat16") for key in expected_cells(each)]
    if part == "lifted":
        return [f"lifted/{training}/{chunking}" for training in TRAININGS for chunking in CHUNKS]
    return [f"{part}/{training}" for training in TRAININGS]


def page() -> str:
    """docs/exactness.md."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    lines = [
        "# What was verified",
        "",
        "Written by `python benchmarks/exactness.py --page` from `docs/exactness.json`; never by hand. Each row is one",
        "architecture at a small size: the real transformers class with random weights, on a tree four nodes deep with loss on",
        "inner nodes and branches of unequal length. A combination that never ran counts as failing.",
        "",
        "Errors are relative, against conventional full-sequence training: of the worst parameter in float64, of the whole",
        "gradient in float32. In bfloat16 and for untouched recurrent models the number is our error over the model's own:",
        "conventional bfloat16's, with float32's routing and selection imposed on both ways, and that of the model's own",
        "differentiable split at the same borders.",
        "",
        "| architecture | float64, up-casts lifted (<= 1e-10) | float64, untouched | float32 (<= 1e-4) "
        "| bfloat16 / own (<= 1.25) | combinations that hold | versions | commit, date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    bounds = {"lifted": 1e-10, "float32": 1e-4, "bfloat16": 1.25}
    for name in models.NAMES:
        entry = known.get(name)
        if entry is None:
            lines.append(f"| {name} | never run | never run | never run | never run | 0 of {len(expected_cells())} | | |")
            continue
        cells, recurrent = _cells(entry), name in models.RECURRENT
        worst = {part: max(cells.get(key, FAILED) for key in expected_cells(part)) for part in (*bounds, "untouched")}
        limit = bounds | {"untouched": 1.25 if recurrent else 1e-6}
        held = sum(cells.get(key, FAILED) <= limit[key.split("/")[0]] for key in expected_cells())
        show = lambda part, style, of=worst: "never run, or failed" if of[part] == FAILED else format(of[part], style)
        untouched = show("untouched", ".2f") + " of own split" if recurrent else show("untouched", ".1e")
        said = lambda *keys, of=entry: "; ".join(sorted({" ".join(_flat(run, key) for key in keys) for run in of.values()}))
        lines.append(
            f"| {name} | {show('lifted', '.1e')} | {untouched} | {show('float32', '.1e')} | {show('bfloat16', '.2f')} "
            f"| {held} of {len(expected_cells())} | {said('torch', 'transformers', 'peft')} | {said('commit', 'date')} |"
        )
    lines += ["", "## Without the reverse pass", "", "`gradient=\"detached\"` against the true gradient (LoRA, float64):", ""]
    lines += ["| architecture | relative error | cosine |", "|---|---|---|"]
    for name in models.NAMES:
        cells = _cells(known.get(name, {}))
        if "detached/error" in cells:
            lines.append(f"| {name} | {cells['detached/error']:.2f} | {cells['detached/cosine']:.3f} |")
    return "\n".join(lines) + "\n"


def _cells(entry: dict[str, Any]) -> dict[str, float]:
    return {key: value for run in entry.values() for key, value in run["cells"].items()}


def _flat(run: dict[str, Any], key: str) -> str:
    """A package with its version, or what is known of the run itself."""
    return f"{key} {run['versions'][key]}" if key in run["versions"] else str(run[key])


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(models.NAMES), help="architectures, with commas between")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts of the matrix, with commas between")
    parser.add_argument("--record", action="store_true", help="write docs/figures.json, docs/exactness.json and the page")
    parser.add_argument("--page", action="store_true", help="only write docs/exactness.md")
    arguments = parser.parse_args()
    for name in [] if arguments.page else arguments.only.split(","):
        done = lambda part, cells, name=name: record(name, part, cells) if arguments.record else None
        run_all(name, arguments.parts.split(","), done)
    if arguments.page:
        PAGE.write_text(page())


if __name__ == "__main__":
    main()
