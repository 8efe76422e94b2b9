"""A policy that plays recorded actions from the store: to run episodes again, with the same environment or another version of it.

Each session takes the actions of one recorded trajectory. An observation that differs from the recorded one is an error: the
recorded log-probabilities belong to the recorded tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from longstraw_agents.errors import ConfigError, PolicyError
from longstraw_agents.policies.sampling import Finish, Sample, SampleRequest
from longstraw_agents.storage import Store
from longstraw_agents.types import Turn


class ReplayPolicy:
    """A session takes the first trajectory that is still free and begins with its tokens."""

    def __init__(self, store: Store, trajectory_ids: Sequence[str], stop_ids: Iterable[int], *, version: int = 0) -> None:
        self.version = version
        self._stop_ids = frozenset(stop_ids)
        self._turns = {name: store.turns(name) for name in trajectory_ids}
        self._free = list(trajectory_ids)
        self._sessions: dict[str, str] = {}

    async def sample(self, request: SampleRequest) -> Sample:
        """See Policy.sample. Raises PolicyError where the tokens are not those that were recorded, or the record is used up."""
        name = self._trajectory(request)
        before: list[np.ndarray] = []
        for turn in self._turns[name]:
            before.append(turn.observation)
            if sum(map(len, before)) == len(request.tokens) and len(turn.action):
                if not np.array_equal(np.concatenate(before), request.tokens):
                    break
                return self._sample(turn, request)
            before.append(turn.action)
        raise PolicyError(f"trajectory {name} has no action after these {len(request.tokens)} tokens: its environment changed")

    async def close_session(self, session: str) -> None:
        """A closed session may begin again with the same trajectory."""

    def _trajectory(self, request: SampleRequest) -> str:
        if request.session not in self._sessions:
            fitting = [name for name in self._free if self._begins(name, request)]
            if not fitting:
                raise PolicyError(f"no recorded trajectory that is still free begins with session {request.session}'s tokens")
            self._free.remove(fitting[0])
            self._sessions[request.session] = fitting[0]
        return self._sessions[request.session]

    def _begins(self, name: str, request: SampleRequest) -> bool:
        first = self._turns[name][0].observation if self._turns[name] else request.tokens[:0]
        return len(first) > 0 and np.array_equal(first, request.tokens[: len(first)])

    def _sample(self, turn: Turn, request: SampleRequest) -> Sample:
        if len(turn.action) > request.max_new_tokens:
            raise PolicyError(f"the recorded action has {len(turn.action)} tokens, only {request.max_new_tokens} are allowed")
        recorded = {name: turn.notes[name] for name in ("temperature", "top_p") if name in turn.notes}
        if recorded != request.sampling.notes():
            raise ConfigError(
                f"the recorded action was sampled with {recorded or 'temperature 1 and top_p 1'}, and {request.sampling} is "
                "asked for: its log-probabilities are of another distribution; ask for the recorded one"
            )
        finish: Finish = "stop" if int(turn.action[-1]) in self._stop_ids else "length"
        return Sample(turn.action, turn.behaviour, finish, turn.policy_version)
