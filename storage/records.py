"""What the store tells about itself: one frozen record per kind of row. Ids are strings: r1, g1, t1, e1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longstraw_agents.types import StopReason, Task


@dataclass(frozen=True)
class RunRow:
    """A run; `created` in seconds since 1970 (UTC), as everywhere here."""

    run_id: str
    name: str
    config: Any
    created: float


@dataclass(frozen=True)
class GroupRow:
    """A group. complete: all `size` members have finished. step: the step it was used for, None while unused."""

    group_id: str
    run_id: str
    task: Task
    size: int
    purpose: str
    policy_version: int
    complete: bool
    step: int | None
    created: float


@dataclass(frozen=True)
class TrajectoryRow:
    """A trajectory without its tokens; open while `stop_reason` is None. `turns` and `length` count what is committed."""

    trajectory_id: str
    group_id: str
    member: int
    part: int
    parent: str | None
    weight: float
    turns: int
    length: int
    stop_reason: StopReason | None
    reward: float | None
    reward_parts: Mapping[str, float]
    success: bool | None
    created: float
    finished: float | None


@dataclass(frozen=True)
class StepRow:
    """A committed step. files: name to digest of each file that it wrote; group_ids in the order of use."""

    run_id: str
    step: int
    first_version: int
    last_version: int
    group_ids: tuple[str, ...]
    files: Mapping[str, str]
    receipt: Mapping[str, Any]
    created: float


@dataclass(frozen=True)
class EvaluationRow:
    """One evaluation of one policy version."""

    evaluation_id: str
    run_id: str
    name: str
    policy_version: int
    metrics: Mapping[str, Any]
    created: float


@dataclass(frozen=True)
class StoreStats:
    """Counts, and bytes. blob_bytes: compressed; size_bytes: what the database takes on disk."""

    runs: int
    groups: int
    trajectories: int
    turns: int
    tokens: int
    steps: int
    evaluations: int
    blobs: int
    blob_bytes: int
    size_bytes: int
