"""Tools: typed Python functions that a policy may call.

Idea: a function's signature and docstring say all that a caller needs, so the JSON schema is made from them, arguments are
checked against it (pydantic), and whatever goes wrong comes back as text that the policy can read. A tool never ends a run.

Vocabulary
    tool      a named function with a JSON schema of its parameters and limits
    limits    seconds a call may take, characters of output that are kept, megabytes (isolated tools only)
    outcome   what one call came to: a result or an error, and the seconds it took
    isolated  runs in a process of its own inside the sandbox, not in the environment's process (see `isolation`)
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import functools
import inspect
import json
import re
import threading
import time
import types
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import pydantic

from longstraw_agents.envs import heap
from longstraw_agents.errors import ConfigError, ToolFault

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_PARAMETER = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


heap.share()  # before the first thread of a tool begins

_LARGE_CHARS = 1_000_000  # results from which on memory is given back at once
_ASYNC_SECONDS = 0.5  # what an async tool may take to be cancelled


@dataclass(frozen=True)
class ToolLimits:
    """What one call may use. `memory_mb` binds isolated and sandboxed tools; Python in this process can't be bound."""

    seconds: float = 10.0
    output_chars: int = 8192
    memory_mb: int = 512

    def __post_init__(self) -> None:
        for name in ("seconds", "output_chars", "memory_mb"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"tool limit {name} is {getattr(self, name)}; give a number above 0")


@dataclass(frozen=True)
class Outcome:
    """What one call came to: `result` or `error` is a text, the other is None."""

    result: str | None
    error: str | None
    seconds: float


@dataclass(frozen=True)
class Tool:
    """A named function with a schema. Used as a class attribute it binds like a method."""

    name: str
    description: str
    schema: Mapping[str, Any]
    function: Callable[..., Any]
    arguments_model: type[pydantic.BaseModel] | None = None
    limits: ToolLimits = ToolLimits()
    isolated: bool = False
    repeatable: bool = True  # False: a restored episode takes the recorded result instead of calling again

    def __get__(self, instance: object | None, owner: type | None = None) -> Tool:
        if instance is None or not _takes_self(self.function):
            return self
        return dataclasses.replace(self, function=types.MethodType(self.function, instance))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI-compatible servers expect it."""
        described = {"name": self.name, "description": self.description, "parameters": dict(self.schema)}
        return {"type": "function", "function": described}

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as typed values. Raises ToolFault with an explanation that a policy can act on."""
        if self.arguments_model is None:  # a tool of somebody else's: its server checks
            return dict(arguments)
        try:
            model = self.arguments_model.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()[:5])
            raise ToolFault(f"bad arguments for {self.name}: {faults}. Parameters: {_outline(self.schema)}") from None
        return {name: getattr(model, name) for name in type(model).model_fields}

    def run(self, arguments: Mapping[str, Any]) -> Outcome:
        """Check the arguments, call the function within its limits, and give its output as text. Never raises."""
        started = time.perf_counter()
        try:
            checked = self.check(arguments)
            if self.isolated:
                from longstraw_agents.envs.isolation import call_isolated

                text = call_isolated(self.function, dict(arguments), self.limits)
            else:
                text = bounded_call(functools.partial(self.function, **checked), self.name, self.limits)
            error = None
        except ToolFault as fault:
            text, error = None, clip(str(fault), max(1000, self.limits.output_chars))
        except Exception as fault:  # whatever a tool raises is something for the policy to read
            text, error = None, clip(describe(fault), max(1000, self.limits.output_chars))
        return Outcome(text, error, time.perf_counter() - started)


def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    limits: ToolLimits | None = None,
    isolated: bool = False,
) -> Any:
    """Make a tool of a typed function or method, sync or async; its docstring describes it to the policy.

    Parameters are described in an `Args:` section. Raises ConfigError where a parameter has no type annotation, where there
    is no docstring, or where an isolated tool is not a module-level function.
    """
    if function is None:
        return functools.partial(tool, name=name, limits=limits, isolated=isolated)
    label = name or function.__name__
    summary, described = _parse_docstring(inspect.getdoc(function) or "")
    if not summary:
        raise ConfigError(f"tool {label} has no docstring; say in one what it does: the policy reads it")
    if isolated and (_takes_self(function) or "<locals>" in function.__qualname__):
        raise ConfigError(f"tool {label} is isolated, so it must be a module-level function: another process imports it")
    model = _arguments_model(function, label, described)
    return Tool(label, summary, _schema(model), function, model, limits or ToolLimits(), isolated)


def as_text(value: Any) -> str:
    """A tool's return value as text: strings as they are, None as "done", the rest as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return "done"
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are no strings, circles, depth
        return str(value)


def describe(error: BaseException) -> str:
    """The type and message of an error, also of one that can't say its message."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # a tool's own class of error
        return type(error).__name__


def clip(text: str, limit: int) -> str:
    """`text`, or its first and last characters with a note between them where it is longer than `limit`."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail:]}"


def _takes_self(function: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(function).parameters), None) == "self"


def _arguments_model(
    function: Callable[..., Any], label: str, described: Mapping[str, str]
) -> type[pydantic.BaseModel]:
    hints = inspect.get_annotations(function, eval_str=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"tool {label}: parameter {parameter.name} must be a plain named one (no *args, **kwargs or /)")
        if parameter.name not in hints:
            raise ConfigError(f"tool {label}: parameter {parameter.name} has no type; annotate it, the schema is made from it")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (
            hints[parameter.name],
            pydantic.Field(default=default, description=described.get(parameter.name)),
        )
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False, protected_namespaces=())
    try:
        return pydantic.create_model(f"{label}_arguments", __config__=config, **fields)
    except (pydantic.PydanticUserError, NameError, TypeError) as error:
        raise ConfigError(f"tool {label}: no JSON schema can be made from its signature: {error}") from error


def _schema(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    return _without_titles(model.model_json_schema())


def _without_titles(node: Any, *, names: bool = False) -> Any:
    # pydantic titles every field; in a prompt they are only tokens. `names`: the keys are parameter names, "title" among them
    if isinstance(node, dict):
        return {
            key: _without_titles(value, names=key in ("properties", "$defs") and not names)
            for key, value in node.items()
            if names or not (key == "title" and isinstance(value, str))
        }
    return [_without_titles(item) for item in node] if isinstance(node, list) else node


def _outline(schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required", ()))
    parts = [
        f"{name} ({spec.get('type', 'any')}{'' if name in required else ', optional'})"
        for name, spec in schema.get("properties", {}).items()
    ]
    return ", ".join(parts) or "none"


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description before the first section, and each parameter's text from `Args:`."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, current = "", ""
    for line in text.splitlines():
        if heading := _SECTION.match(line.strip()):
            section, current = heading[1], ""
        elif not section:
            summary.append(line.strip())
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            if entry := _PARAMETER.match(line.strip()):
                current, described[entry[1]] = entry[1], entry[2]
            elif current:
                described[current] += " " + line.strip()
    return " ".join(part for part in summary if part), described


class _Expired(BaseException):
    """Raised inside a tool's thread when its time is up; a BaseException so that `except Exception` lets it through."""


def bounded_call(call: Callable[[], Any], name: str, limits: ToolLimits) -> str:
    """Run in a thread and give up on it when its time is up: pure Python is stopped, a blocking system call is abandoned.

    The result becomes text in that thread too: an object of the tool's may take long to say what it is.
    """
    box: list[str | BaseException] = []
    is_async = inspect.iscoroutinefunction(call.func if isinstance(call, functools.partial) else call)

    def target() -> None:
        try:
            value = _call_async(call, name, limits.seconds) if is_async else call()
            text = as_text(value)
            box.append(clip(text, limits.output_chars))
            if len(text) > _LARGE_CHARS:
                del value, text
                heap.give_back()
        except BaseException as error:  # handed to the caller below, whatever it is
            box.append(error)

    thread = threading.Thread(target=target, daemon=True, name=f"tool-{name}")
    thread.start()
    thread.join(limits.seconds + (_ASYNC_SECONDS if is_async else 0.0))
    if not box:
        _stop(thread)
        raise ToolFault(f"{name} took longer than {limits.seconds:g} s and was stopped")
    outcome = box[0]
    if isinstance(outcome, str):
        return outcome
    if isinstance(outcome, Exception):
        raise outcome
    raise ToolFault(f"{name} ended with {describe(outcome)}")


def _stop(thread: threading.Thread) -> None:
    """Raise _Expired in the thread until it ends; give up on one that hangs in a system call after half a second."""
    for _ in range(25):  # once is not enough: Python ignores exceptions in some places, as in a weak reference's callback
        if thread.ident is None or not thread.is_alive():
            return
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Expired))
        thread.join(0.02)


def _call_async(call: Callable[[], Any], name: str, seconds: float) -> Any:
    future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(call(), seconds), event_loop())
    try:
        return future.result(seconds + _ASYNC_SECONDS)
    except (TimeoutError, FutureTimeout):
        future.cancel()
        raise ToolFault(f"{name} took longer than {seconds:g} s and was stopped") from None


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The one loop of all async tools, in a thread of its own: `step` may itself be called from a running loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="async-tools").start()
    return loop
