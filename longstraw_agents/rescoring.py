"""Stored trajectories scored again, without sampling: the recorded actions are taken in the environment as it is now.

Idea: an episode is replayed exactly as it is after a crash (`episodes.Episode`), only to its end. So a changed reward, a mended
grader or another option of the environment can be tried on everything that was ever collected. The store is read, not changed.
An environment that now says something else than what the policy had read gives no score: the policy might have acted otherwise.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import gymnasium

from longstraw_agents import scores
from longstraw_agents.episodes import Episode, EpisodeFailed, Limits, Rewrite, World, make_registered
from longstraw_agents.errors import PolicyError
from longstraw_agents.policies.sampling import Sample, SampleRequest, Sampling
from longstraw_agents.rendering import Renderer
from longstraw_agents.storage import Store, TrajectoryRow
from longstraw_agents.types import FAILED, Task, Turn


def rescore(
    store: Store,
    renderer: Renderer,
    group_ids: Iterable[str],
    options: Mapping[str, Any] | None = None,
    make: Callable[[Task], gymnasium.Env[str, str]] = make_registered,
    rewrite: Rewrite | None = None,
) -> list[list[scores.Outcome]]:
    """The ends of the groups' finished episodes in environments whose tasks have `options` added, one list per group.

    rewrite: the one that the episodes were collected with, if any. An episode that cannot be replayed to its end, or that had
    failed, has no reward. What is open is left out.
    """
    tasks = {row.group_id: row.task for run in store.runs() for row in store.groups(run.run_id)}
    found = []
    for group_id in group_ids:
        task = replace(tasks[group_id], options={**tasks[group_id].options, **(options or {})})
        episodes: defaultdict[int, list[TrajectoryRow]] = defaultdict(list)
        for row in store.trajectories(group_id):
            episodes[row.member].append(row)
        finished = [parts for _, parts in sorted(episodes.items()) if all(part.stop_reason is not None for part in parts)]
        found.append([_replayed(store, renderer, parts, World(make, task), rewrite) for parts in finished])
    return found


def _replayed(
    store: Store, renderer: Renderer, parts: list[TrajectoryRow], world: World, rewrite: Rewrite | None
) -> scores.Outcome:
    """The end of one episode, whose parts are its trajectories."""
    parts = sorted(parts, key=lambda row: row.part)
    if any(part.stop_reason in FAILED for part in parts):
        return scores.Outcome(False, None)
    longest = max(part.length for part in parts)
    episode = Episode(
        world=world,
        policy=_Silent(),
        renderer=renderer,
        sampling=Sampling(),
        limits=Limits(action_tokens=longest, trajectory_tokens=longest),
        seed_of=lambda turn: 0,
        record=_no_record,
        begin=_no_part,
        in_thread=_at_once,
        check=lambda: None,
        session_of=lambda part: parts[0].trajectory_id,
        rewrite=rewrite,
    )
    try:
        outcome = asyncio.run(episode.run([store.turns(part.trajectory_id) for part in parts]))
    except EpisodeFailed:
        return scores.Outcome(False, None)
    finally:
        world.close()
    return scores.Outcome(bool(outcome.success), outcome.reward)


class _Silent:
    """A policy that is never to be asked: every action is recorded."""

    version = 0

    async def sample(self, request: SampleRequest) -> Sample:
        """Raises PolicyError: there is nothing left to sample."""
        raise PolicyError(f"the environment of {request.session} asks for an action beyond the recorded ones")

    async def close_session(self, session: str) -> None:
        """Nothing is kept."""


async def _no_record(part: int, index: int, turn: Turn) -> None:
    """Replaying commits nothing."""


async def _no_part(part: int) -> None:
    """All parts are there."""


async def _at_once(call: Callable[..., Any], *arguments: Any) -> Any:
    return call(*arguments)
