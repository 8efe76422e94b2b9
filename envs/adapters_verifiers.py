"""Tasksets of the `verifiers` package (v1 interface, 0.4 or later) as text environments: chats that end with a reply.

Idea: a taskset's tasks hold a prompt and score a trace. Where a task needs neither tools nor a machine, an episode is one reply:
we put prompt and reply into a trace of theirs and let the task score it, with all its rewards and weights. A task that needs more
is refused by name; its own harness would have to run it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from longstraw_agents.envs.adapters import HELDOUT_SEEDS, Adapter
from longstraw_agents.envs.tool_env import in_split
from longstraw_agents.envs.tools import event_loop
from longstraw_agents.errors import ConfigError, EnvironmentFault

SCORE_SECONDS = 120.0


class VerifiersText(Adapter):
    """A taskset, bounded or cut to `tasks`; success is a total reward of at least `success_at`.

    Tasks are told apart by their key: each belongs to the train or the held-out split, never to both. Raises ConfigError without
    the package, for a taskset without tasks in a split, and for tasks with tools, machines, or rewards that need one.
    """

    def __init__(self, taskset: Any, *, tasks: int | None = None, success_at: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        try:
            import verifiers.v1 as vf
        except ImportError as error:
            raise ConfigError("tasksets of verifiers need a package: pip install 'verifiers>=0.4'") from error
        if tasks is None and not taskset.bounded:
            raise ConfigError("this taskset has no end; pass tasks=, how many to take of it")
        self._vf, self._success_at = vf, success_at
        self._tasks: dict[str, list[Any]] = {"train": [], "heldout": []}
        for task in taskset if tasks is None else taskset.take(tasks):
            self._tasks["heldout" if in_split(task.key, "heldout") else "train"].append(task)
        self._task: Any = None

    def begin(self, seed: int, split: str) -> str:
        """The task's prompt."""
        chosen = self._tasks[split]
        if not chosen:
            raise ConfigError(f"the taskset has no task in split {split}; it needs more tasks")
        index = int(np.random.default_rng(seed % HELDOUT_SEEDS).integers(len(chosen)))
        self._task = chosen[index]
        if type(self._task).NEEDS_CONTAINER or type(self._task).toolsets(self._task.config):
            raise ConfigError(f"{type(self._task).__name__} needs tools or a container; its own harness must run it")
        data = self._task.data
        return f"{data.system_prompt}\n\n{data.prompt_text}" if data.system_prompt else str(data.prompt_text)

    def advance(self, action: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        """Grade the answer; there is one turn."""
        trace = self._trace(action)
        scored = asyncio.run_coroutine_threadsafe(self._task.score(trace), event_loop())
        try:
            scored.result(SCORE_SECONDS)
        except TimeoutError:
            scored.cancel()
            raise EnvironmentFault(f"scoring took longer than {SCORE_SECONDS:g} s") from None
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing or not trace.rewards:
            raise EnvironmentFault(f"the task gave no value for its rewards {missing or '(it has none without a machine)'}")
        total = sum(reward.value for reward in trace.rewards.values())
        return "", total, True, {"success": total >= self._success_at}

    def _trace(self, reply: str) -> Any:
        """Their record of this episode: prompt messages, then the reply as what the model sampled."""
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.trace import AgentInfo
        from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

        data = self._task.data
        messages: list[Any] = [SystemMessage(content=data.system_prompt)] if data.system_prompt else []
        messages += [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
        messages.append(AssistantMessage(content=reply))
        nodes = [
            MessageNode(parent=number - 1 if number else None, message=message, sampled=number == len(messages) - 1)
            for number, message in enumerate(messages)
        ]
        described = self._vf.TraceTask(type=type(self._task).__name__, data=data, key=self._task.key)
        return self._vf.Trace(task=described, agent=AgentInfo(config=self._vf.AgentConfig()), nodes=nodes)
