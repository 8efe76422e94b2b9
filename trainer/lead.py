"""One process leads, the others follow: the run's loop is in process 0, and every process takes part in its updates.

Idea: collecting, storing, evaluating and committing are one process's business. What needs all of them is the trainer: an
update, a checkpoint's weights where experts are shared out, a restore. The leader says what comes next through the store that
the processes met through (so that followers can wait for hours), and hands over the prepared groups by a broadcast. Followers do
the same calls on the same data: weights stay the same bits everywhere, and each process compares them after each step.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longstraw_agents.errors import ConfigError, LongStrawError, RankError
from longstraw_agents.trainer.advantages import Prepared
from longstraw_agents.trainer.loss import LossConfig
from longstraw_agents.trainer.ranks import Ranks
from longstraw_agents.trainer.receipt import Receipt
from longstraw_agents.trainer.update import Trainer
from longstraw_agents.types import Group, StopReason, Task, Trajectory

_ARRAYS = ("tokens", "action_mask", "behaviour", "policy_version")


class LeadingTrainer(Trainer):
    """Process 0's trainer: what it is asked to do, the followers do too. Everything else is as in `Trainer`."""

    def run(self, prepared: Prepared) -> Receipt:
        """As `Trainer.run`; the followers are sent the prepared groups first."""
        if self.ranks.world == 1:
            return super().run(prepared)
        if not isinstance(self.loss, LossConfig):
            raise ConfigError("a loss given as a function is not known to the other processes; choose one by name")
        data = pack(prepared)
        self.ranks.announce({"do": "update", "loss": asdict(self.loss), "bytes": len(data)})
        send(self.ranks, data)
        return super().run(prepared)

    def checkpoint(self) -> Callable[[Path], None]:
        """As `Trainer.checkpoint`, with the followers."""
        self.ranks.announce({"do": "checkpoint"})
        return super().checkpoint()

    def restore(self, directory: Path) -> None:
        """As `Trainer.restore`, with the followers."""
        self.ranks.announce({"do": "restore", "directory": str(directory.resolve())})
        super().restore(directory)

    def close(self) -> None:
        """Let the followers go."""
        self.ranks.announce({"do": "stop"})


def follow(trainer: Trainer) -> None:
    """Take part in what the leader does until it closes. What fails on every process is the leader's to report."""
    ranks = trainer.ranks
    while True:
        message = ranks.listen()
        try:
            match message["do"]:
                case "stop":
                    return
                case "checkpoint":
                    trainer.checkpoint()
                case "restore":
                    trainer.restore(Path(message["directory"]))
                case "update":
                    trainer.loss = LossConfig(**message["loss"])
                    trainer.run(unpack(receive(ranks, message["bytes"])))
        except RankError:
            raise
        except LongStrawError:  # it arises on every process alike; if the leader ends, so does the run
            continue


# -- groups as bytes ------------------------------------------------------------------------------------------------------


def pack(prepared: Prepared) -> bytes:
    """What is kept of the groups, with its advantages: arrays and JSON, no code."""
    arrays: dict[str, np.ndarray] = {}
    table: list[dict[str, Any]] = []
    for group, advantages in prepared.kept:
        members: list[list[Any]] = []
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            key = f"{len(table)}.{len(members)}"
            arrays |= {f"{key}.{name}": np.asarray(getattr(trajectory, name)) for name in _ARRAYS}
            arrays[f"{key}.advantage"] = np.asarray(advantage)
            members.append(
                [
                    trajectory.trajectory_id, list(trajectory.turn_ends), list(trajectory.turn_rewards), trajectory.reward,
                    trajectory.stop_reason.value, trajectory.weight,
                ]
            )  # fmt: skip
        table.append({"group_id": group.group_id, "task": asdict(group.task), "members": members})
    arrays["table"] = np.frombuffer(json.dumps(table).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(data: bytes) -> Prepared:
    """The inverse of `pack`."""
    prepared = Prepared([], [], [], [])
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for index, entry in enumerate(json.loads(arrays["table"].tobytes())):
            keys = [f"{index}.{member}" for member in range(len(entry["members"]))]
            members = [
                _trajectory(values, [arrays[f"{key}.{name}"] for name in _ARRAYS])
                for key, values in zip(keys, entry["members"], strict=True)
            ]
            group = Group(entry["group_id"], Task(**entry["task"]), tuple(members))
            prepared.kept.append((group, [arrays[f"{key}.advantage"] for key in keys]))
    return prepared


def _trajectory(values: Sequence[Any], arrays: Sequence[np.ndarray]) -> Trajectory:
    name, ends, rewards, reward, reason, weight = values
    tokens, mask, behaviour, version = arrays
    reason = StopReason(reason)
    return Trajectory(name, tokens, mask, behaviour, version, tuple(ends), tuple(rewards), reward, reason, weight)


def send(ranks: Ranks, data: bytes) -> None:
    """Process 0 gives bytes to all."""
    ranks.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(ranks.device))


def receive(ranks: Ranks, size: int) -> bytes:
    """The other processes' side of `send`."""
    return ranks.broadcast(torch.zeros(size, dtype=torch.uint8, device=ranks.device)).cpu().numpy().tobytes()
