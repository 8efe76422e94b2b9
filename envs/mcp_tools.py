"""Tools from an MCP server, over stdio or HTTP, through the official SDK (`pip install mcp`, 2.0 or later).

Idea: a connection lives in the event loop of async tools; each of the server's tools becomes a `Tool` with the server's own
schema, so that an environment can't tell it from a function: same limits on time and output, errors as observations. A server
that is started here (stdio) also has its memory bound. Its results may change, so a restored episode takes the recorded ones.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from types import TracebackType
from typing import Any, Self

from longstraw_agents.envs.tools import Tool, ToolLimits, event_loop
from longstraw_agents.errors import ConfigError, EnvironmentFault, ToolFault

CONNECT_SECONDS = 30.0


class MCPServer:
    """A connection to one server: `with MCPServer("http://localhost:8000/mcp") as server: MyEnv(tools=server.tools)`.

    server: a URL (streamable HTTP), or the command line of a stdio server. `variables` are added to the command's environment,
    which otherwise holds only what the SDK passes on. Raises ConfigError without the SDK, EnvironmentFault where the server
    can't be reached.
    """

    def __init__(
        self, server: str | Sequence[str], *, limits: ToolLimits | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        self._limits = limits or ToolLimits()
        self._server = server
        self._variables = dict(variables or {})
        self._client: Any = None
        self._closing: asyncio.Event | None = None
        self._task: Any = None
        self.tools: list[Tool] = []

    def __enter__(self) -> Self:
        ready: asyncio.Future[list[Tool]] | None = None

        async def begin() -> list[Tool]:
            nonlocal ready
            ready = asyncio.get_running_loop().create_future()
            self._closing = asyncio.Event()
            self._task = asyncio.create_task(self._hold(ready))
            return await asyncio.wait_for(asyncio.shield(ready), CONNECT_SECONDS)

        try:
            self.tools = _wait(begin(), CONNECT_SECONDS + 5)
        except ConfigError:
            raise
        except Exception as error:  # the SDK raises groups of many kinds
            self.close()
            raise EnvironmentFault(f"the MCP server {self._server!r} can't be reached: {_reason(error)}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and the process of a stdio server."""

        async def end() -> None:
            if self._closing is not None:
                self._closing.set()
            if self._task is not None:
                done, waiting = await asyncio.wait([self._task], timeout=5)
                for task in waiting:
                    task.cancel()

        if self._task is not None:
            _wait(end(), 10)
            self._task = None

    async def _hold(self, ready: asyncio.Future[list[Tool]]) -> None:
        """Open the connection, list the tools, and stay until closed: the SDK wants to leave in the task that entered."""
        try:
            async with self._open() as client:
                self._client = client
                ready.set_result(await self._list(client))
                assert self._closing is not None
                await self._closing.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error if isinstance(error, Exception) else EnvironmentFault("the connection was cancelled"))
        finally:
            self._client = None

    def _open(self) -> Any:
        try:
            from mcp import Client
            from mcp.client.stdio import StdioServerParameters
        except ImportError as error:
            raise ConfigError("tools of MCP servers need the official SDK: pip install 'mcp>=2'") from error
        if isinstance(self._server, str):
            return Client(self._server)
        command = list(self._server)
        if prlimit := shutil.which("prlimit"):
            command = [prlimit, f"--data={self._limits.memory_mb * 2**20}", "--core=0", "--", *command]
        return Client(StdioServerParameters(command=command[0], args=command[1:], env=self._variables or None))

    async def _list(self, client: Any) -> list[Tool]:
        found: list[Tool] = []
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            for each in page.tools:
                schema = dict(each.input_schema)
                call = self._caller(each.name)
                found.append(Tool(each.name, each.description or each.name, schema, call, None, self._limits, repeatable=False))
            cursor = page.next_cursor
            if not cursor:
                return found

    def _caller(self, name: str) -> Callable[..., Coroutine[Any, Any, str]]:
        async def call(**arguments: Any) -> str:
            if self._client is None:
                raise ToolFault(f"{name} can't be called: the connection to its server is closed")
            result = await self._client.call_tool(name, arguments, read_timeout_seconds=self._limits.seconds)
            text = "\n".join(_shown(item) for item in result.content)
            if result.is_error:
                raise ToolFault(text or f"{name} failed")
            return text

        return call


def _shown(item: Any) -> str:
    """A piece of a result as text; what is no text is named with its type and size."""
    text = getattr(item, "text", None)
    if isinstance(text, str):
        return text
    return f"[{item.type}: {len(getattr(item, 'data', '') or '')} characters not shown]"


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:300]


def _wait(coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
    try:
        return future.result(seconds)
    except FutureTimeout:
        future.cancel()
        raise
