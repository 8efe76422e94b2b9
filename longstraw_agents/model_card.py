"""The card of a trained model: what it was trained on, how, and what was measured, out of the run's own receipts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from longstraw_agents.scores import Score
from longstraw_agents.storage import EvaluationRow, StepRow


def model_card(name: str, config: Mapping[str, Any], steps: Sequence[StepRow], evaluations: Sequence[EvaluationRow]) -> str:
    """The card as Markdown, with the header that model hubs read. `config` is the run's, as the store keeps it."""
    head = {"library_name": "transformers", "base_model": config["model"]["name"], "tags": ["reinforcement-learning", "agent"]}
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", "", f"# {name}", ""]
    tasks = config["tasks"]
    lines.append(
        f"`{config['model']['name']}` trained on the environment `{tasks['env']}` with LongStraw Agents: "
        f"{len(steps)} updates of {tasks['groups']} tasks x {tasks['samples']} trajectories."
    )
    lines += ["", "## Evaluation on held-out tasks", ""]
    lines.append("| when | version | mode | success | 95 % interval | mean return | episodes |")
    lines.append("|---|---|---|---|---|---|---|")
    for row in evaluations:
        for mode, values in row.metrics.items():
            score = Score.from_dict(values["score"])
            low, high = score.success_interval
            numbers = (f"{score.success:.1%}", f"{low:.1%} to {high:.1%}", f"{score.mean_return:.3f}", score.episodes)
            cells = (row.name, row.policy_version, mode, *numbers)
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    lines += ["", "## Training", "", *_training(config, steps)]
    lines += ["", "## Settings", "", "```json", json.dumps(config, indent=1, sort_keys=True), "```", ""]
    return "\n".join(lines)


def _training(config: Mapping[str, Any], steps: Sequence[StepRow]) -> list[str]:
    """What the receipts say: gradient, data, versions, evidence."""
    if not steps:
        return ["No update was made."]
    first, last = steps[0].receipt, steps[-1].receipt
    optimizer_steps = sum(len(step.receipt["steps"]) for step in steps)
    return [
        f"- gradient: {last['gradient']}",
        f"- optimizer steps: {optimizer_steps}; policy versions {steps[0].first_version} to {steps[-1].last_version}",
        f"- trajectories: {sum(step.receipt['collected']['episodes'] for step in steps):,}, with "
        f"{sum(step.receipt['collected']['tokens'] for step in steps):,} tokens",
        f"- mean reward of an update: {first['collected']['reward']:.3f} at first, {last['collected']['reward']:.3f} at last",
        f"- trained parameters: {last['setting'].get('trained_parameters', 0):,}",
        f"- seed: {config['run']['seed']}",
        f"- versions: {json.dumps(last['setting'].get('versions', {}))}",
        f"- evidence of the last update: {json.dumps(last['evidence'])}",
    ]
