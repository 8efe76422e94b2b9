"""Tools from an MCP server, over stdio or HTTP, through the official SDK (`pip install mcp`, 2.0 or later).

Idea: a connection lives in the event loop of async tools; each of the server's tools becomes a `Tool` with the server's own
schema, so that an environment can't tell it from a function: same limits on time and output, errors as observations. A server
that is started here (stdio) also has its memory bound. Its results may change, so a restored episode takes the recorded ones.
What a server sends is bounded before it is kept: a message beyond MESSAGE_BYTES ends the connection.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from longstraw_agents.envs.tools import Tool, ToolLimits, event_loop
from longstraw_agents.errors import ConfigError, EnvironmentFault, ToolFault
from longstraw_agents.redaction import hide

CONNECT_SECONDS = 30.0
MESSAGE_BYTES = 16 * 2**20

#: Stands between a stdio server and the SDK, which would keep a line of any length.
_RELAY = """
import subprocess, sys
most = int(sys.argv[1])
server = subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE)
while line := server.stdout.readline(most):
    if len(line) == most:
        server.kill()
        sys.exit(f"the MCP server sent a message of more than {most} bytes; it was ended")
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
sys.exit(server.wait())
"""


class MCPServer:
    """A connection to one server: `with MCPServer("http://localhost:8000/mcp") as server: MyEnv(tools=server.tools)`.

    server: a URL (streamable HTTP), or the command line of a stdio server. `variables` and `secrets` are added to the command's
    environment, which otherwise holds only what the SDK passes on; the values of `secrets` never reach store, receipts, logs or
    observations. Raises ConfigError without the SDK or for a secret too short to hide, EnvironmentFault where the server can't
    be reached.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        limits: ToolLimits | None = None,
        variables: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        for secret in (secrets or {}).values():
            hide(secret)
        self._limits = limits or ToolLimits()
        self._server = server
        self._variables = {**(variables or {}), **(secrets or {})}
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
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._open(stack))
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

    async def _open(self, stack: AsyncExitStack) -> Any:
        try:
            from mcp import Client
            from mcp.client.stdio import StdioServerParameters, stdio_client
            from mcp.client.streamable_http import streamable_http_client
        except ImportError as error:
            raise ConfigError("tools of MCP servers need the official SDK: pip install 'mcp>=2'") from error
        if isinstance(self._server, str):
            http = await stack.enter_async_context(_bounded_http())
            return Client(streamable_http_client(self._server, http_client=http))
        command = list(self._server)
        if prlimit := shutil.which("prlimit"):
            command = [prlimit, f"--data={self._limits.memory_mb * 2**20}", "--core=0", "--", *command]
        command = [sys.executable, "-I", "-c", _RELAY, str(MESSAGE_BYTES), *command]
        started = StdioServerParameters(command=command[0], args=command[1:], env=self._variables or None)
        return Client(stdio_client(started))

    async def _list(self, client: Any) -> list[Tool]:
        found: list[Tool] = []
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            for each in page.tools:
                schema = dict(each.input_schema)
                if not isinstance(schema.get("properties", {}), dict):
                    raise EnvironmentFault(f"the server's tool {each.name!r} has a schema whose properties are no object")
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


def _bounded_http() -> Any:
    """A client whose answers to a request end in an error beyond MESSAGE_BYTES."""
    import httpx2  # what the SDK speaks HTTP with

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for piece in self._stream:
                size += len(piece)
                if size > MESSAGE_BYTES:
                    raise httpx2.ReadError(f"the MCP server sent more than {MESSAGE_BYTES} bytes")
                yield piece

        async def aclose(self) -> None:
            await self._stream.aclose()

    class Transport(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            response = await super().handle_async_request(request)
            if response.headers.get("content-encoding", "identity") != "identity":  # a few bytes could become very many
                raise httpx2.ReadError("the MCP server sent compressed data, which was not asked for")
            if request.method == "POST":  # the other kind, GET, stays open as long as the connection
                response.stream = Bounded(response.stream)
            return response

    timeout = httpx2.Timeout(CONNECT_SECONDS, read=300.0)
    return httpx2.AsyncClient(transport=Transport(), timeout=timeout, headers={"Accept-Encoding": "identity"})


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
