"""What people read of receipts and reports: the line of an update, and a run's summary.

Idea: the numbers are the receipt's; here they are only chosen and laid out, so that the terminal, the viewer and a JSON file
agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longstraw_agents.terminal import sparkline


def update_row(step: int, receipt: Mapping[str, Any]) -> dict[str, Any]:
    """The line of one update, for the table and the report."""
    last = receipt["steps"][-1] if receipt["steps"] else {"gradient_norm": None, "metrics": {}}
    phases = receipt["phases"]
    return {
        "update": step,
        "reward": round(receipt["collected"]["reward"], 4),
        "success": round(receipt["collected"]["success"], 4),
        "tokens": receipt["collected"]["tokens"],
        "trained": receipt["tokens"].get("loss", 0),
        "norm": last["gradient_norm"],
        "kl": last["metrics"].get("kl_old"),
        "clipped": last["metrics"].get("clip_fraction"),
        "skipped": len(receipt["skipped"]),
        "train s": round(sum(phase["seconds"] for phase in phases.values()), 2),
        "MiB": round(max((phase["peak_mib"] for phase in phases.values()), default=0.0)),
    }


def metrics_of(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """What a dashboard plots of an update: what was collected, the loss's metrics, tokens, time and memory by phase."""
    last = receipt["steps"][-1] if receipt["steps"] else {}
    return {
        "collect": receipt["collected"],
        "train": {name: last.get(name) for name in ("loss", "gradient_norm", "learning_rate")} | last.get("metrics", {}),
        "tokens": receipt["tokens"],
        "phases": receipt["phases"],
    }


def summary(report: Mapping[str, Any]) -> str:
    """A run's report (`Loop.report`) as lines: reward curve, tokens, time and memory by phase, and where everything lies."""
    rewards = [row["reward"] for row in report["updates"]]
    lines = []
    if rewards:
        lines.append(f"reward     {sparkline(rewards)}  {rewards[0]:.3f} to {rewards[-1]:.3f}")
    lines.append(f"tokens     {sum(row['tokens'] for row in report['updates']):,} collected for training")
    counted = ", ".join(f"{count:,} {name}" for name, count in report["sampler"].items())
    lines.append(f"sampler    {counted} (tokens; steps are forwards)")
    lines.append("phase           seconds   peak MiB")
    lines += [f"{name:<12} {phase['seconds']:>10.1f} {phase['peak_mib']:>10,.0f}" for name, phase in report["phases"].items()]
    lines.append(f"store      {report['store']}")
    lines.append(f"adapter    {report['adapter']}  (loads in plain PEFT)")
    lines.append(f"receipts   {report['receipts']}, and in the store")
    return "\n".join(lines)
