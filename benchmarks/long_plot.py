"""What the stage `curves` of `long_context.py` found, as plots and a table.

Vocabulary
    run      one update as `long_curves.py` reports it: prompt, group, side, gradient, attention, seconds, peak_gib, by_kind, ...
    series   runs of one way of training: ours by gradient, conventional by its attention
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Run = Mapping[str, Any]
MEASURES = {"seconds": "seconds of an update", "peak_gib": "peak memory, GiB"}
#: Names that do not change from run to run, text as text, and no date: a plot of the same numbers is the same file.
SETTINGS = {"svg.hashsalt": "longstraw", "svg.fonttype": "none"}


def draw(curves: Mapping[str, Any], folder: Path) -> str:
    """Draw the runs into `folder` and return the table of all of them as Markdown.

    long_context_by_length.svg: seconds and peak memory by prompt tokens, for the size of group that most runs have.
    long_context_by_group.svg: the same by G, for the prompt that has most sizes; left out where none has two.
    """
    runs: Sequence[Run] = curves["runs"]
    size = _most_common(run["group"] for run in runs)
    by_length = [run for run in runs if run["group"] == size]
    _plot(by_length, "prompt", f"tokens of the prompt (G = {size})", folder / "long_context_by_length.svg")
    sizes = {run["prompt"]: len({other["group"] for other in runs if other["prompt"] == run["prompt"]}) for run in runs}
    prompt = max(sizes, key=lambda prompt: (sizes[prompt], prompt))
    if sizes[prompt] > 1:
        by_group = [run for run in runs if run["prompt"] == prompt]
        _plot(by_group, "group", f"trajectories, G ({prompt:,} tokens of prompt)", folder / "long_context_by_group.svg")
    return table(runs)


def table(runs: Sequence[Run]) -> str:
    """All runs as a Markdown table, by prompt, size of group and series."""
    heads = ("prompt", "G", "", "seconds", "of which", "peak GiB", "tokens/s", "of the kernel's rate")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for run in sorted(runs, key=lambda run: (run["prompt"], run["group"], _series(run))):
        phases = ", ".join(f"{kind} {_number(seconds)}" for kind, seconds in run["by_kind"].items())
        share = run.get("fraction_of_kernel_rate")
        cells = [
            f"{run['prompt']:,}", str(run["group"]), _series(run), _number(run["seconds"]), phases, f"{run['peak_gib']:.2f}",
            f"{run['tokens_per_second']:,.0f}", "" if share is None else f"{100 * share:.0f} %",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _series(run: Run) -> str:
    return f"{run['side']}, {run['gradient'] if run['side'] == 'ours' else run['attention']}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _most_common(values: Any) -> int:
    """The value that occurs most often, of several the largest."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))


def _plot(runs: Sequence[Run], axis: str, label: str, path: Path) -> None:
    """Two panels, one for each measure, over `axis`, all logarithmic; what is not above 0 is left out."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        image = Figure(figsize=(9, 3.6), layout="constrained")
        for axes, (measure, unit) in zip(image.subplots(1, 2), MEASURES.items(), strict=True):
            for name in sorted({_series(run) for run in runs}):
                points = sorted((run[axis], run[measure]) for run in runs if _series(run) == name and run[measure] > 0)
                style = "o-" if name.startswith("ours") else "s--"
                (line,) = axes.plot([x for x, _ in points], [y for _, y in points], style, markersize=4, label=name)
                line.set_gid(f"{measure}: {name}")
            axes.set(xlabel=label, ylabel=unit, yscale="log")
            axes.set_xscale("log", base=2)
            marks = sorted({run[axis] for run in runs})
            axes.set_xticks(marks, [_short(mark) for mark in marks])
            axes.set_xticks([], minor=True)
            axes.grid(alpha=0.3)
        image.legend(*image.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        image.savefig(path, metadata={"Date": None, "Creator": None})


def _short(count: int) -> str:
    return f"{count // 1024} Ki" if count >= 1024 and count % 1024 == 0 else str(count)
