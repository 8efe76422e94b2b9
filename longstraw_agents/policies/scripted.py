"""A policy that plays given texts: for tests, baselines, and demonstrations by a program.

Its distribution is one point, so each token's log-probability is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from longstraw_agents.policies.sampling import Sample, SampleRequest


class ScriptedPolicy:
    """Answers each request with `answer(request)`, encoded and ended by the stop token; longer answers are cut at the limit."""

    def __init__(
        self,
        answer: Callable[[SampleRequest], str],
        encode: Callable[[str], Sequence[int]],
        stop_id: int,
        *,
        version: int = 0,
    ) -> None:
        self.version = version
        self._answer, self._encode, self._stop_id = answer, encode, stop_id

    async def sample(self, request: SampleRequest) -> Sample:
        """See Policy.sample."""
        ids = np.array([*self._encode(self._answer(request)), self._stop_id], np.int32)
        cut = len(ids) > request.max_new_tokens
        ids = ids[: request.max_new_tokens]
        return Sample(ids, np.zeros(len(ids), np.float32), "length" if cut else "stop", self.version)

    def pause(self) -> None:
        """Nothing is held."""

    def refresh(self, version: int, adapter: Path | None = None) -> None:
        """A script has no weights; only its version counts on."""
        self.version = version

    def report(self) -> dict[str, int]:
        """Nothing is counted."""
        return {}

    def close(self) -> None:
        """Nothing is held."""

    async def close_session(self, session: str) -> None:
        """Nothing is kept of a session."""
