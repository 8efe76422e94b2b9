"""The exact gradient in a plain PyTorch loop: your optimizer, your loss, our trees.

Four sampled answers to one prompt share the prompt's state; the loss is REINFORCE with a baseline. Runs on a CPU in a minute:

    python examples/plain_pytorch.py
"""

from __future__ import annotations

import numpy as np
import torch

from longstraw_agents.trainer.gradients import accumulate
from longstraw_agents.trainer.models import ModelConfig, load_model
from longstraw_agents.types import StopReason, Trajectory

model, tokenizer = load_model(ModelConfig(name="smollm2-135m-instruct"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
prompt = tokenizer("List three colours of the rainbow, separated by commas:")["input_ids"]


def sample(count: int, length: int = 12) -> list[list[int]]:
    """Sampled continuations of the prompt."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        rows = model.generate(ids, do_sample=True, max_new_tokens=length, num_return_sequences=count, top_k=0, pad_token_id=0)
    return [row[len(prompt) :].tolist() for row in rows]


def trajectory(name: str, answer: list[int], reward: float) -> Trajectory:
    """Prompt and answer as a trajectory; only the answer carries loss."""
    tokens = np.array(prompt + answer, np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Trajectory(
        trajectory_id=name, tokens=tokens, action_mask=mask, behaviour=np.where(mask, 0.0, np.nan).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32), turn_ends=(len(tokens),), turn_rewards=(reward,), reward=reward,
        stop_reason=StopReason.ANSWERED,
    )  # fmt: skip


torch.manual_seed(0)
for step in range(3):
    answers = sample(4)
    rewards = [float(tokenizer.decode(answer).count(",")) for answer in answers]  # more commas, more reward
    group = [trajectory(f"{step}.{index}", *pair) for index, pair in enumerate(zip(answers, rewards, strict=True))]
    advantage = torch.tensor(rewards) - np.mean(rewards)
    weights = torch.cat([torch.full((len(answer),), float(a)) for answer, a in zip(answers, advantage, strict=True)])
    _, value = accumulate(model, group, lambda logp, weights=weights: -(weights * logp).mean())
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: rewards {rewards}, loss {value:+.4f}")
