"""A small ChatML tokenizer and a small environment for tests of rendering, policies and collection."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import gymnasium
import tokenizers
import transformers

from longstraw_agents.types import Message, StopReason, Task, ToolCall

ADDED = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>"]


def small_tokenizer(*, lossy: bool = False, word: str | None = None) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE over the 256 bytes and a few merges. lossy: lower-cases. word: an added token that the model's own merges
    reach too."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    if word:
        merges += [("".join(word[:size]), word[size]) for size in range(1, len(word))]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=word is None)
    backend.decoder = tokenizers.decoders.ByteLevel()
    if lossy:
        backend.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    added = ADDED + ([word] if word else [])
    tokenizer.add_tokens([tokenizers.AddedToken(token, special=token.startswith("<|"), normalized=False) for token in added])
    return tokenizer


class Countdown(gymnasium.Env[str, str]):
    """Says a number each turn, ends after `turns`, rewards 1 where the last action repeats the last number. Counts its calls."""

    calls = 0
    noise = itertools.count()

    observation_space = gymnasium.spaces.Text(1000)
    action_space = gymnasium.spaces.Text(1000)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.options = {"turns": 3, **(options or {})}
        self.turn, self.number = 0, int(self.np_random.integers(1000))
        return "", {"messages": [Message("system", "Repeat."), Message("user", f"number {self.number}")]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        type(self).calls += 1
        self.turn += 1
        if self.options.get("raise_at") == self.turn:
            raise ValueError("the tool broke")
        right = action == f"number {self.number}"
        self.number += 1
        if self.options.get("noisy"):
            self.number += next(self.noise)
        info: dict[str, Any] = {"messages": [Message("tool", f"number {self.number}")], "reward_parts": {"right": float(right)}}
        info["tool_calls"] = [ToolCall("count", {"turn": self.turn}, result=str(self.number))]
        ended = self.turn == self.options["turns"]
        if ended:
            info["stop_reason"], info["success"] = StopReason.ANSWERED, right
        reward = float("nan") if self.options.get("not_finite") and ended else float(right)
        return "", reward, ended, False, info


class DiesOnce(Countdown):
    """Ends its whole process at the second step of the first environment that gets there."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        mark = Path(self.options["mark"])
        if self.turn == 1 and not mark.exists():
            mark.touch()
            os._exit(1)
        return super().step(action)


def make_dying(task: Task) -> DiesOnce:
    return DiesOnce()


def countdown(seed: int = 0, **options: Any) -> Task:
    """A task of Countdown."""
    return Task("Countdown", seed, "train", options)


def make_countdown(task: Task) -> Countdown:
    return Countdown()
