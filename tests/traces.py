"""The same training twice: by our trainer, and by a plain loop of full-sequence passes and torch's own AdamW."""

from __future__ import annotations

import numpy as np
import torch

from longstraw_agents.trainer import conventional
from longstraw_agents.trainer.advantages import prepare
from longstraw_agents.trainer.loss import LossConfig, make_batch, policy_loss
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.replay import ReplayConfig
from longstraw_agents.trainer.update import Trainer, TrainerConfig
from longstraw_agents.types import Group, Task, Trajectory
from tests import models, trees

RATE, CLIP = 3e-3, 1.0


def groups(count: int) -> list[Group]:
    """Groups of four on trees two nodes deep, with random rewards and behaviour log-probabilities near a uniform policy's."""
    draw = np.random.default_rng(0)
    made = []
    for index in range(count):
        shared = draw.integers(0, models.VOCABULARY, 70)
        members: list[Trajectory] = []
        for member in range(4):
            tokens = np.r_[shared, draw.integers(0, models.VOCABULARY, 9 + 5 * member)]
            made_one = trees.trajectory(f"{index}/{member}", tokens, np.r_[30, np.arange(70, len(tokens))], float(draw.normal()))
            noise = draw.normal(-4.0, 0.3, len(tokens)).astype(np.float32)
            made_one.behaviour[made_one.action_mask] = noise[made_one.action_mask]
            members.append(made_one)
        made.append(Group(f"g{index}", Task("longstraw/Lookup-v0", index), tuple(members)))
    return made


def ours(name: str, data: list[Group], loss: LossConfig) -> list[float]:
    """Losses of one update per group by the trainer."""
    model = models.build(name, training="lora", dtype=torch.float64)
    config = TrainerConfig(ReplayConfig(chunk=33), loss, optimizer=OptimizerConfig(RATE, clip=CLIP))
    trainer = Trainer(model, config)
    return [trainer.update([group]).steps[0].loss for group in data]


def theirs(name: str, data: list[Group], loss: LossConfig) -> list[float]:
    """Losses of one step per group by a plain loop."""
    model = models.build(name, training="lora", dtype=torch.float64)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    losses = []
    for group in data:
        kept = prepare([group]).kept
        optimizer.zero_grad()
        value, _ = conventional.backward(
            model, group.trajectories, lambda logp_N, kept=kept: policy_loss(logp_N, make_batch(kept, logp_N.detach()), loss)[0]
        )
        norm = torch.stack([parameter.grad.norm() for parameter in trained if parameter.grad is not None]).norm()
        for parameter in trained:  # torch's own clipping adds 1e-6 to the norm
            if parameter.grad is not None:
                parameter.grad.mul_(min(1.0, CLIP / norm.item()))
        optimizer.step()
        losses.append(value.item())
    return losses
