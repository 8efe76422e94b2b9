"""What practitioners watch while an agent trains, and when a run stops by itself.

Idea: everything watched is computed from what is there anyway (the receipt's metrics, the groups trained on, the evaluations in
the store), so watching costs no pass of the model. A guard that is not set only reports.

Vocabulary
    entropy      of the sampler, estimated by -mean(behaviour log-probability) over sampled tokens, in nats per token
    mismatch     KL of the sampler's distribution from the trainer's (`mismatch_kl`): the same weights, computed twice
    degenerate   answers that no reward should be needed to rule out; shares of what was sampled:
                 empty (an action with nothing before its stop token), looping (an action of 16 tokens or more, fewer than half of
                 whose 4-grams differ), echoed (an action equal to the one before it), truncated (trajectories that a length
                 limit cut), duplicate (trajectories equal to an earlier sibling)
    breach       a watched number beyond its guard: the run stops after the step that showed it
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longstraw_agents.errors import ConfigError
from longstraw_agents.types import Group, StopReason, TokenArray, Trajectory

LOOP_TOKENS = 16
GRAM = 4


@dataclass(frozen=True)
class Guards:
    """Limits beyond which a run stops; None: reported only.

    max_kl: to the reference where there is one, else from the old weights within an update. max_mismatch: see above.
    min_entropy: nats per token. max_degenerate: the largest of the shares. patience: evaluations without a better held-out
    success after which a run stops (0: never; needs run.evaluate_every).
    """

    max_kl: float | None = None
    max_mismatch: float | None = None
    min_entropy: float | None = None
    max_degenerate: float | None = None
    patience: int = 0

    def __post_init__(self) -> None:
        for name in ("max_kl", "max_mismatch", "min_entropy", "max_degenerate"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"guard {name} must be a finite number of at least 0, got {value!r}")
        if self.patience < 0:
            raise ConfigError(f"guard patience must be at least 0, got {self.patience}")


def require_sampled_as_trained(groups: Sequence[Group], temperature: float) -> None:
    """Raises ConfigError where a turn's notes say that it was sampled from another distribution than the one that is trained."""
    for trajectory in (t for group in groups for t in group.trajectories):
        for turn, notes in enumerate(trajectory.turn_notes):
            sampled, top_p = notes.get("temperature", 1.0), notes.get("top_p", 1.0)
            if (sampled, top_p) != (temperature, 1.0):
                raise ConfigError(
                    f"turn {turn} of trajectory {trajectory.trajectory_id} was sampled with temperature {sampled} and top_p "
                    f"{top_p}, and is to be trained with {temperature} and 1: its log-probabilities are of another distribution; "
                    "set trainer.replay.temperature to it, or collect again"
                )


def behaviour_report(groups: Sequence[Group]) -> dict[str, Any]:
    """Entropy and degenerate shares of what was sampled; zeros where nothing was."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    actions = [action for trajectory in trajectories for action in _with_previous(trajectory)]
    behaviour = np.concatenate([np.zeros(0), *(t.behaviour[t.action_mask] for t in trajectories)])
    cut = (StopReason.TOKEN_LIMIT, StopReason.ACTION_CUT)
    duplicates = sum(len(g.trajectories) - len({t.tokens.tobytes() for t in g.trajectories}) for g in groups)
    return {
        "entropy": float(-behaviour.mean()) if len(behaviour) else 0.0,
        "degenerate": {
            "empty": _share(len(action) <= 1 for action, _ in actions),
            "looping": _share(loops(action) for action, _ in actions),
            "echoed": _share(before is not None and np.array_equal(action, before) for action, before in actions),
            "truncated": _share(trajectory.stop_reason in cut for trajectory in trajectories),
            "duplicate": duplicates / max(len(trajectories), 1),
        },
    }


def loops(action: TokenArray) -> bool:
    """Whether fewer than half of a long action's 4-grams differ from each other."""
    if len(action) < LOOP_TOKENS:
        return False
    grams = np.lib.stride_tricks.sliding_window_view(action, GRAM)
    return len(np.unique(grams, axis=0)) * 2 < len(grams)


def breaches(receipt: Mapping[str, Any], guards: Guards) -> list[str]:
    """What in an update's receipt is beyond its guard, in words; empty if nothing is, or if no step was made."""
    if not receipt["steps"]:
        return []
    metrics, collected = receipt["steps"][-1]["metrics"], receipt["collected"]
    found = []
    kl = "kl_reference" if "kl_reference" in metrics else "kl_old"
    if guards.max_kl is not None and metrics.get(kl, 0.0) > guards.max_kl:
        found.append(f"{kl} is {metrics[kl]:.4g}, above max_kl {guards.max_kl:g}")
    if guards.max_mismatch is not None and metrics.get("mismatch_kl", 0.0) > guards.max_mismatch:
        found.append(f"mismatch_kl is {metrics['mismatch_kl']:.4g}, above max_mismatch {guards.max_mismatch:g}")
    if guards.min_entropy is not None and collected["entropy"] < guards.min_entropy:
        found.append(f"the sampler's entropy is {collected['entropy']:.4g} nats, below min_entropy {guards.min_entropy:g}")
    if guards.max_degenerate is not None:
        kind, share = max(collected["degenerate"].items(), key=lambda item: item[1])
        if share > guards.max_degenerate:
            found.append(f"{share:.0%} is {kind}, above max_degenerate {guards.max_degenerate:.0%}")
    return found


def best(successes: Sequence[float]) -> int:
    """The index of the highest success; of equal ones the earliest, which moved least. At least one is needed."""
    return int(np.argmax(successes))


def out_of_patience(successes: Sequence[float], guards: Guards) -> bool:
    """Whether the last `patience` evaluations brought nothing better than what was before them."""
    return guards.patience > 0 and len(successes) - 1 - best(successes) >= guards.patience


def _with_previous(trajectory: Trajectory) -> list[tuple[TokenArray, TokenArray | None]]:
    """Each turn's action, and the one before it."""
    found: list[tuple[TokenArray, TokenArray | None]] = []
    start = 0
    for stop in trajectory.turn_ends:
        action = trajectory.tokens[start:stop][trajectory.action_mask[start:stop]]
        found.append((action, found[-1][0] if found else None))
        start = stop
    return found


def _share(flags: Any) -> float:
    """The share of true ones, 0 of none."""
    listed = [bool(flag) for flag in flags]
    return sum(listed) / max(len(listed), 1)
