"""What a policy is asked and what it answers, in token ids.

Idea: everything that samples (a local model, an engine, an endpoint, a script) has one method: the whole trajectory so far goes
in, the sampled ids and their log-probabilities come out. Text never passes here, so nothing can be encoded twice.

Vocabulary
    session    one trajectory's life in a policy; a policy may keep its state between the session's turns
    sampling   the settings that change the distribution; log-probabilities are of the distribution that they give
    finish     why an action ended: "stop" (a stop token, which is the action's last token) or "length" (the limit was reached)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from longstraw_agents.errors import ConfigError, TokenError
from longstraw_agents.types import LogpArray, TokenArray

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy (log-probabilities are then 0: the distribution is one point); top_p 1 keeps every token.

    There are no others: penalties and top-k are refused where they could be asked for, and switched off where an engine has them.
    """

    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be finite and not negative, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p}")

    def notes(self) -> dict[str, float]:
        """What a turn's notes say of it: nothing where the model's own distribution was sampled."""
        return {name: value for name, value in vars(self).items() if value != 1.0}


@dataclass(frozen=True)
class SampleRequest:
    """tokens [T]: the whole trajectory so far, new observation included. The same seed on the same tokens and weights gives
    the same action, up to floating-point differences between batches."""

    session: str
    tokens: TokenArray
    max_new_tokens: int
    seed: int
    sampling: Sampling = Sampling()

    def __post_init__(self) -> None:
        if len(self.tokens) == 0:
            raise TokenError(f"session {self.session}: nothing to sample from; the first observation has no tokens")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(frozen=True)
class Sample:
    """ids [A] sampled tokens, behaviour [A] their natural-log probabilities, under the weights of `version`."""

    ids: TokenArray
    behaviour: LogpArray
    finish: Finish
    version: int

    def __post_init__(self) -> None:
        if len(self.ids) == 0 or len(self.ids) != len(self.behaviour):
            raise TokenError(
                f"a sample has {len(self.ids)} tokens and {len(self.behaviour)} log-probabilities; both must be > 0 and equal"
            )
        if not np.all(np.isfinite(self.behaviour)):
            raise TokenError("a sample has a log-probability that is not finite: the policy cannot have sampled that token")


class TrainedPolicy(Protocol):
    """A policy whose weights a trainer changes between samples: what the run loop needs besides `Policy`."""

    version: int

    async def sample(self, request: SampleRequest) -> Sample:
        """See Policy.sample."""
        ...

    async def close_session(self, session: str) -> None:
        """See Policy.close_session."""
        ...

    def pause(self) -> None:
        """Give up what can be had again: the trainer works now. No sample may be under way."""
        ...

    def refresh(self, version: int, adapter: Path | None = None) -> None:
        """The weights are `version` from now on; their adapter lies in `adapter`, None for the base model's own weights."""
        ...

    def report(self) -> dict[str, int]:
        """Counts over the policy's life: "sampled" tokens, and what else the kind counts."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Policy(Protocol):
    """What collection needs. `version` is that of the weights which the next sample comes from."""

    version: int

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one action. Raises PolicyError where that failed and may be tried again."""
        ...

    async def close_session(self, session: str) -> None:
        """Forget what is kept of the session. Unknown sessions are no error."""
        ...
