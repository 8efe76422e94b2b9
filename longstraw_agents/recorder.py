"""Recording an agent program's calls: the engine behind the proxy, without the network.

Idea: a session is one episode of a group. Each call is placed in one of the session's parts, sampled from the policy, and its
turn committed before the program gets the answer. The reward comes from outside at the end and finishes all parts at once.

Vocabulary
    session   one episode, from `open` to `finish`; after a restart it can't go on, because the program's memory is gone
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from longstraw_agents.envs.parsing import ParserConfig, parse_action
from longstraw_agents.episodes import task_key, turn_notes, turn_seed
from longstraw_agents.errors import ConfigError, LongStrawError, NonFiniteError, NotStoredError, PolicyError, TokenError
from longstraw_agents.policies.sampling import Finish, Policy, Sample, SampleRequest, Sampling
from longstraw_agents.rendering import Rendered, Renderer
from longstraw_agents.storage import Store
from longstraw_agents.transcripts import Call, Entry, Part, messages, place
from longstraw_agents.types import StopReason, Task, TokenArray, ToolCall, Turn

log = logging.getLogger(__name__)
_CALLS = ParserConfig(formats=("tags",))


@dataclass(frozen=True)
class RecorderConfig:
    """The sampling of all calls; tokens of one answer and of one trajectory at most; the seed of all sampling."""

    sampling: Sampling = Sampling()
    max_action_tokens: int = 512
    max_trajectory_tokens: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_action_tokens < 1 or self.max_trajectory_tokens < 2:
            raise ConfigError(
                f"max_action_tokens must be at least 1 and max_trajectory_tokens 2, got {self.max_action_tokens} and "
                f"{self.max_trajectory_tokens}"
            )


@dataclass(frozen=True)
class Reply:
    """What the program is answered, and how many tokens went in and came out."""

    entry: Entry
    finish: Finish
    prompt_tokens: int
    action_tokens: int


@dataclass
class Session:
    """One episode. `rewritten` counts the calls that did not repeat the history and began a part."""

    session_id: str
    group_id: str
    member: int
    task: Task
    parts: list[Part] = field(default_factory=list)
    repeat: int = 0  # groups of the same task that the run had before
    calls: int = 0
    rewritten: int = 0
    finished: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Recorder:
    """Sessions of one run on one policy."""

    def __init__(
        self, store: Store, policy: Policy, renderer: Renderer, run_id: str, config: RecorderConfig = RecorderConfig()
    ) -> None:
        self.store, self.policy, self.renderer, self.run_id, self.config = store, policy, renderer, run_id, config
        self.sessions: dict[str, Session] = {}
        self._groups: dict[str, tuple[Task, int, int]] = {}  # task, size, earlier groups of the same task

    def cancel_open(self) -> int:
        """Finish what an earlier process left open as cancelled; gives the number of trajectories."""
        left = self.store.open_trajectories(self.run_id)
        for row in left:
            self.store.finish_trajectory(row.trajectory_id, StopReason.CANCELLED, None, {})
        return len(left)

    def open(self, task: Task | None = None, *, group_id: str | None = None, size: int = 1) -> Session:
        """Begin an episode: the next member of a group, or the first of a new group of `size` for `task`."""
        if group_id is None:
            if task is None:
                raise ConfigError("a new group needs a task")
            repeat = sum(task_key(row.task) == task_key(task) for row in self.store.groups(self.run_id))
            group_id = self.store.add_group(self.run_id, task, size, policy_version=self.policy.version)
            self._groups[group_id] = (task, size, repeat)
        if group_id not in self._groups:
            raise NotStoredError(f"group {group_id} was not begun here; open its first session with a task and a size")
        task, size, repeat = self._groups[group_id]
        begun = sum(session.group_id == group_id for session in self.sessions.values())
        if begun >= size:
            raise ConfigError(f"group {group_id} has {size} members and all have begun")
        session = Session(f"{group_id}-{begun}", group_id, begun, task, repeat=repeat)
        self.sessions[session.session_id] = session
        return session

    def session(self, session_id: str) -> Session:
        """An open session. Raises NotStoredError where there is none of this name."""
        if session_id not in self.sessions or self.sessions[session_id].finished:
            raise NotStoredError(f"there is no open session {session_id!r}; open one with POST /sessions")
        return self.sessions[session_id]

    async def answer(self, session_id: str, entries: Sequence[Entry], max_tokens: int | None = None) -> Reply:
        """Sample the answer to a call and commit it as a turn.

        Raises TokenError where the call is empty, ends with an answer, or leaves no room within max_trajectory_tokens.
        """
        if not entries or entries[-1].role in ("assistant", "tools"):
            raise TokenError("a call must end with a message that is not the assistant's")
        session = self.session(session_id)
        async with session.lock:
            number, part, turns = session.calls, *self._part(session, entries)
            session.calls += 1
            rendered = self._rendered(part, turns, entries)
            if rendered.history == "rewritten":  # the format shows earlier turns otherwise: its text begins a part
                part, turns = self._rewritten(session, part), 0
            part.busy = True
        try:
            return await self._sample(session, part, turns, number, entries, rendered, max_tokens)
        finally:
            part.busy = False

    def _part(self, session: Session, entries: Sequence[Entry]) -> tuple[Part, int]:
        """The part that the call goes on with, a new one where it rewrote its history, and the turns that it repeats."""
        where = place(session.parts, entries)
        if where.goes_on and where.part is not None:
            return where.part, where.turns
        empty = _empty(session)
        if where.part is None and empty is not None:
            return empty, 0
        parent = (where.part or session.parts[-1]).trajectory_id if session.parts else None
        trajectory_id = self.store.add_trajectory(
            session.group_id, session.member, parent=parent, parent_turns=where.turns or None
        )
        part = Part(trajectory_id)
        if where.part is not None:
            part.entries = where.part.entries[: where.part.ends[where.turns - 1]]
            part.ends, part.token_ends = where.part.ends[: where.turns], where.part.token_ends[: where.turns]
            part.token_starts = where.part.token_starts[: where.turns]
            part.tokens = where.part.tokens[: part.token_ends[-1]]
        if session.parts:
            session.rewritten += 1
            log.info("session %s rewrote its history: %s begins after %d turns", session.session_id, trajectory_id, where.turns)
        session.parts.append(part)
        return part, where.turns

    def _rendered(self, part: Part, turns: int, entries: Sequence[Entry]) -> Rendered:
        """The call's new messages, behind the part's last reply where it has one."""
        if not turns:
            return self.renderer.first(messages(entries))
        before, action = part.entries[: part.ends[-1] - 1], part.tokens[part.token_starts[-1] : part.token_ends[-1]]
        return self.renderer.following(action, messages(entries[part.ends[-1] :]), messages(before))

    def _rewritten(self, session: Session, left: Part) -> Part:
        """A part that begins with the whole context as the format shows it now."""
        session.rewritten += 1
        if (empty := _empty(session)) is not None:
            return empty
        part = Part(self.store.add_trajectory(session.group_id, session.member, parent=left.trajectory_id))
        session.parts.append(part)
        return part

    async def _sample(
        self,
        session: Session,
        part: Part,
        turns: int,
        number: int,
        entries: Sequence[Entry],
        rendered: Rendered,
        max_tokens: int | None,
    ) -> Reply:
        prompt = np.concatenate([part.tokens, rendered.ids])
        room = min(self.config.max_trajectory_tokens - len(prompt), max_tokens or self.config.max_action_tokens)
        if room < 1:
            limit = self.config.max_trajectory_tokens
            raise TokenError(f"the call has {len(prompt)} tokens; {limit} are allowed, answer included")
        seed = turn_seed(self.config.seed, session.task, session.repeat, self.policy.version, session.member, number)
        sample = await self._ask(SampleRequest(part.trajectory_id, prompt, room, seed, self.config.sampling))
        entry = self._entry(sample.ids, any(e.role == "tools" for e in entries))
        calls = [ToolCall(call.name, {"json": call.arguments}) for call in entry.calls]
        turn = Turn(
            rendered.ids,
            sample.ids,
            sample.behaviour,
            sample.version,
            tool_calls=calls,
            observation_source=rendered.source,
            notes=turn_notes(self.config.sampling, rendered),
        )
        await asyncio.to_thread(self.store.append_turn, part.trajectory_id, turns, turn)
        part.entries = [*part.entries, *entries[len(part.entries) :], entry]
        part.ends.append(len(part.entries))
        part.tokens = np.concatenate([prompt, sample.ids])
        part.token_starts.append(len(prompt))
        part.token_ends.append(len(part.tokens))
        return Reply(entry, sample.finish, len(prompt), len(sample.ids))

    async def _ask(self, request: SampleRequest) -> Sample:
        try:
            return await self.policy.sample(request)
        except LongStrawError:
            raise
        except Exception as error:  # an engine is foreign code
            raise PolicyError(f"the policy failed: {type(error).__name__}: {error}") from error

    def _entry(self, action: TokenArray, with_tools: bool) -> Entry:
        text = self.renderer.text(action)
        calls = parse_action(text, _CALLS).calls if with_tools else ()
        if not calls or any(call.error for call in calls):
            return Entry("assistant", text, sampled=text)
        before = text.split("<tool_call>")[0].strip()
        return Entry("assistant", before, tuple(Call.of(call.name, dict(call.arguments)) for call in calls), text)

    async def finish(
        self,
        session_id: str,
        reward: float | None,
        *,
        reward_parts: Mapping[str, float] | None = None,
        success: bool | None = None,
    ) -> int:
        """End an episode with its reward (None: it failed, and is left out of training); gives the number of parts.

        Raises NonFiniteError for a reward that is NaN or infinite; the session then stays open.
        """
        session = self.session(session_id)
        values = [*([] if reward is None else [reward]), *(reward_parts or {}).values()]
        if not all(math.isfinite(value) for value in values):
            raise NonFiniteError(f"the reward of session {session_id} is not finite: {reward}, {dict(reward_parts or {})}")
        async with session.lock:
            if any(part.busy for part in session.parts):
                raise ConfigError(f"session {session_id} has a call under way; await its answer before the reward")
            if not session.parts:
                session.parts.append(Part(self.store.add_trajectory(session.group_id, session.member)))
                reward, success = None, None  # no call came: nothing to reward
            reason = StopReason.CANCELLED if reward is None else StopReason.ANSWERED
            for part in session.parts:
                await self.policy.close_session(part.trajectory_id)
                self.store.finish_trajectory(
                    part.trajectory_id,
                    reason,
                    reward,
                    reward_parts or {},
                    success=success,
                    weight=1.0 / len(session.parts),
                )
            session.finished = True
        return len(session.parts)


def _empty(session: Session) -> Part | None:
    """A part whose first answer failed: it holds nothing and can be begun anew."""
    return next((part for part in session.parts if not part.ends and not part.busy), None)
