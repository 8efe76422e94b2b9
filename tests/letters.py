"""A run that learns in seconds: a tiny model that answers with letters, and an environment that likes some of them."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import chat
import gymnasium
import numpy as np
import torch
import transformers

from longstraw_agents.collection import CollectConfig
from longstraw_agents.evaluation import EvaluateSettings
from longstraw_agents.loop import RunConfig, RunSettings, TaskSettings
from longstraw_agents.rendering import ChatML
from longstraw_agents.trainer.models import LoraSettings, ModelConfig
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.update import TrainerConfig
from longstraw_agents.types import Message, StopReason


class Letters(gymnasium.Env[str, str]):
    """Says a letter; the reward is the share of letters e to t in the action."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        letter = "abcdefgh"[int(self.np_random.integers(8))]
        return letter, {"messages": [Message("user", letter)]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reward = sum("e" <= character <= "t" for character in action) / max(len(action), 1)
        return "", reward, True, False, {"messages": [], "stop_reason": StopReason.ANSWERED, "success": reward > 0.3}


gymnasium.register("tests/Letters-v0", Letters)


def make_model(folder: Path) -> str:
    """A tiny model that has learned to answer with one to five letters and the end token, so that rewards differ."""
    tokenizer = chat.small_tokenizer()
    settings = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(settings)
    renderer, rng = ChatML(tokenizer), np.random.default_rng(0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    prompts = [renderer.first([Message("user", letter)]).ids.tolist() for letter in "abcdefgh"]
    for _ in range(60):
        words = ["".join(rng.choice(list(string.ascii_lowercase), rng.integers(1, 6))) for _ in range(16)]
        rows = [prompts[i % 8] + tokenizer(word)["input_ids"] + list(renderer.stop_ids) for i, word in enumerate(words)]
        ids = torch.tensor([row + [-100] * (max(map(len, rows)) - len(row)) for row in rows])
        model(input_ids=ids.clamp(min=0), labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def letters_config(model_folder: str, folder: Path) -> RunConfig:
    """Two updates of two tasks x four episodes."""
    return RunConfig(
        run=RunSettings(folder=folder, updates=2),
        tasks=TaskSettings(env="tests/Letters-v0", groups=2, samples=4),
        model=ModelConfig(name=model_folder, adapter=LoraSettings(rank=4)),
        collect=CollectConfig(max_action_tokens=8, max_trajectory_tokens=64),
        trainer=TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-2)),
        evaluate=EvaluateSettings(tasks=3, samples=2),
    )
