"""A warm start: the run's first updates imitate good trajectories instead of comparing rewards.

Idea: supervised training is a loss like any other, -log p of the action tokens with constant coefficients, so it goes through the
same trees, the same exact gradient, the same steps, store and receipts. Only where the trajectories come from differs.

Vocabulary
    solver     a program in an environment that knows the way (`ToolEnv.solver`); its actions are written, not sampled
    samples    the policy's own trajectories, of which the ones with a high reward are kept (rejection sampling)
    store      trajectories that another run, or an import, has left in a store
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np

from longstraw_agents.episodes import make_registered
from longstraw_agents.errors import ConfigError, PolicyError, StoreError
from longstraw_agents.policies.sampling import Sample, SampleRequest
from longstraw_agents.storage import Store
from longstraw_agents.types import Group, Task


@dataclass(frozen=True)
class WarmStart:
    """updates: how many of the run's first updates imitate (0: none).

    source: "solver", "samples" or "store" (see above); minimum_reward: trajectories with less are left out; store, run: where the
    trajectories of source "store" lie (a path or URL, and the run's name).
    """

    updates: int = 0
    source: Literal["solver", "samples", "store"] = "solver"
    minimum_reward: float | None = None
    store: str | None = None
    run: str | None = None

    def __post_init__(self) -> None:
        if self.updates < 0:
            raise ConfigError(f"warm start updates must be at least 0, got {self.updates}")
        if self.source not in ("solver", "samples", "store"):
            raise ConfigError(f"warm start source must be solver, samples or store, got {self.source!r}")
        if (self.source == "store") != (self.store is not None and self.run is not None):
            raise ConfigError(
                f"warm start source {self.source!r} with store {self.store!r} and run {self.run!r}: "
                "give both with source 'store', and neither otherwise"
            )
        if self.source == "samples" and self.minimum_reward is None:
            raise ConfigError("warm start from samples keeps the good ones: set minimum_reward")


class Demonstrator:
    """A policy that plays environments' solvers. `make` and `sample` belong together, one episode at a time.

    Its behaviour log-probabilities are 0: what it says is certain.
    """

    def __init__(self, tokenizer: Any, stop_id: int, *, version: int = 0) -> None:
        self.version = version
        self._tokenizer, self._stop_id = tokenizer, stop_id
        self._watched: _Watched | None = None

    def make(self, task: Task) -> gymnasium.Env[str, str]:
        """The task's environment, its solver kept one action ahead."""
        self._watched = _Watched(make_registered(task))
        return self._watched

    async def sample(self, request: SampleRequest) -> Sample:
        """The solver's next action in the environment made last."""
        if self._watched is None:
            raise PolicyError("a demonstrator was asked for an action before it made an environment; collect with make=its make")
        ids = [*self._tokenizer(self._watched.action(), add_special_tokens=False)["input_ids"], self._stop_id]
        kept = np.array(ids[: request.max_new_tokens], dtype=np.int32)
        finish: Literal["stop", "length"] = "stop" if len(kept) == len(ids) else "length"
        return Sample(kept, np.zeros(len(kept), dtype=np.float32), finish, self.version)

    async def close_session(self, session: str) -> None:
        """Nothing is kept of a session."""


class _Watched(gymnasium.Wrapper[str, str, str, str]):
    """Sends each observation to the environment's solver."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """As the environment's."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._solver: Generator[str, str, None] = self.unwrapped.solver()  # type: ignore[attr-defined]
        self._next: str | None = next(self._solver)
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """As the environment's."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        try:
            self._next = self._solver.send(observation)
        except StopIteration:
            self._next = None
        return observation, float(reward), terminated, truncated, info

    def action(self) -> str:
        """What the solver says now."""
        if self._next is None:
            raise PolicyError(f"the solver of {self.unwrapped} has no further action, but the episode goes on; mend the solver")
        return self._next


def stored_groups(settings: WarmStart, update: int, count: int) -> list[Group]:
    """The `count` groups that update `update` (from 1) imitates, in the stored run's order, round and round.

    Raises StoreError where the run does not exist or has no complete group.
    """
    assert settings.store is not None and settings.run is not None
    with Store.open(settings.store, create=False) as store:
        runs = [row for row in store.runs() if row.name == settings.run]
        rows = store.groups(runs[-1].run_id, purpose="train", complete=True) if runs else []
        if not rows:
            known: Sequence[str] = [row.name for row in store.runs()]
            raise StoreError(
                f"store {settings.store} has no complete group of a run {settings.run!r} to imitate; "
                f"its runs: {', '.join(known) or 'none'}"
            )
        chosen = [rows[index % len(rows)] for index in range((update - 1) * count, update * count)]
        return [store.load_group(row.group_id) for row in chosen]
