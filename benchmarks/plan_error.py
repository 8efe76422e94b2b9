"""The planner's forecast of peak memory against peaks measured on a GPU: `long_context.py --stages peaks` writes them.

Every measured update is forecast from its shape alone, with the versions of torch and transformers that are installed here, which
should be those of the measurement (a model's code decides what it holds). The figure is the worst error over the shapes that the
planner was never fitted to; the others are printed beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.long_shapes import SHAPES, with_adapters
from longstraw_agents import figures
from longstraw_agents.trainer.plan import PlanConfig, forecast
from longstraw_agents.trainer.receipt import versions


def without_data(name: str, scale: str) -> nn.Module:
    """A shape of the benchmark on the meta device, in bfloat16, with its adapters."""
    shape, before = SHAPES[name], torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = getattr(transformers, shape.kind)(shape.make(scale))
    finally:
        torch.set_default_dtype(before)
    with torch.device("meta"):
        return with_adapters(model)


def compare(run: dict[str, Any]) -> dict[str, Any]:
    """One measured update beside its forecast, GiB."""
    config = PlanConfig(
        run["prompt"] + run["response"], 2**40, run["group"], run["response"], run["gradient"], pack=run["pack"], logit_piece=1024
    )
    found = forecast(without_data(run["shape"], run["scale"]), config, run["chunk"], run["outputs"])
    peak = found.peak / 2**30
    about = {key: run[key] for key in ("shape", "gradient", "prompt", "response", "group", "chunk", "fitted", "peak_gib")}
    return about | {"forecast_gib": round(peak, 4), "error_percent": round(100 * (peak / run["peak_gib"] - 1), 3)}


def main() -> None:
    """Compare all runs of a result file; with --record, write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a result file with the stage `peaks`")
    parser.add_argument("--out", type=Path, help="where the comparison goes, as JSON")
    parser.add_argument("--record", action="store_true", help="write the figure into docs/figures.json")
    options = parser.parse_args()
    measured = json.loads(options.results.read_text())
    rows = []
    for run in measured["peaks"]["runs"]:
        rows.append(compare(run))
        print(json.dumps(rows[-1]), flush=True)
    unseen = [row for row in rows if not row["fitted"]]
    worst = max(abs(row["error_percent"]) for row in unseen)
    extra = {"device": measured["device"], "rows": rows, "versions": versions(), "measured_with": measured["peaks"]["versions"]}
    if options.out:
        options.out.write_text(json.dumps(extra | {"worst_percent": worst}, indent=1) + "\n")
    print(f"worst error over {len({row['shape'] for row in unseen})} shapes not fitted to: {worst:.2f} %")
    if options.record:
        figures.record("gpu.plan_error_percent", worst, "%", trials=len(unseen), extra=extra, measured=measured["provenance"])


if __name__ == "__main__":
    main()
