"""The exact gradient beside a step of TRL's GRPO trainer (pip install trl).

    python examples/beside_trl.py

TRL samples, rewards, and owns optimizer and schedule; only the backward pass is ours: completions of one prompt share its state.
Each step is made both ways on the same batch, and the relative difference of the two gradients is printed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from longstraw_agents.trainer.gradients import accumulate
from longstraw_agents.trainer.models import ModelConfig, load_model
from longstraw_agents.types import StopReason, Trajectory


class SharedPrefixTrainer(GRPOTrainer):
    """GRPO (grpo loss, one iteration, no KL term) whose gradients come from prefix trees."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Keep the batch: asking for it again would sample anew."""
        self.batch = super()._prepare_inputs(inputs)
        return self.batch

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """As TRL's, which is run first, to compare; its gradients are then replaced by ours."""
        super().training_step(model, inputs, num_items_in_batch)
        parameters = [p for p in model.parameters() if p.requires_grad]
        theirs = [p.grad.clone() for p in parameters]
        model.zero_grad()
        value = self.exact_step(model, self.batch)
        difference = sum(float((p.grad - t).square().sum()) for p, t in zip(parameters, theirs, strict=True))
        norm = sum(float(t.square().sum()) for t in theirs)
        print(f"gradients differ by {(difference / max(norm, 1e-30)) ** 0.5:.1e} of their norm {norm**0.5:.3g}")
        return torch.tensor(value)

    def exact_step(self, model: Any, batch: dict[str, torch.Tensor]) -> float:
        """Leave the gradient of -mean over completions of A * mean(logp) in `.grad`; returns the loss's value."""
        trajectories, weights = [], []
        for index in range(len(batch["completion_ids"])):
            prompt = batch["prompt_ids"][index][batch["prompt_mask"][index].bool()]
            completion = batch["completion_ids"][index][batch["completion_mask"][index].bool()]
            tokens = torch.cat([prompt, completion]).cpu().numpy().astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            trajectories.append(
                Trajectory(
                    str(index), tokens, mask, np.where(mask, 0.0, np.nan).astype(np.float32),
                    np.where(mask, 0, -1).astype(np.int32), (len(tokens),), (0.0,), 0.0, StopReason.ANSWERED,
                )  # fmt: skip
            )
            share = batch["advantages"][index] / len(completion) / len(batch["completion_ids"])
            weights.append(share.float().expand(len(completion)))
        weights_N = torch.cat(weights)
        _, value = accumulate(model, trajectories, lambda logp_N: -(weights_N * logp_N).sum())
        return value


def main() -> None:
    """Two steps on one prompt; shorter completions are better."""
    model, tokenizer = load_model(ModelConfig(name="smollm2-135m-instruct"))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    settings = GRPOConfig(
        output_dir="runs/beside-trl", per_device_train_batch_size=4, num_generations=4, max_completion_length=24, max_steps=2,
        loss_type="grpo", beta=0.0, learning_rate=1e-4, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        save_strategy="no", disable_tqdm=True, max_grad_norm=0.0,
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": "The capital of Norway is a city called"}] * 8)
    rewards = lambda completions, **_: [-float(len(completion)) for completion in completions]
    trainer = SharedPrefixTrainer(
        model=model, args=settings, train_dataset=prompts, processing_class=tokenizer, reward_funcs=rewards
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
