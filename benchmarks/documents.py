"""longstraw-bench/Documents-v0: questions about facts planted in a long text. The reading task of `learning.py`.

One text of any length stands in the first observation (Python's own language reference, documents drawn at random). Sentences
"The number of NAME is VALUE." are planted in it at random places. Then one question follows after the other, and each action is
an answer. A value can only be had by reading, however far back it stands, and the other sentences are wrong answers.

Asked for the name that has a number, a reader needs what stands *before* the place that the question points to. A causal model
can only answer then if its states at the number hold the name already, made before anybody asked: that is learned by gradients
into the prompt's states, which a detached prefix does not get.

Vocabulary
    fact      a planted sentence
    chars     the length of the text without the facts
    ask       what questions are about: a name's "number", or a number's "name"
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np

from longstraw_agents.envs.document_search import read_corpus
from longstraw_agents.envs.parsing import ParsedAction, ParserConfig
from longstraw_agents.envs.rewards import Episode, Grade, RewardPart
from longstraw_agents.envs.tool_env import ToolEnv, in_split
from longstraw_agents.errors import ConfigError
from longstraw_agents.types import Message, StopReason

ENV_ID = "longstraw-bench/Documents-v0"
STARTS = ("Ba", "Ce", "Di", "Fo", "Gu", "Ha", "Ki", "Lo", "Mu", "Ne", "Pa", "Ri", "So", "Tu", "Va", "Wen", "Yor", "Zel")
ENDS = ("bran", "cott", "dale", "field", "gate", "ham", "land", "mond", "port", "ridge", "stone", "ton", "ville", "wood")
LOWEST, HIGHEST = 100, 999


class DocumentsEnv(ToolEnv):
    """Part `answer`: the share of questions answered rightly. Part `planted`: that of answers with one planted value at all."""

    option_defaults: ClassVar[Mapping[str, Any]] = {"chars": 10_000, "facts": 4, "questions": 1, "ask": "number"}
    parser: ClassVar[ParserConfig] = ParserConfig(answer="text")
    reward_parts: ClassVar[tuple[RewardPart, ...]] = (RewardPart("planted", weight=0.2), RewardPart("answer"))

    def system_message(self) -> str:
        """What the policy is told first."""
        return "You answer questions about a text, in the words of the text."

    def new_task(self, rng: np.random.Generator, split: str) -> str:
        """One task from the random numbers of its seed."""
        count, questions = self.options["facts"], self.options["questions"]
        if not 1 <= questions <= count <= len(STARTS) * len(ENDS) or self.options["chars"] < 0:
            raise ConfigError(f"facts is {count} and questions {questions}; give at least as many facts as questions, at least 1")
        if self.options["ask"] not in ("number", "name"):
            raise ConfigError(f'ask must be "number" or "name", got {self.options["ask"]!r}')
        while True:
            places = rng.choice(len(STARTS) * len(ENDS), count, replace=False)
            self.names = [STARTS[place % len(STARTS)] + ENDS[place // len(STARTS)] for place in places]
            self.values = [str(value) for value in rng.choice(np.arange(LOWEST, HIGHEST + 1), count, replace=False)]
            if in_split(f"{self.names} {self.values}", split):
                break
        self.options = {**self.options, "max_turns": questions}
        self.right = self.planted = self.asked = 0
        text = self._planted(self._text(rng), rng)
        return f"{text}\n\n{self._question()}"

    def _text(self, rng: np.random.Generator) -> str:
        """Documents drawn at random, cut at `chars` characters."""
        corpus, pieces, size = read_corpus(None), [], 0
        while size < self.options["chars"]:
            pieces.append(corpus[int(rng.integers(len(corpus)))][1].strip())
            size += len(pieces[-1]) + 2
        return "\n\n".join(pieces)[: self.options["chars"]]

    def _planted(self, text: str, rng: np.random.Generator) -> str:
        """The text with every fact in a line of its own, spread evenly at random."""
        lines = text.split("\n")
        order = np.argsort(rng.integers(0, len(lines) + 1, len(self.names)), kind="stable")
        at = np.sort(rng.integers(0, len(lines) + 1, len(self.names)))[::-1]
        for place, fact in zip(at, order, strict=True):
            lines.insert(int(place), self._sentence(int(fact)))
        return "\n".join(lines)

    def _sentence(self, fact: int) -> str:
        return f"The number of {self.names[fact]} is {self.values[fact]}."

    def _question(self) -> str:
        if self.options["ask"] == "name":
            return f"Whose number is {self.values[self.asked]}?"
        return f"What is the number of {self.names[self.asked]}?"

    def _said(self, answer: str) -> list[str]:
        """The numbers, or the planted names, that an answer has."""
        if self.options["ask"] == "name":
            return [word for word in re.findall(r"\w+", answer) if word in self.names]
        return re.findall(r"\d+", answer)

    def _take(self, parsed: ParsedAction, episode: Episode) -> list[Message]:
        """Judge an answer and ask the next question; the episode ends after the last one."""
        episode.calls.append(())
        said, values = self._said(parsed.answer or ""), self.names if self.options["ask"] == "name" else self.values
        self.right += said == [values[self.asked]]
        self.planted += len(said) == 1 and said[0] in values
        self.asked += 1
        if self.asked == self.options["questions"]:
            episode.answer, episode.stop_reason = parsed.answer, StopReason.ANSWERED
            return []
        return [Message("user", self._question())]

    def grade(self, episode: Episode) -> Grade:
        """The outcome and the parts of the reward, at the end."""
        questions = self.options["questions"]
        return Grade(self.right == questions, {"planted": self.planted / questions, "answer": self.right / questions})

    def solver(self) -> Generator[str, str, None]:
        """Actions that earn everything."""
        for fact in range(self.options["questions"]):
            yield self.names[fact] if self.options["ask"] == "name" else self._sentence(fact)


if ENV_ID not in gymnasium.registry:
    gymnasium.register(ENV_ID, entry_point=DocumentsEnv, disable_env_checker=True)
