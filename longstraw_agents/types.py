"""The words that every part shares. A leaf module: it imports nothing of ours but `errors`, and neither torch nor transformers.

Vocabulary
    task         one problem instance: environment id, seed, split, options
    trajectory   all tokens of one episode, in order; append-only
    turn         one observation (tokens the environment wrote) and one action (tokens the policy sampled)
    action mask  per token: True where the policy sampled it; only those carry loss, and token 0 never does
    behaviour    log-probability of a sampled token under the policy that sampled it, recorded then
    group        trajectories of one task whose rewards are compared

Shapes: T tokens of a trajectory, O tokens of an observation, A tokens of an action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from longstraw_agents.errors import TokenError

TokenArray = npt.NDArray[np.int32]
MaskArray = npt.NDArray[np.bool_]
LogpArray = npt.NDArray[np.float32]


class StopReason(StrEnum):
    """Why an episode ended. The only list of reasons; the store keeps the value."""

    ANSWERED = "answered"  # the environment terminated: an answer was given, or its goal reached
    TURN_LIMIT = "turn_limit"  # the environment's turns are used up
    TOKEN_LIMIT = "token_limit"  # the trajectory's token budget is used up
    ACTION_CUT = "action_cut"  # an action reached its own token limit before it ended
    ENVIRONMENT_ERROR = "environment_error"  # the environment raised, or broke its contract
    POLICY_ERROR = "policy_error"  # the policy could not sample
    CANCELLED = "cancelled"  # stopped by the user


#: Stop reasons after which a trajectory has no valid reward: it is left out of baseline and loss.
FAILED: frozenset[StopReason] = frozenset(
    {StopReason.ENVIRONMENT_ERROR, StopReason.POLICY_ERROR, StopReason.CANCELLED}
)


@dataclass(frozen=True)
class Message:
    """One message of an environment to the policy. `role` is "system", "user" or "tool"."""

    role: str
    content: str


@dataclass(frozen=True)
class Task:
    """One problem instance. The same (env_id, seed, split, options) always means the same problem."""

    env_id: str
    seed: int
    split: str = "train"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolCall:
    """One tool call as parsed from an action: what was asked, and what came back (or the error)."""

    name: str
    arguments: Mapping[str, Any]
    result: str | None = None
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Turn:
    """One observation and the action sampled after it.

    observation [O] and action [A] are token ids, behaviour [A] natural-log probabilities of the action's tokens under the
    distribution that was sampled. `observation_source` holds the UTF-8 bytes (surrogates passed) of the rendered observation
    only where decoding the ids does not give them back. `notes` say how the turn was made where that was not the plain case:
    `temperature` and `top_p` of that distribution (absent: 1), `history` = "kept" or "rewritten" (see `rendering`).
    """

    observation: TokenArray
    action: TokenArray
    behaviour: LogpArray
    policy_version: int
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    tool_calls: Sequence[ToolCall] = ()
    observation_source: bytes | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.action) != len(self.behaviour):
            raise TokenError(
                f"a turn has {len(self.action)} action tokens but {len(self.behaviour)} behaviour log-probabilities; "
                "record one for each sampled token"
            )


@dataclass(frozen=True)
class Trajectory:
    """All tokens of one episode with what training needs of them.

    tokens [T] int32; action_mask [T] bool, False at 0; behaviour [T] float32, NaN where action_mask is False;
    policy_version [T] int32, -1 where action_mask is False; turn_ends: one past each turn's last token, ascending, the last
    equal to T; turn_rewards and turn_notes: one per turn (no notes: all turns are plain). reward is None where none is valid
    (the episode failed): such a trajectory is left out of baseline and loss.
    """

    trajectory_id: str
    tokens: TokenArray
    action_mask: MaskArray
    behaviour: LogpArray
    policy_version: TokenArray
    turn_ends: tuple[int, ...]
    turn_rewards: tuple[float, ...]
    reward: float | None
    stop_reason: StopReason
    weight: float = 1.0  # its share of the episode, where one episode became several trajectories
    turn_notes: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ("action_mask", "behaviour", "policy_version"):
            if len(getattr(self, name)) != length:
                raise TokenError(
                    f"trajectory {self.trajectory_id}: {name} has {len(getattr(self, name))} entries for {length} tokens"
                )
        if length and self.action_mask[0]:
            raise TokenError(
                f"trajectory {self.trajectory_id}: token 0 is marked as sampled, but nothing precedes it; "
                "begin with at least one observation token"
            )


@dataclass(frozen=True)
class Group:
    """Trajectories of one task whose rewards are compared."""

    group_id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
