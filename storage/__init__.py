"""The SQL store: the source of truth for tasks, trajectories, rewards, steps and receipts."""

from longstraw_agents.redaction import hide, redact
from longstraw_agents.storage.database import StoreConfig
from longstraw_agents.storage.outline import Outline
from longstraw_agents.storage.records import EvaluationRow, GroupRow, RunRow, StepRow, StoreStats, TrajectoryRow
from longstraw_agents.storage.store import Store

__all__ = [
    "EvaluationRow",
    "GroupRow",
    "Outline",
    "RunRow",
    "StepRow",
    "Store",
    "StoreConfig",
    "StoreStats",
    "TrajectoryRow",
    "hide",
    "redact",
]
