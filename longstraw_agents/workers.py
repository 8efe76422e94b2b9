"""Environments in other processes, spread over a Ray cluster.

Idea: a host is a Ray actor that holds many environments. Here each episode has a stand-in that passes `reset` and `step` on and
waits; it is called from a thread, as any environment is. The policy, the store and the episodes' logic stay in this process. A
host that dies is restarted by Ray, empty; its episodes fail, and are tried again from what the store holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import gymnasium

from longstraw_agents.episodes import Make
from longstraw_agents.errors import ConfigError, EnvironmentFault
from longstraw_agents.types import Task, ToolCall


class _Host:
    """The actor: environments by number."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._environments: dict[int, gymnasium.Env[str, str]] = {}

    def open(self, number: int, task: Task) -> None:
        """Make the environment of a task under a number."""
        self._environments[number] = self._make(task)

    def call(self, number: int, method: str, arguments: dict[str, Any]) -> Any:
        """Call a method of an environment."""
        if number not in self._environments:
            raise EnvironmentFault("the host was restarted and has lost this environment")
        if method == "expect":  # not of gymnasium's interface: wrappers do not pass it on, and not every environment has it
            found = getattr(self._environments[number].unwrapped, method, None)
            return None if found is None else found(**arguments)
        return getattr(self._environments[number], method)(**arguments)

    def close(self, number: int) -> None:
        """Close an environment and forget it."""
        environment = self._environments.pop(number, None)
        if environment is not None:
            environment.close()


class RayWorkers:
    """`count` hosts; as a context manager it starts a local cluster where no address is given, and stops what it started."""

    def __init__(self, make: Make, address: str | None, count: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("workers ray needs the package ray: pip install 'longstraw-agents[ray]'") from error
        self._ray = ray
        self._started = not ray.is_initialized()
        if self._started:
            ray.init(address=address, include_dashboard=False, log_to_driver=False, configure_logging=False)
        host = ray.remote(max_restarts=-1)(_Host)
        self._hosts = [host.options(num_cpus=0).remote(make) for _ in range(count)]
        self._numbers = itertools.count()

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for host in self._hosts:
            self._ray.kill(host)
        if self._started:
            self._ray.shutdown()

    def make(self, task: Task) -> gymnasium.Env[str, str]:
        """The stand-in of a new environment on one of the hosts, in turns."""
        number = next(self._numbers)
        host = self._hosts[number % len(self._hosts)]
        # Repeated while the host is being restarted: making an environment a second time does no harm, a step would.
        self._ray.get(host.open.options(max_task_retries=-1).remote(number, task))
        return _Distant(self._ray, host, number)


class _Distant(gymnasium.Env[str, str]):
    """Stands in for an environment on a host."""

    def __init__(self, ray: Any, host: Any, number: int) -> None:
        self._ray, self._host, self._number = ray, host, number

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """As the environment's, on its host."""
        observation, info = self._call("reset", seed=seed, options=options)
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """As the environment's, on its host."""
        observation, reward, terminated, truncated, info = self._call("step", action=action)
        return observation, reward, terminated, truncated, info

    def expect(self, calls: Sequence[ToolCall]) -> None:
        """As the environment's, on its host."""
        self._call("expect", calls=list(calls))

    def close(self) -> None:
        """Close the environment on its host."""
        self._ray.get(self._host.close.remote(self._number))

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._ray.get(self._host.call.remote(self._number, method, arguments))
