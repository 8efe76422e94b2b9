"""Whole updates against a plain loop: full-sequence passes, torch's own AdamW, and every term of the loss."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch

from longstraw_agents.trainer import conventional
from longstraw_agents.trainer.advantages import prepare
from longstraw_agents.trainer.lifting import lifted
from longstraw_agents.trainer.loss import LossConfig, make_batch, policy_loss
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.replay import ReplayConfig
from longstraw_agents.trainer.update import Trainer, TrainerConfig
from longstraw_agents.types import Group
from tests import models, traces

TEMPERATURE = 0.7
OPTIMIZER = OptimizerConfig(3e-3, weight_decay=0.1, clip=0.5)
EVERYTHING = LossConfig("dapo", kl_weight=0.3, entropy_weight=0.05)
WITHOUT_SCORES = LossConfig("gspo", mismatch_cap=None, entropy_weight=0.05)  # its first step needs none


def scored(model: torch.nn.Module, groups: list[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [N] and entropies [N] of the sampled tokens, at the sampling temperature."""
    logp, entropy = [], []
    for trajectory in (t for group in groups for t in group.trajectories):
        ids = torch.as_tensor(trajectory.tokens, dtype=torch.int64)
        at = torch.as_tensor(conventional.loss_positions(trajectory))
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, at - 1]
        distribution = (logits / TEMPERATURE).log_softmax(-1)
        logp.append(distribution.gather(-1, ids[at][:, None])[:, 0])
        entropy.append(-(distribution.exp() * distribution).sum(-1))
    return torch.cat(logp), torch.cat(entropy)


def plain_loop(
    model: torch.nn.Module, reference: torch.nn.Module | None, updates: list[list[Group]], loss: LossConfig, steps: int
) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
    parts = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([part for part in parts if part["params"]], lr=3e-3, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for groups in updates:
        kept, old = prepare(groups).kept, None
        with torch.no_grad(), nullcontext() if reference is not None else model.disable_adapter():
            fixed = scored(reference or model, groups)[0] if loss.kl_weight else None
        for _ in range(steps):
            optimizer.zero_grad()
            logp, entropy = scored(model, groups)
            old = logp.detach() if old is None else old
            value, _ = policy_loss(logp, make_batch(kept, old, fixed), loss, entropy)
            value.backward()
            norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm().item()
            for p in trained:
                p.grad.mul_(min(1.0, 0.5 / norm))
            optimizer.step()
            losses.append(value.item())
    return losses


@pytest.mark.parametrize(
    ("name", "training", "loss", "steps"),
    [
        ("gemma3", "full", EVERYTHING, 2),
        ("qwen3_5", "lora", EVERYTHING, 2),
        ("gemma3", "lora", WITHOUT_SCORES, 1),
        ("llama", "lora", WITHOUT_SCORES, 2),
    ],
)
def test_updates_on_several_groups_make_the_plain_loop_s_steps(name: str, training: str, loss: LossConfig, steps: int) -> None:
    """Two groups an update, one or two steps on them, KL, entropy, mismatch weights, temperature, decay, clipping, tied
    embeddings."""
    groups = traces.groups(4)
    updates = [groups[:2], groups[2:]]
    model = models.build(name, training=training, dtype=torch.float64)
    twin, reference = copy.deepcopy(model), copy.deepcopy(model) if training == "full" else None
    config = TrainerConfig(ReplayConfig(chunk=33, temperature=TEMPERATURE), loss, optimizer=OPTIMIZER, steps=steps)
    with lifted():
        wanted = plain_loop(twin, reference, updates, loss, steps)
        trainer = Trainer(model, config, reference=reference)
        receipts = [trainer.update(part) for part in updates]
    found = [step.loss for receipt in receipts for step in receipt.steps]
    assert found == pytest.approx(wanted, abs=1e-10) and len(set(found)) == 2 * steps
    assert all(receipt.steps[0].gradient_norm > 0.5 for receipt in receipts)  # clipping did something
    assert all((receipt.inputs["score"] > 0) == (loss is EVERYTHING or steps > 1) for receipt in receipts)
    for (label, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert float((ours - theirs).detach().abs().max()) < 1e-8, label
