"""What `learning.py all` found, as tables, plots and figures.

Idea: arms of a seed are compared at the last update after which all of them were evaluated, paired by held-out task; what is
reported over seeds is the mean of their differences with Student's interval. The long experiment has one seed: its intervals are
over tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longstraw_agents import figures
from longstraw_agents.errors import ConfigError
from longstraw_agents.scores import Interval
from longstraw_agents.statistics import compare, mean_interval

PAGE = Path(__file__).resolve().parents[1] / "docs" / "learning.md"
MARKS = ("<!-- measured: begin -->", "<!-- measured: end -->")


class Experiment(NamedTuple):
    """kinds: the arms that are compared (earlier, later), and what else is shown beside them; of: what is compared."""

    figure: str
    kinds: tuple[str, ...]
    of: str
    heading: str


#: Where two have one figure, the later one with evidence gives it.
EXPERIMENTS = (
    Experiment(
        "learn.exact_minus_detached_points", ("detached", "exact", "conventional"), "success",
        "Exact, detached and conventional gradients, reading 2,500 tokens",
    ),
    Experiment(
        "learn.exact_minus_detached_points", ("detached2", "exact2", "conventional2"), "success",
        "Exact, detached and conventional gradients, asked for what stands before",
    ),
    Experiment("learn.tree_minus_flat_points", ("flat", "tree"), "returns", "Trees with node credit and flat groups, five turns"),
    Experiment("learn.trl_difference_points", ("trl", "ours"), "success", "Ours and TRL's GRPOTrainer, one tool call"),
)  # fmt: skip
LONG_KINDS = ("long", "truncated")
LONG = {"learn.long_gain_points": "after minus before", "learn.long_gain_over_truncated_points": "full length minus ends only"}


def valid_lengths(row: dict[str, Any]) -> list[int]:
    """The lengths of an evaluation's trajectories, without tasks whose every episode failed: their answer is None."""
    return [length for length, answer in zip(row["lengths"], row["answers"], strict=True) if answer is not None]


def _resident(row: dict[str, Any]) -> list[float]:
    """Peak resident memory of an update's phases so far, MiB."""
    return [phase["peak_mib"] for phase in row.get("phases", {}).values()]


class Report:
    """Reads files of `all`; where two have an arm, the later file's is taken. Arms without a usable evaluation are left out and
    named."""

    def __init__(self, *files: dict[str, Any]) -> None:
        results = {name: result for values in files for name, result in values["arms"].items()}
        self.heads = {name: (values["measured"], values["command"]) for values in files for name in values["arms"]}
        self.arms = {name: result["progress"] for name, result in results.items() if result["progress"]}
        self.failed = sorted(name for name, result in results.items() if result["code"] or not result["progress"])

    def tables(self) -> str:
        """All experiments as Markdown."""
        parts = [self._experiment(experiment) for experiment in EXPERIMENTS] + [self._long()]
        if self.failed:
            parts.append(f"Arms that failed: {', '.join(self.failed)}.")
        return "\n\n".join(part for part in parts if part)

    def record(self) -> None:
        """Write the figures that there is evidence for, and tables and plots into docs/learning.md."""
        for figure, kinds, of, heading in EXPERIMENTS:
            found = self._differences(kinds, of)
            if len(found) < 2:
                continue
            mean, interval = mean_interval(list(found.values()))
            at = {seed: self._common(kinds, seed) for seed in found}
            sampled = {kind: {seed: self._evaluations(kind, seed)[at[seed]]["sampled"] for seed in at} for kind in kinds[:2]}
            extra = {
                "interval": interval, "compared": of, "experiment": heading, "at_update": at, "tokens_sampled": sampled,
                "over_all_updates": mean_interval(list(self._over_all(kinds, of).values())), "arms": self._costs(kinds),
            }  # fmt: skip
            self._record(figure, kinds, mean, list(found.values()), extra)
        for figure, (difference, interval, trials) in self._gains().items():
            self._record(figure, LONG_KINDS, difference, trials, {"interval": interval, "arms": self._costs(LONG_KINDS)})
        text = PAGE.read_text(encoding="utf-8")
        begin, end = (text.index(mark) for mark in MARKS)
        body = "\n\n".join([MARKS[0], self.tables(), *self._plots(), ""])
        PAGE.write_text(text[:begin] + body + text[end:], encoding="utf-8")

    def _record(
        self, figure: str, kinds: Sequence[str], value: float, trials: Sequence[float], extra: dict[str, Any]
    ) -> None:
        measured, command = next(head for name, head in self.heads.items() if name.rpartition("-")[0] in kinds)
        figures.record(
            figure, round(value, 2), unit="points", trials=[round(trial, 2) for trial in trials], extra=extra,
            command=command, measured=measured,
        )  # fmt: skip

    # -- experiments over seeds -----------------------------------------------------------------------------------------

    def _seeds(self, kinds: Sequence[str]) -> list[int]:
        """Seeds for which each of the first two kinds was evaluated after training."""
        seeds = sorted({int(name.rpartition("-")[2]) for name in self.arms})
        return [seed for seed in seeds if all(len(self._evaluations(kind, seed)) > 1 for kind in kinds[:2])]

    def _evaluations(self, kind: str, seed: int) -> dict[int, dict[str, Any]]:
        """An arm's evaluations by update."""
        arm = self.arms.get(f"{kind}-{seed}", {"evaluations": []})
        return {row["update"]: row for row in arm["evaluations"]}

    def _common(self, kinds: Sequence[str], seed: int) -> int:
        """The last update after which the first two kinds were evaluated."""
        return max(self._shared(kinds, seed))

    def _shared(self, kinds: Sequence[str], seed: int) -> set[int]:
        """Updates after which the first two kinds were evaluated."""
        first, second = (set(self._evaluations(kind, seed)) for kind in kinds[:2])
        return first & second

    def _over_all(self, kinds: Sequence[str], of: str) -> dict[int, float]:
        """As `_differences`, but the mean over all updates with an evaluation instead of the last: how fast the arms learned."""
        found = {}
        for seed in self._differences(kinds, of):
            at = sorted(self._shared(kinds, seed) - {0})
            first, second = (np.mean([np.mean(self._evaluations(kind, seed)[each][of]) for each in at]) for kind in kinds[:2])
            found[seed] = 100 * float(second - first)
        return found

    def _differences(self, kinds: Sequence[str], of: str) -> dict[int, float]:
        """Points by seed that the second kind is above the first, at their last common update."""
        found = {}
        for seed in self._seeds(kinds):
            at = self._common(kinds, seed)
            rows = [self._evaluations(kind, seed)[at] for kind in kinds[:2]]
            if at > 0:
                found[seed] = 100 * compare(rows[0][of], rows[1][of]).difference
        return found

    def _experiment(self, experiment: Experiment) -> str:
        _, kinds, of, heading = experiment
        seeds = self._seeds(kinds)
        if not seeds:
            return ""
        updates = sorted({at for kind in kinds for seed in seeds for at in self._evaluations(kind, seed)})
        lines = [f"### {heading}", "", f"Held-out {of}, mean over seeds {', '.join(map(str, seeds))}, by update:", ""]
        lines += ["| | " + " | ".join(map(str, updates)) + " |", "|---|" + "---|" * len(updates)]
        for kind in kinds:
            lines.append(f"| {kind} | " + " | ".join(self._mean(kind, seeds, at, of) for at in updates) + " |")
        costs = self._costs(kinds)
        memory = "gpu_peak_mib" if any(cost["gpu_peak_mib"] for cost in costs.values()) else "peak_mib"
        label = "peak GPU MiB" if memory == "gpu_peak_mib" else "peak resident MiB"
        lines += ["", f"| | seconds an update | tokens sampled | {label} |", "|---|---|---|---|"]
        for kind, cost in costs.items():
            sampled = f"{cost['sampled']:,}" if cost["sampled"] else "not counted"
            lines.append(f"| {kind} | {cost['seconds']:.2f} | {sampled} | {cost[memory]:,.0f} |")
        differences = [(self._differences(kinds, of), "at the end")]
        if any(len(self._shared(kinds, seed)) > 2 for seed in seeds):  # more than before and after
            differences.append((self._over_all(kinds, of), "mean over all updates"))
        for found, when in differences:
            if len(found) > 1:
                mean, (low, high) = mean_interval(list(found.values()))
                each = ", ".join(f"{value:+.1f}" for value in found.values())
                points = f"{mean:+.1f} points [{low:+.1f}, {high:+.1f}] over seeds ({each})"
                lines += ["", f"{kinds[1]} minus {kinds[0]}, {when}: {points}."]
        return "\n".join(lines)

    def _mean(self, kind: str, seeds: Sequence[int], at: int, of: str) -> str:
        """Over the seeds that were evaluated then; their number where not all were."""
        found = [float(np.mean(self._evaluations(kind, seed)[at][of])) for seed in seeds if at in self._evaluations(kind, seed)]
        if not found:
            return ""
        return f"{np.mean(found):.2f}" + (f" ({len(found)})" if len(found) < len(seeds) else "")

    def _costs(self, kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
        """By kind, over its seeds: seconds of an update, tokens sampled for training, peak memory of both sorts, updates."""
        found = {}
        for kind in kinds:
            arms = [arm for name, arm in self.arms.items() if name.rpartition("-")[0] == kind and arm["updates"]]
            if arms:
                rows = [row for arm in arms for row in arm["updates"]]
                found[kind] = {
                    "seconds": float(np.mean([arm["updates"][-1]["seconds"] / len(arm["updates"]) for arm in arms])),
                    "sampled": int(np.mean([arm["updates"][-1].get("sampled", 0) for arm in arms])),
                    "gpu_peak_mib": max(row.get("gpu_peak_mib", 0.0) for row in [*rows, *arms]),
                    "peak_mib": max(max([arm.get("peak_mib", 0.0), *_resident(arm["updates"][-1])]) for arm in arms),
                    "updates": [len(arm["updates"]) for arm in arms],
                }  # fmt: skip
        return found

    # -- the long experiment --------------------------------------------------------------------------------------------

    def _gains(self) -> dict[str, tuple[float, Interval, list[float]]]:
        """Points, interval over tasks and the tasks' own differences of the two long figures, as far as there is evidence."""
        rows = {
            kind: {row["name"]: row for row in self.arms[f"{kind}-0"]["evaluations"]}
            for kind in LONG_KINDS
            if f"{kind}-0" in self.arms
        }
        compared = (
            (rows.get("long", {}).get("before"), rows.get("long", {}).get("after")),
            (rows.get("truncated", {}).get("after"), rows.get("long", {}).get("after")),
        )
        found = {}
        for figure, (earlier, later) in zip(LONG, compared, strict=True):
            if earlier is None or later is None:
                continue
            shortest = min((length for row in (earlier, later) for length in valid_lengths(row)), default=0)
            if shortest <= 100_000 and self.arms["long-0"]["scale"] == "full":
                raise ConfigError(f"{figure} is of more than 100,000 tokens; the shortest here has {shortest}")
            pairs = [pair for pair in zip(earlier["answers"], later["answers"], strict=True) if None not in pair]
            if len(pairs) < 2:  # None: every episode of the task failed
                continue
            result = compare(*zip(*pairs, strict=True))
            interval = (100 * result.interval[0], 100 * result.interval[1])
            found[figure] = (100 * result.difference, interval, [100 * (after - before) for before, after in pairs])
        return found

    def _long(self) -> str:
        lines = ["### Trajectories of more than 100,000 tokens", ""]
        lines += ["| | evaluation | right answers | tokens |", "|---|---|---|---|"]
        for kind in LONG_KINDS:
            for row in self.arms.get(f"{kind}-0", {"evaluations": []})["evaluations"]:
                answers, lengths = [answer for answer in row["answers"] if answer is not None], valid_lengths(row)
                if answers:
                    share = f"{np.mean(answers):.2f}" + (f" ({len(answers)} tasks)" if len(answers) < len(row["answers"]) else "")
                    lines.append(f"| {kind} | {row['name']} | {share} | {min(lengths):,} to {max(lengths):,} |")
        shown = [row["loss"] for row in self.arms.get("long-0", {"updates": []})["updates"] if row.get("stage") == "shown"]
        if shown:
            losses = ", ".join(f"{loss:.3f}" for loss in shown)
            lines += ["", f"Loss of the shown answers to texts of full length, each new and before it was trained on: {losses}."]
        for kind in LONG_KINDS:
            for stage, why in self.arms.get(f"{kind}-0", {}).get("failed", {}).items():
                lines += ["", f"{kind}: {stage} failed: {why.splitlines()[0]}"]
        for figure, (difference, (low, high), _) in self._gains().items():
            lines += ["", f"{LONG[figure]}: {difference:+.1f} points [{low:+.1f}, {high:+.1f}] over tasks."]
        return "\n".join(lines) if len(lines) > 4 else ""

    # -- plots ----------------------------------------------------------------------------------------------------------

    def _plots(self) -> list[str]:
        """One image per experiment beside the page, held-out score by update and seed; the lines that show them."""
        from matplotlib.figure import Figure

        shown = []
        for _, kinds, of, heading in EXPERIMENTS:
            if not self._seeds(kinds):
                continue
            image = Figure(figsize=(6, 3.2), layout="constrained")
            axes = image.subplots()
            for color, kind in enumerate(kinds):
                for seed in self._seeds(kinds):
                    rows = sorted(self._evaluations(kind, seed).items())
                    line = [float(np.mean(row[of])) for _, row in rows]
                    axes.plot([at for at, _ in rows], line, f"C{color}.-", alpha=0.7, label=kind if seed == 0 else None)
            axes.set(xlabel="update", ylabel=f"held-out {of}")
            axes.legend()
            path = PAGE.parent / "results" / f"learning_{kinds[1]}.svg"
            image.savefig(path)
            shown.append(f"![{heading}](results/{path.name})")
        return shown
