"""Isolated tools: a module-level function that runs in a process of its own inside the sandbox.

Idea: the other process gets the function's module read-only, the arguments as JSON on stdin, and gives the result as JSON in a
file that it opened before the tool's code was loaded. What the tool prints goes nowhere, so it can't be taken for a result. The
sandbox binds time, memory, processes and disk; it costs a process start, about 0.2 s.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from longstraw_agents.envs.sandbox import Sandbox, SandboxConfig, remove
from longstraw_agents.envs.tools import Tool, ToolLimits, as_text, clip, describe
from longstraw_agents.errors import SandboxError, ToolFault

_START = """
import json, os, sys
result = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(os.open("/dev/null", os.O_WRONLY), 1); os.dup2(1, 2)
order = json.load(sys.stdin)
sys.path[:0] = order["path"]
from longstraw_agents.envs.isolation import work
json.dump(work(order), result)
result.flush(); os._exit(0)
"""


def call_isolated(function: Callable[..., Any], arguments: Mapping[str, Any], limits: ToolLimits) -> str:
    """Run the tool's function with these arguments in the sandbox and give its result as text.

    Raises ToolFault where it fails or passes a limit, SandboxError where there is no sandbox.
    """
    source = Path(sys.modules[function.__module__].__file__ or "")
    if not source.is_file():
        raise SandboxError(f"tool {function.__name__} is isolated, but its module {function.__module__} has no file to load")
    order = {
        "source": str(source.resolve()), "name": function.__qualname__, "arguments": arguments, "path": _search_path(),
        "characters": limits.output_chars,
    }  # fmt: skip
    readable = sorted({str(source.resolve()), *_readable()})
    config = SandboxConfig(
        seconds=limits.seconds, memory_mb=limits.memory_mb, output_bytes=max(1_048_576, 8 * limits.output_chars)
    )
    sandbox = Sandbox(Path(tempfile.mkdtemp(prefix="longstraw-tool-")), config)
    try:
        sandbox.own()
        command = [sys.executable, "-I", "-c", _START]
        done = sandbox.run(command, stdin=json.dumps(order).encode(), readable=[Path(each) for each in readable])
    finally:
        remove(sandbox.folder)
    if done.stopped:
        raise ToolFault(f"{function.__name__} was stopped: it passed its limit on {done.stopped}")
    try:
        answer = json.loads(done.output)
        value, error = answer.get("value"), answer.get("error")
    except (ValueError, RecursionError, AttributeError):  # it wrote something else, or died before it could
        value = error = None
    if isinstance(value, str):
        return value
    raise ToolFault(str(error) if error else f"{function.__name__} ended with status {done.status} and gave no result")


def work(order: Mapping[str, Any]) -> dict[str, Any]:
    """The other process's side: load the module from its file, call the function, give {"value"} or {"error"}."""
    import asyncio
    import importlib.util
    import inspect

    try:
        spec = importlib.util.spec_from_file_location("isolated_tool", order["source"])
        if spec is None or spec.loader is None:
            return {"error": f"{order['source']} can't be loaded as a module"}
        module = importlib.util.module_from_spec(spec)
        sys.modules["isolated_tool"] = module
        spec.loader.exec_module(module)
        found = getattr(module, order["name"])
        call = found.check(order["arguments"]) if isinstance(found, Tool) else order["arguments"]
        value = found(**call)
        value = asyncio.run(value) if inspect.iscoroutine(value) else value
        return {"value": clip(as_text(value), order["characters"])}
    except Exception as fault:  # whatever a tool raises is something for the policy to read
        return {"error": clip(describe(fault), max(1000, order["characters"]))}


def _search_path() -> list[str]:
    """Where installed packages lie; not the folder that the user works in."""
    ours = str(Path(__file__).resolve().parent.parent)
    installed = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    return [*installed, str(_package_root()), ours]


def _package_root() -> Path:
    import longstraw_agents

    return Path(longstraw_agents.__file__).parent.parent


def _readable() -> set[str]:
    """Host paths that Python needs: the interpreter, installed packages, and this package with its linked folders."""
    import longstraw_agents

    package = Path(longstraw_agents.__file__).parent
    linked = {str((package / name).resolve()) for name in ("envs", "storage", "trainer")}
    prefixes = {sys.prefix, sys.base_prefix, str(Path(sys.executable).parent.parent)}
    paths = {*prefixes, *linked, str(package), *_search_path()[:-2]}
    return {path for path in paths if Path(path).exists() and not path.startswith("/usr/") and path != "/usr"}
