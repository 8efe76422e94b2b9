"""A judge for rubrics made of any policy: the local model, a vLLM server, or an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import itertools

from longstraw_agents.envs.tools import event_loop
from longstraw_agents.policies import Policy, SampleRequest
from longstraw_agents.rendering import Renderer
from longstraw_agents.types import Message


class PolicyJudge:
    """Call it with a prompt, get the policy's reply; for `envs.rubric.Rubric(judge=...)`. One session per question."""

    def __init__(self, policy: Policy, renderer: Renderer, *, max_new_tokens: int = 256, seconds: float = 120.0) -> None:
        self._policy, self._renderer = policy, renderer
        self._max_new_tokens, self._seconds = max_new_tokens, seconds
        self._numbers = itertools.count()

    def __call__(self, prompt: str) -> str:
        """The reply's text. Raises what the policy raises, and TimeoutError after `seconds`."""
        return asyncio.run_coroutine_threadsafe(self._ask(prompt), event_loop()).result(self._seconds)

    async def _ask(self, prompt: str) -> str:
        number = next(self._numbers)
        session = f"judge-{number}"
        tokens = self._renderer.first([Message("user", prompt)]).ids
        try:
            sample = await self._policy.sample(SampleRequest(session, tokens, self._max_new_tokens, seed=number))
        finally:
            await self._policy.close_session(session)
        return self._renderer.text(sample.ids)
