"""Sampling from a transformers model in this process, many sessions at once.

Idea: an engine that works in steps. Each step takes whatever each waiting session still has to run (a prompt, a tool's answer,
the token sampled last), runs it in one forward, and samples one token for every session that is through with its input.
Sessions come and go between steps, so a slow tool holds nobody up. A new session takes over the longest beginning that another
session has already run (a group's prompt is run once), and a session's history is never run again under the same weights:
`counters` says so.

Randomness: each request has its own generator, and one uniform number picks each token by the inverse of the distribution
function, so a request's result depends on its batch only where rounding crosses a border between two tokens.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longstraw_agents.errors import ConfigError, PolicyError
from longstraw_agents.policies.sampling import Finish, Sample, SampleRequest, Sampling
from longstraw_agents.policies.states import Segment, SerialRunner, runner_for, shared_length
from longstraw_agents.types import TokenArray

#: Tokens -> how many of them have kept states, and each layer's keys and values.
Kept = Callable[[TokenArray], tuple[int, list[dict[str, torch.Tensor]]]]

#: Below this, running shared tokens again is cheaper than waiting a step for another session to run them.
_WORTH_WAITING = 16
#: Prompts that a model without forkable states keeps ready for further members of a group.
_PROMPTS_KEPT = 4


@dataclass(frozen=True)
class LocalPolicyConfig:
    """max_batch: sessions in one step; step_tokens: tokens in one forward, longer inputs take several steps;
    max_sessions: states kept at most (the one unused for longest is dropped, and then run again when it is needed)."""

    max_batch: int = 64
    step_tokens: int = 1024
    max_sessions: int = 256

    def __post_init__(self) -> None:
        if min(self.max_batch, self.step_tokens, self.max_sessions) < 1:
            raise ConfigError("max_batch, step_tokens and max_sessions must be at least 1")
        if self.max_sessions < self.max_batch:
            raise ConfigError(f"max_sessions ({self.max_sessions}) must be at least max_batch ({self.max_batch})")


@dataclass
class Counters:
    """Tokens over the policy's life. input: run before a request's first token was sampled (observations, and the last token of
    the action before, which had no need to be run then); sampled; shared: taken over from another session instead
    of being run; rerun: run a second time for the same session under the same weights; steps: forwards."""

    input: int = 0
    sampled: int = 0
    shared: int = 0
    rerun: int = 0
    steps: int = 0


@dataclass
class _Session:
    state: Any = None
    seen: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))  # run at any time under these weights


@dataclass(eq=False)
class _Job:
    request: SampleRequest
    future: asyncio.Future[Sample]
    generator: np.random.Generator
    session: _Session = field(default_factory=_Session)
    pending: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))  # tokens still to be run
    ids: list[int] = field(default_factory=list)
    behaviour: list[float] = field(default_factory=list)


class LocalPolicy:
    """A Policy over a transformers model (or PEFT model) in this process. The trainer may change the weights in place between
    samples; `refresh` must follow, because states of the old weights are of no use."""

    def __init__(
        self,
        model: Any,
        stop_ids: Iterable[int],
        *,
        version: int = 0,
        config: LocalPolicyConfig = LocalPolicyConfig(),
        kept: Kept | None = None,
    ) -> None:
        """stop_ids: tokens that end an action, each included in it (a renderer's `stop_ids`). kept: states that a trainer of the
        same model keeps (`Recapture.beginning`)."""
        self.version = version
        self.config = config
        self.counters = Counters()
        self._kept = kept
        self._runner = runner_for(model)
        self._stop_ids = frozenset(stop_ids)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._prompts: OrderedDict[bytes, Any] = OrderedDict()
        self._waiting: deque[_Job] = deque()
        self._active: list[_Job] = []
        self._engine: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="longstraw-sampling")

    async def sample(self, request: SampleRequest) -> Sample:
        """See Policy.sample. Requests that wait at the same time run together."""
        unfinished = (job for job in (*self._waiting, *self._active) if not job.future.done())
        if any(job.request.session == request.session for job in unfinished):
            raise PolicyError(f"session {request.session} is already being sampled; await that first")
        loop = asyncio.get_running_loop()
        job = _Job(request, loop.create_future(), np.random.default_rng(request.seed))
        self._waiting.append(job)
        if self._engine is None or self._engine.done():
            self._engine = loop.create_task(self._run())
        return await job.future

    async def close_session(self, session: str) -> None:
        """See Policy.close_session."""
        self._sessions.pop(session, None)

    def refresh(self, version: int, adapter: Path | None = None) -> None:
        """The weights were changed, in place, and are now `version`: drop every state. Not while anything is being sampled."""
        self.pause()
        self.version = version

    def pause(self) -> None:
        """Drop every state, so that the trainer has their memory. Not while anything is being sampled."""
        self._drop_cancelled()
        if self._active or self._waiting:
            raise PolicyError("the weights changed while actions were being sampled; await all samples before an update")
        self._sessions.clear()
        self._prompts.clear()

    def report(self) -> dict[str, int]:
        """The counters."""
        return asdict(self.counters)

    def close(self) -> None:
        """End the sampling thread."""
        self._thread.shutdown(cancel_futures=True)

    # The engine: runs on the event loop while there is work; only `_step` runs in the thread.

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting or self._active:
            await asyncio.sleep(0)  # let everybody who is ready ask before the batch is made
            self._drop_cancelled()
            self._admit()
            if not self._active:
                continue
            try:
                finished = await loop.run_in_executor(self._thread, self._step)
            except Exception as error:  # whatever a model raises fails these requests, never the engine
                self._fail_active(error)
                continue
            for job, finish in finished:
                self._active.remove(job)
                if not job.future.done():
                    job.future.set_result(
                        Sample(np.array(job.ids, np.int32), np.array(job.behaviour, np.float32), finish, self.version)
                    )

    def _drop_cancelled(self) -> None:
        self._waiting = deque(job for job in self._waiting if not job.future.done())
        self._active = [job for job in self._active if not job.future.done()]

    def _fail_active(self, error: Exception) -> None:
        traceback.clear_frames(error.__traceback__)  # whoever keeps the error would keep what the step held, states above all
        for job in self._active:
            self._sessions.pop(job.request.session, None)  # half-extended: must not be read again
            job.session.state = None
            if not job.future.done():
                failure = PolicyError(f"sampling for session {job.request.session} failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                job.future.set_exception(failure)
        self._active = []

    # Which state a request starts from.

    def _admit(self) -> None:
        held_back: list[_Job] = []
        while self._waiting and len(self._active) < self.config.max_batch:
            job = self._waiting.popleft()
            if self._place(job):
                self._active.append(job)
            else:
                held_back.append(job)
        self._waiting.extendleft(reversed(held_back))
        self._evict()

    def _place(self, job: _Job) -> bool:
        """Give the job a state that holds a beginning of its tokens. False: another job is just running a longer one; wait."""
        tokens = np.asarray(job.request.tokens, np.int32)
        session = self._sessions.get(job.request.session) or _Session()
        donor, length = session.state, self._usable(session.state, tokens)
        if length == 0:
            donor, length = self._longest_shared(tokens)
            coming = (other.request.tokens for other in self._active if len(other.pending) > 1)
            if max((shared_length(other, tokens[:-1]) for other in coming), default=0) >= length + _WORTH_WAITING:
                return False
        if length == 0:
            session.state, length = self._begin(tokens)
            self.counters.shared += length
        elif donor is not session.state or length < len(donor.tokens):
            self.counters.shared += length if donor is not session.state else 0
            session.state = self._runner.fork(donor, length)
        session.seen = session.seen[: shared_length(session.seen, tokens)]
        self._sessions[job.request.session] = session
        self._sessions.move_to_end(job.request.session)
        job.session, job.pending = session, tokens[length:]
        return True

    def _begin(self, tokens: TokenArray) -> tuple[Any, int]:
        """A new state and its length: after what the trainer keeps of the tokens, where it has them under these weights."""
        length, layers = (0, []) if self._kept is None else self._kept(tokens[:-1])
        state = self._runner.take_over(tokens[:length], layers) if length else None
        return (self._runner.new(), 0) if state is None else (state, length)

    def _usable(self, state: Any, tokens: TokenArray) -> int:
        # the last token is always run: its logits are needed
        return 0 if state is None else self._runner.usable(state, tokens[:-1])

    def _longest_shared(self, tokens: TokenArray) -> tuple[Any, int]:
        states = [*(session.state for session in self._sessions.values()), *self._prompts.values()]
        best = max(states, key=lambda state: self._usable(state, tokens), default=None)
        return best, self._usable(best, tokens)

    def _evict(self) -> None:
        busy = [job.session for job in self._active]
        idle = [s for s in self._sessions.values() if s.state is not None and not any(s is b for b in busy)]
        for session in idle[: max(0, len(idle) + len(busy) - self.config.max_sessions)]:
            session.state = None

    # One step, in the thread.

    def _step(self) -> list[tuple[_Job, Finish]]:
        segments: list[Segment] = []
        ready: list[tuple[int, _Job]] = []
        budget = self.config.step_tokens
        for job in sorted(self._active, key=lambda job: len(job.pending)):
            take = self._stop_before_last(job, min(len(job.pending), budget))
            if take == 0:
                break
            segments.append(Segment(job.session.state, job.pending[:take]))
            self._count(job, take)
            job.pending = job.pending[take:]
            budget -= take
            if not len(job.pending):
                ready.append((len(segments) - 1, job))
        logits_RV = self._runner.run(segments)
        self.counters.steps += 1
        self._keep_prompts()
        return self._extend(logits_RV[[index for index, _ in ready]], [job for _, job in ready]) if ready else []

    def _stop_before_last(self, job: _Job, take: int) -> int:
        """Recurrent states can't be cut, so a prompt's is copied one token before its end, where group members can start."""
        first = len(job.pending) == len(job.request.tokens)
        return take - 1 if first and isinstance(self._runner, SerialRunner) and take == len(job.pending) > 1 else take

    def _keep_prompts(self) -> None:
        if not isinstance(self._runner, SerialRunner):
            return
        for job in self._active:
            state = job.session.state
            if len(job.pending) == 1 and not job.ids and state.tokens.tobytes() not in self._prompts:
                self._prompts[state.tokens.tobytes()] = self._runner.fork(state, len(state.tokens))
                while len(self._prompts) > _PROMPTS_KEPT:
                    self._prompts.popitem(last=False)

    def _count(self, job: _Job, take: int) -> None:
        session, start = job.session, len(job.session.state.tokens)
        self.counters.rerun += min(take, max(0, len(session.seen) - start))
        self.counters.input += take if not job.ids else 0
        if start + take > len(session.seen):
            session.seen = np.concatenate([session.state.tokens, job.pending[:take]])

    def _extend(self, logits_RV: torch.Tensor, jobs: list[_Job]) -> list[tuple[_Job, Finish]]:
        uniforms = [job.generator.random() for job in jobs]
        ids, behaviour = choose(logits_RV, [job.request.sampling for job in jobs], uniforms)
        finished: list[tuple[_Job, Finish]] = []
        for job, token, logp in zip(jobs, ids, behaviour, strict=True):
            job.ids.append(token)
            job.behaviour.append(logp)
            job.pending = np.array([token], np.int32)
            self.counters.sampled += 1
            if token in self._stop_ids:
                finished.append((job, "stop"))
            elif len(job.ids) == job.request.max_new_tokens:
                finished.append((job, "length"))
        return finished


def choose(logits_RV: torch.Tensor, samplings: list[Sampling], uniforms: list[float]) -> tuple[list[int], list[float]]:
    """Pick one token per row by its uniform number in [0, 1); gives ids and log-probabilities under the sampled distribution.

    Raises PolicyError where a row has NaN, or infinity as a logit.
    """
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    rows_RV = logits_RV.to(wide)
    if not torch.isfinite(rows_RV.amax(-1)).all():  # amax hands NaN on
        raise PolicyError("the model gave logits that are not finite; check its weights and dtype")
    temperature_R1 = torch.tensor([[s.temperature or 1.0] for s in samplings], dtype=wide, device=rows_RV.device)
    logp_RV = torch.log_softmax(rows_RV / temperature_R1, dim=-1)
    for row, sampling in enumerate(samplings):
        if sampling.temperature == 0.0:
            logp_RV[row] = _only(logp_RV[row], int(rows_RV[row].argmax()))
        elif sampling.top_p < 1.0:
            logp_RV[row] = _nucleus(logp_RV[row], sampling.top_p)
    total_RV = logp_RV.exp().cumsum(-1, dtype=torch.float64)
    targets_R1 = torch.tensor(uniforms, dtype=torch.float64, device=rows_RV.device)[:, None] * total_RV[:, -1:]
    ids_R1 = torch.searchsorted(total_RV, targets_R1, right=True).clamp(max=logp_RV.shape[1] - 1)
    return ids_R1[:, 0].tolist(), logp_RV.gather(1, ids_R1)[:, 0].tolist()


def _only(logp_V: torch.Tensor, token: int) -> torch.Tensor:
    point = torch.full_like(logp_V, -torch.inf)
    point[token] = 0.0
    return point


def _nucleus(logp_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of most likely tokens that holds at least top_p, renormalized (Holtzman et al. 2020)."""
    ordered, order = logp_V.sort(descending=True, stable=True)
    before = ordered.exp().cumsum(0) - ordered.exp()
    kept = order[before < top_p]
    nucleus = torch.full_like(logp_V, -torch.inf)
    nucleus[kept] = logp_V[kept] - torch.logsumexp(logp_V[kept], 0)
    return nucleus
