"""longstraw/Ledger-v0: many sessions of events; later questions need facts from arbitrarily far back; exact length in tokens.

Idea: each observation is a session: events (who gave how many coins to whom, who moved where) and, at its end, a question about
any session so far. The policy answers, and the next session follows, so a trajectory is one long chain of short decisions whose
evidence lies anywhere behind them. With `length_tokens`, filler is added so that all observations together have exactly that
many tokens under `count_tokens`.

Vocabulary
    session   the events between two questions
    reach     how many sessions back the fact lies that a question is about
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, ClassVar

import numpy as np

from longstraw_agents.envs.parsing import ParsedAction
from longstraw_agents.envs.rewards import Episode, Grade, RewardPart
from longstraw_agents.envs.tool_env import NO_CALL, ToolEnv, in_split
from longstraw_agents.errors import ConfigError
from longstraw_agents.types import Message, StopReason

PEOPLE = ("Ada", "Bruno", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jana", "Kofi", "Lena")
TOWNS = ("Arnhem", "Bilbao", "Cork", "Delft", "Espoo", "Faro", "Graz", "Hvar", "Izmir", "Jena")
FILLER = ("The day was calm.", "Nothing else was noted.", "The clerk closed the book.", "It rained in the evening.")
#: Pieces that most tokenizers count as one token each, tried in turn to fill up to an exact length.
UNITS = (" x", ".", " a", "\n", " 1", "-", "a")


class LedgerEnv(ToolEnv):
    """Read sessions, answer a question after each. Part `answer`: each right answer earns an equal share."""

    option_defaults: ClassVar[Mapping[str, Any]] = {"sessions": 8, "events": 6, "length_tokens": None}
    reward_parts: ClassVar[tuple[RewardPart, ...]] = (RewardPart("answer"), RewardPart("all", weight=0.5))

    def system_message(self) -> str:
        """What the policy is told first."""
        return (
            "You keep a ledger in your head. After each session comes one question; answer it from all sessions so far, with one "
            "word or number, as <answer>...</answer>."
        )

    def new_task(self, rng: np.random.Generator, split: str) -> str:
        """One task from the random numbers of its seed."""
        if self.options["sessions"] < 1 or self.options["events"] < 1:
            raise ConfigError("sessions and events must be at least 1")
        self.options = {**self.options, "max_turns": max(self.options["max_turns"], 2 * self.options["sessions"] + 4)}
        while True:
            facts = self._facts(rng)
            if in_split(str(facts), split):
                break
        self.right = 0
        self.current = 0
        self.sessions = self._write(facts, rng)
        if self.options["length_tokens"] is not None:
            self._fill(self.options["length_tokens"])
        return self.sessions[0]

    def _facts(self, rng: np.random.Generator) -> list[list[tuple[str, str, str]]]:
        """Per session: (kind, person, detail). "coins": a number of coins paid in; "town": moved to a town."""
        sessions = []
        for _ in range(self.options["sessions"]):
            events = []
            for _ in range(self.options["events"]):
                person = str(rng.choice(PEOPLE))
                coins, town = str(int(rng.integers(1, 100))), str(rng.choice(TOWNS))
                events.append(("coins", person, coins) if rng.random() < 0.5 else ("town", person, town))
            sessions.append(events)
        return sessions

    def _write(self, facts: list[list[tuple[str, str, str]]], rng: np.random.Generator) -> list[str]:
        """The sessions as text, each with a question about a session chosen evenly from all so far."""
        self.answers: list[str] = []
        self.reach: list[int] = []
        texts = []
        for number, events in enumerate(facts):
            lines = [f"Session {number + 1}"]
            for kind, person, detail in events:
                lines.append(f"{person} paid in {detail} coins." if kind == "coins" else f"{person} moved to {detail}.")
                if rng.random() < 0.3:
                    lines.append(str(rng.choice(FILLER)))
            asked = int(rng.integers(number + 1))
            kind, person, _ = facts[asked][int(rng.integers(len(facts[asked])))]
            details = [detail for each, who, detail in facts[asked] if (each, who) == (kind, person)]
            what = f"How many coins did {person} pay in" if kind == "coins" else f"To which town did {person} move"
            self.answers.append(str(sum(map(int, details))) if kind == "coins" else details[-1])
            self.reach.append(number - asked)
            last = ", in all" if kind == "coins" else " (the last move counts)"
            lines.append(f"Question: {what} in session {asked + 1}{last}?")
            texts.append("\n".join(lines))
        return texts

    def _fill(self, wanted: int) -> None:
        """Add filler in front of questions until all observations together have exactly `wanted` tokens."""
        head, question = [], []
        for text in self.sessions:
            before, _, after = text.rpartition("\n")
            head.append(before)
            question.append(after)
        missing = wanted - self._count(self.sessions)
        if missing < 0:
            raise ConfigError(
                f"length_tokens is {wanted}, but the sessions without filler have {wanted - missing}; "
                "ask for more tokens or fewer sessions"
            )
        base = max(1, missing // len(head))
        for unit in UNITS:
            padding = [base] * (len(head) - 1) + [max(1, missing - base * (len(head) - 1))]
            for _ in range(64):  # units may merge with their neighbours: correct by what is still missing
                self.sessions = [f"{h}\n{unit * max(0, n)}\n{q}" for h, n, q in zip(head, padding, question, strict=True)]
                gap = wanted - self._count(self.sessions)
                if gap == 0:
                    return
                padding[-1] += gap if padding[-1] + gap >= 0 else -padding[-1]
        raise ConfigError(f"no filler gives exactly {wanted} tokens with this tokenizer; try another length")

    def _count(self, sessions: list[str]) -> int:
        opening = self.count_tokens(f"{self.system_message()}\n{sessions[0]}")
        return opening + sum(self.count_tokens(text) for text in sessions[1:])

    def _take(self, parsed: ParsedAction, episode: Episode) -> list[Message]:
        """Judge an answer and show the next session; the episode ends after the last one."""
        episode.calls.append(tuple(self.call(call) for call in parsed.calls))
        if parsed.answer is None:
            return [Message("user", NO_CALL)]
        self.earned = parsed.answer.strip().rstrip(".") == self.answers[self.current]
        self.right += self.earned
        self.current += 1
        if self.current == len(self.sessions):
            episode.answer, episode.stop_reason = parsed.answer, StopReason.ANSWERED
            return []
        return [Message("user", self.sessions[self.current])]

    def grade_turn(self, episode: Episode) -> Mapping[str, float]:
        """Parts of the reward that a turn earned."""
        earned, self.earned = getattr(self, "earned", False), False
        return {"answer": earned / len(self.sessions)}

    def grade(self, episode: Episode) -> Grade:
        """The outcome and the parts of the reward, at the end."""
        everything = self.right == len(self.sessions)
        return Grade(everything, {"all": float(everything)})

    def solver(self) -> Generator[str, str, None]:
        """Actions that earn everything."""
        for answer in list(self.answers):
            yield f"<answer>{answer}</answer>"
