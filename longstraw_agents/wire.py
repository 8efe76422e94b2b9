"""The two interfaces of OpenAI's API as this project speaks them: requests into entries, replies into JSON and events.

Idea: both interfaces say the same in different shapes, so both become one list of entries. Fields that change what is sampled and
that a policy here can't honour are refused by name; fields that don't are let through.

Sources: the API's reference for `POST /v1/chat/completions` and `POST /v1/responses`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longstraw_agents.errors import ConfigError
from longstraw_agents.policies.sampling import Sampling
from longstraw_agents.recorder import Reply
from longstraw_agents.transcripts import Call, Entry

#: Fields whose only accepted values are these (None is always accepted): anything else would change the distribution.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "stop": ([],),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}),
    "modalities": (["text"],),
    "audio": (),
    "background": (False,),
}


@dataclass(frozen=True)
class Asked:
    """A request: its entries, limit of tokens (None: the server's), whether it wants events, and which of its sampling settings
    are not the run's. Those are overruled, not followed: what is trained must be the distribution that was sampled."""

    entries: tuple[Entry, ...]
    max_tokens: int | None
    stream: bool
    overruled: tuple[str, ...]


def chat_request(body: Mapping[str, Any], sampling: Sampling) -> Asked:
    """Read the body of a chat completion request; `sampling`: the run's.

    Raises ConfigError for what can't be honoured or understood.
    """
    if not isinstance(body.get("messages"), list):
        raise ConfigError("the request has no list of messages")
    tools = [tool.get("function", {}) for tool in body.get("tools") or [] if tool.get("type") == "function"]
    entries = [_chat_entry(message) for message in body["messages"]]
    return _asked(body, [*_tools(tools), *entries], sampling, body.get("max_completion_tokens") or body.get("max_tokens"))


def _chat_entry(message: Mapping[str, Any]) -> Entry:
    role = {"developer": "system"}.get(message.get("role", ""), message.get("role", ""))
    if role not in ("system", "user", "assistant", "tool"):
        raise ConfigError(f"a message's role must be system, developer, user, assistant or tool, got {role!r}")
    called = [call["function"] for call in message.get("tool_calls") or []]
    calls = tuple(Call.of(call["name"], call.get("arguments")) for call in called)
    return Entry(role, _text(message.get("content")), calls)


def responses_request(body: Mapping[str, Any], earlier: Sequence[Entry], sampling: Sampling) -> Asked:
    """Read the body of a responses request; `earlier`: the entries that its previous_response_id stands for."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise ConfigError("the request's input must be a text or a list of items")
    entries = [Entry("system", body["instructions"])] if body.get("instructions") else []
    entries += [entry for entry in earlier if entry.role != "tools"]
    for item in items:
        entry = _responses_entry(item)
        if entry is None:
            continue
        if entry.role == "assistant" and entries and entries[-1].role == "assistant":  # one answer, several items
            last = entries.pop()
            entry = Entry("assistant", last.content + entry.content, last.calls + entry.calls)
        entries.append(entry)
    tools = [tool for tool in body.get("tools") or [] if tool.get("type") == "function"]
    return _asked(body, [*_tools(tools), *entries], sampling, body.get("max_output_tokens"))


def _responses_entry(item: Mapping[str, Any]) -> Entry | None:
    kind = item.get("type", "message")
    if kind == "message":
        return _chat_entry(item)
    if kind == "function_call":
        return Entry("assistant", "", (Call.of(item["name"], item.get("arguments")),))
    if kind == "function_call_output":
        return Entry("tool", _text(item.get("output")))
    if kind == "reasoning":
        return None
    raise ConfigError(f"items of type {kind!r} are not understood here; message, function_call and function_call_output are")


def _asked(body: Mapping[str, Any], entries: list[Entry], sampling: Sampling, max_tokens: int | None) -> Asked:
    for name, accepted in _NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in accepted and not (name == "text" and set(value) <= {"verbosity"}):
            raise ConfigError(f"{name}={value!r} would change what is sampled and is not supported; leave it out")
    hosted = [tool.get("type") for tool in body.get("tools") or [] if tool.get("type") != "function"]
    if hosted:
        raise ConfigError(f"tools of type {', '.join(map(str, hosted))} do not exist here; only function tools do")
    settings = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    asked = {name: float(body[name]) for name in settings if body.get(name) is not None}
    overruled = tuple(f"{name}={value:g}" for name, value in asked.items() if value != settings[name])
    return Asked(tuple(entries), max_tokens, bool(body.get("stream")), overruled)


def _tools(definitions: Sequence[Mapping[str, Any]]) -> list[Entry]:
    shown = [
        {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool.get("parameters") or {}}
        for tool in definitions
    ]
    return [Entry("tools", "\n".join(json.dumps(tool, ensure_ascii=False) for tool in shown))] if shown else []


def _text(content: Any) -> str:
    """The text of a message's content, which may be a list of typed parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise ConfigError(f"content of type {part.get('type')!r} is not understood here; text is")
        parts.append(part["text"])
    return "".join(parts)


def chat_reply(reply: Reply, identity: str, model: str) -> dict[str, Any]:
    """A chat completion."""
    choice = {"index": 0, "message": _chat_message(reply, identity), "finish_reason": _finish(reply), "logprobs": None}
    usage = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.action_tokens}
    usage["total_tokens"] = sum(usage.values())
    made = {"id": identity, "object": "chat.completion", "created": int(time.time()), "model": model}
    return {**made, "choices": [choice], "usage": usage}


def chat_events(reply: Reply, identity: str, model: str, *, with_usage: bool) -> Iterator[str]:
    """The same as server-sent events: the message in one piece, its end, and the end of the stream."""
    whole = chat_reply(reply, identity, model)
    head = {**whole, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    delta = whole["choices"][0]["message"]
    for index, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = index
    for piece, finish in ((delta, None), ({}, _finish(reply))):
        yield _event({**head, "choices": [{"index": 0, "delta": piece, "finish_reason": finish, "logprobs": None}]})
    if with_usage:
        yield _event({**head, "choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _chat_message(reply: Reply, identity: str) -> dict[str, Any]:
    calls = [
        {"id": f"call_{identity}_{index}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for index, call in enumerate(reply.entry.calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": reply.entry.content or (None if calls else "")}
    return {**message, "tool_calls": calls} if calls else message


def _finish(reply: Reply) -> str:
    return "length" if reply.finish == "length" else "tool_calls" if reply.entry.calls else "stop"


def responses_reply(reply: Reply, identity: str, model: str, body: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
    """A response object."""
    cut = reply.finish == "length"
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.action_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.action_tokens,
    }
    return {
        "id": identity,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "output": _items(reply, identity),
        "parallel_tool_calls": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "previous_response_id": body.get("previous_response_id"),
        "usage": usage,
    }


def _items(reply: Reply, identity: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.entry.content or not reply.entry.calls:
        content = [{"type": "output_text", "text": reply.entry.content, "annotations": [], "logprobs": []}]
        items.append({"type": "message", "id": f"msg_{identity}", "role": "assistant", "status": "completed", "content": content})
    for index, call in enumerate(reply.entry.calls):
        names = {"id": f"fc_{identity}_{index}", "call_id": f"call_{identity}_{index}"}
        items.append({"type": "function_call", **names, "name": call.name, "arguments": call.arguments, "status": "completed"})
    return items


def responses_events(
    reply: Reply, identity: str, model: str, body: Mapping[str, Any], sampling: Sampling
) -> Iterator[str]:
    """The same as server-sent events, each item in one piece."""
    whole = responses_reply(reply, identity, model, body, sampling)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events = [("created", {"response": begun}), ("in_progress", {"response": begun})]
    for index, item in enumerate(whole["output"]):
        events += _item_events(index, item)
    events.append((whole["status"], {"response": whole}))
    for number, (name, data) in enumerate(events):
        kind = f"response.{name}"
        yield f"event: {kind}\n{_event({'type': kind, 'sequence_number': number, **data})}"


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    place, where = {"output_index": index}, {"output_index": index, "item_id": item["id"]}
    if item["type"] == "message":
        part, inside = item["content"][0], {**where, "content_index": 0}
        text = {**inside, "logprobs": []}
        yield "output_item.added", {**place, "item": {**item, "status": "in_progress", "content": []}}
        yield "content_part.added", {**inside, "part": {**part, "text": ""}}
        yield "output_text.delta", {**text, "delta": part["text"]}
        yield "output_text.done", {**text, "text": part["text"]}
        yield "content_part.done", {**inside, "part": part}
    else:
        yield "output_item.added", {**place, "item": {**item, "status": "in_progress", "arguments": ""}}
        yield "function_call_arguments.delta", {**where, "delta": item["arguments"]}
        yield "function_call_arguments.done", {**where, "name": item["name"], "arguments": item["arguments"]}
    yield "output_item.done", {**place, "item": item}


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
