"""Actions as text: the tool calls and the answer in them.

Idea: a policy's text is hostile input. Each call format is a small scanner over `str.find`, never a backtracking expression,
and every fault becomes a `ParsedCall` with an error that says how to write it right. Nothing here raises.

Formats (what model families write)
    tags      <tool_call>...</tool_call> around JSON (Hermes, Qwen), <function=..><parameter=..> (Qwen coder) or
              name<arg_key>..<arg_value>.. (GLM)
    fenced    ```json or ```tool_call around JSON
    mistral   [TOOL_CALLS] and a JSON list, or name[ARGS]{...}
    llama     <|python_tag|>{...}
    deepseek  <｜tool▁call▁begin｜>...<｜tool▁sep｜>...<｜tool▁call▁end｜>
    json      the whole action is one JSON object with a name
    python    a line that begins with NAME("value") or NAME(key=value), also in [...] (Llama 4)
What stands between <think> and </think> is never a call or an answer. The answer is what stands in <answer>...</answer>, or,
with `answer="text"`, the whole text of an action without calls.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from longstraw_agents.errors import ConfigError

MAX_DEPTH = 32  # of nested JSON: deeper values could overflow whoever walks them later
MAX_CALL_CHARS = 262_144


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


@dataclass(frozen=True)
class ParsedCall:
    """A call that was asked for. `error` is set where it could not be read; `name` is then what could be read of it."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    positional: tuple[Any, ...] = ()  # values without a name, for the parameters in their order


@dataclass(frozen=True)
class ParsedAction:
    """All calls of an action in order, its answer (None where it gives none), and the text without thinking."""

    calls: tuple[ParsedCall, ...]
    answer: str | None
    text: str


@dataclass(frozen=True)
class ParserConfig:
    """`formats` are tried in order; the first one that is found in the action reads it. `max_calls` binds one action."""

    formats: tuple[str, ...] = ("tags", "fenced", "json")
    max_calls: int = 8
    answer: Literal["tags", "text"] = "tags"

    def __post_init__(self) -> None:
        if self.answer not in ("tags", "text"):
            raise ConfigError(f"answer is {self.answer!r}; choose tags or text")
        unknown = [name for name in self.formats if name not in FORMATS]
        if unknown or not self.formats:
            raise ConfigError(f"unknown call formats {unknown or 'none'}; choose from {', '.join(FORMATS)}")
        if self.max_calls < 1:
            raise ConfigError(f"max_calls is {self.max_calls}; give at least 1")


def parse_action(action: str, config: ParserConfig | None = None) -> ParsedAction:
    """Read the calls and the answer of an action. Never raises; linear in the action's length."""
    config = config or ParserConfig()
    text = without_thinking(action)
    calls: list[ParsedCall] = []
    for name in config.formats:
        calls = FORMATS[name](text)
        if calls:
            break
    if len(calls) > config.max_calls:
        error = f"{len(calls)} calls in one turn; at most {config.max_calls} are run. Ask again for the rest."
        excess = ParsedCall("", error=error)
        calls = [*calls[: config.max_calls], excess]
    answer = _between(text, "<answer>", "</answer>")
    if answer is None and config.answer == "text" and not calls:
        answer = text.strip()
    return ParsedAction(tuple(calls), answer, text)


def without_thinking(action: str) -> str:
    """The action without its <think>...</think>; a thought that was never closed takes the rest with it."""
    if "</think>" not in action and "<think>" not in action:
        return action
    opened, closed = action.find("<think>"), action.find("</think>")
    if closed >= 0 and (opened < 0 or closed < opened):  # the prompt had opened it
        action = action[closed + len("</think>"):]
    kept: list[str] = []
    position = 0
    while (opened := action.find("<think>", position)) >= 0:
        kept.append(action[position:opened])
        closed = action.find("</think>", opened)
        if closed < 0:
            return "".join(kept)
        position = closed + len("</think>")
    kept.append(action[position:])
    return "".join(kept)


def _between(text: str, opening: str, closing: str) -> str | None:
    """What stands in the last complete pair of tags, stripped; also after a last opening tag that was never closed."""
    start = text.rfind(opening)
    if start < 0:
        return None
    start += len(opening)
    end = text.find(closing, start)
    return (text[start:] if end < 0 else text[start:end]).strip()


def _bodies(text: str, opening: str, closing: str) -> list[tuple[str, bool]]:
    """The text in each pair of tags, and whether it was closed."""
    found: list[tuple[str, bool]] = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            found.append((text[start:], False))
            break
        found.append((text[start:end], True))
        position = end + len(closing)
    return found


def read_json(text: str) -> tuple[Any, int, str | None]:
    """Read one JSON value at the start of `text`: (value, characters used, None), or (None, 0, what is wrong)."""
    stripped = text.lstrip()
    skipped = len(text) - len(stripped)
    if not stripped:
        return None, 0, "it is empty"
    if len(stripped) > MAX_CALL_CHARS:
        return None, 0, f"it has {len(stripped)} characters; at most {MAX_CALL_CHARS} are read"
    try:
        value, used = _DECODER.raw_decode(stripped)
    except RecursionError:
        return None, 0, "it is nested too deep"
    except json.JSONDecodeError as error:
        return None, 0, f"{error.msg} at character {error.pos}"
    except ValueError as error:  # NaN, a number too large to hold
        return None, 0, str(error)[:200]
    if _too_deep(value):
        return None, 0, f"it is nested deeper than {MAX_DEPTH}"
    return value, used + skipped, None


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for node in level
            if isinstance(node, (dict, list))
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True


def call_from_json(value: Any, form: str) -> ParsedCall:
    """The call that a JSON value means: {"name": ..., "arguments"|"parameters": {...}}, also wrapped in "function"."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return ParsedCall("", error=f"a call must be a JSON object, got {type(value).__name__}. Write {form}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ParsedCall("", error=f'the call has no "name". Write {form}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON inside a string
        arguments, _, fault = read_json(arguments)
        if fault:
            return ParsedCall(name, error=f"the arguments of {name} are not valid JSON: {fault}. Write {form}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ParsedCall(name, error=f"the arguments of {name} must be a JSON object. Write {form}")
    return ParsedCall(name, arguments)


def _calls_in_json(body: str, form: str, *, closed: bool = True) -> list[ParsedCall]:
    value, used, fault = read_json(body)
    if fault is None and body[used:].strip() and closed:
        fault = f"text after its end at character {used}"
    if fault:
        ending = "" if closed else " and the call was never closed"
        return [ParsedCall(_name_hint(body), error=f"the tool call is not valid JSON: {fault}{ending}. Write {form}")]
    if isinstance(value, list):
        if not value:
            return [ParsedCall("", error=f"the list of tool calls is empty. Write {form}")]
        return [call_from_json(item, form) for item in value]
    return [call_from_json(value, form)]


def _name_hint(body: str) -> str:
    """The name in a call that is not JSON, so that its author sees which call is meant."""
    start = body.find('"name"', 0, 4096)
    if start < 0:
        return ""
    opening = body.find('"', start + 6, start + 96)
    closing = body.find('"', opening + 1, opening + 96) if opening >= 0 else -1
    return body[opening + 1:closing] if closing >= 0 else ""


TAGS_FORM = '<tool_call>{"name": "TOOL", "arguments": {...}}</tool_call>'


def _parse_tags(text: str) -> list[ParsedCall]:
    calls: list[ParsedCall] = []
    for body, closed in _bodies(text, "<tool_call>", "</tool_call>"):
        stripped = body.strip()
        if stripped.startswith("<function="):
            calls.append(_call_from_xml(stripped))
        elif stripped[:1].isalpha() and "<arg_key>" in stripped:
            calls.append(_call_from_pairs(stripped))
        else:
            calls.extend(_calls_in_json(stripped, TAGS_FORM, closed=closed))
    return calls


def _value(text: str) -> Any:
    """An argument written without quotes: JSON where it is JSON, else the text itself."""
    value, used, fault = read_json(text)
    return value if fault is None and not text[used:].strip() else text


def _call_from_xml(body: str) -> ParsedCall:
    form = "<tool_call><function=TOOL><parameter=NAME>VALUE</parameter></function></tool_call>"
    end = body.find(">")
    name = body[len("<function="):end].strip() if end >= 0 else ""
    if not name or "<" in name:
        return ParsedCall("", error=f"the call has no function name. Write {form}")
    arguments: dict[str, Any] = {}
    for part, closed in _bodies(body[end + 1:], "<parameter=", "</parameter>"):
        key, separator, value = part.partition(">")
        if not closed or not separator:
            return ParsedCall(name, error=f"a parameter of {name} was never closed. Write {form}")
        arguments[key.strip()] = _value(value.removeprefix("\n").removesuffix("\n"))
    return ParsedCall(name, arguments)


def _call_from_pairs(body: str) -> ParsedCall:
    name = body[: body.find("<arg_key>")].strip()
    keys = _bodies(body, "<arg_key>", "</arg_key>")
    values = _bodies(body, "<arg_value>", "</arg_value>")
    if len(keys) != len(values) or not all(closed for _, closed in (*keys, *values)):
        form = "<tool_call>TOOL<arg_key>NAME</arg_key><arg_value>VALUE</arg_value></tool_call>"
        return ParsedCall(name, error=f"the keys and values of {name} do not pair up. Write {form}")
    return ParsedCall(name, {key.strip(): _value(value) for (key, _), (value, _) in zip(keys, values, strict=True)})


def _parse_fenced(text: str) -> list[ParsedCall]:
    form = '```json\n{"name": "TOOL", "arguments": {...}}\n```'
    calls: list[ParsedCall] = []
    for body, closed in _bodies(text, "```", "```"):
        language, newline, content = body.partition("\n")
        if newline and language.strip() in ("json", "tool_call", "tool"):
            found = _calls_in_json(content.strip(), form, closed=closed)
            # a fence tagged "json" may show data; only what names a tool is a call
            calls.extend(call for call in found if language.strip() != "json" or call.name)
    return calls


def _parse_mistral(text: str) -> list[ParsedCall]:
    calls: list[ParsedCall] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        name, separator, arguments = part.partition("[ARGS]")
        if separator and not name.lstrip().startswith("["):
            value, _, fault = read_json(arguments)
            error = f"the arguments of {name.strip()} are not valid JSON: {fault}. Write [TOOL_CALLS]TOOL[ARGS]{{...}}"
            calls.append(
                ParsedCall(name.strip(), error=error)
                if fault or not isinstance(value, dict)
                else ParsedCall(name.strip(), value)
            )
        else:
            calls.extend(_calls_in_json(part, '[TOOL_CALLS][{"name": "TOOL", "arguments": {...}}]', closed=False))
    return calls


def _parse_llama(text: str) -> list[ParsedCall]:
    form = '<|python_tag|>{"name": "TOOL", "parameters": {...}}'
    calls: list[ParsedCall] = []
    for part in text.split("<|python_tag|>")[1:]:
        body = part.split("<|eom_id|>")[0].split("<|eot_id|>")[0]
        for piece in body.split(";\n"):
            calls.extend(_calls_in_json(piece, form))
    return calls


def _parse_deepseek(text: str) -> list[ParsedCall]:
    form = "<｜tool▁call▁begin｜>TOOL<｜tool▁sep｜>{...}<｜tool▁call▁end｜>"
    calls: list[ParsedCall] = []
    for body, _ in _bodies(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        name, separator, rest = body.partition("<｜tool▁sep｜>")
        if name.strip() == "function":  # V3 and R1: the type first, then the name, then a fence
            name, _, rest = rest.partition("\n")
            rest = rest.strip().removeprefix("```json").removesuffix("```")
        value, _, fault = read_json(rest)
        if not separator or fault or not isinstance(value, dict):
            calls.append(ParsedCall(name.strip(), error=f"the arguments are not a JSON object: {fault}. Write {form}"))
        else:
            calls.append(ParsedCall(name.strip(), value))
    return calls


def _parse_json(text: str) -> list[ParsedCall]:
    stripped = text.strip()
    if not stripped.startswith(("{", "[")) or '"name"' not in stripped:
        return []
    return _calls_in_json(stripped, '{"name": "TOOL", "arguments": {...}}')


_PYTHON_CALL = re.compile(r"[\[`\s]{0,8}([A-Za-z_][\w.]{0,63})\(")
_PYTHON_KEY = re.compile(r"\s{0,8}([A-Za-z_]\w{0,63})\s{0,8}=\s{0,8}")
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_PYTHON_WORD = re.compile(r"True|False|None")
PYTHON_FORM = 'TOOL("VALUE") or TOOL(NAME="VALUE")'


def _parse_python(text: str) -> list[ParsedCall]:
    calls: list[ParsedCall] = []
    for line in text.splitlines():
        opening = _PYTHON_CALL.match(line)
        if opening:
            calls.append(_call_from_python(opening[1], line, opening.end()))
    return calls


def _call_from_python(name: str, line: str, position: int) -> ParsedCall:
    """Read arguments from `position` on, to the closing parenthesis; what follows it is ignored."""
    named: dict[str, Any] = {}
    positional: list[Any] = []
    while True:
        while position < len(line) and line[position] in " ,":
            position += 1
        if line.startswith(")", position):
            return ParsedCall(name, named, positional=tuple(positional))
        key = _PYTHON_KEY.match(line, position)
        value, end = _python_value(line, key.end() if key else position)
        if end < 0:
            fault = f"a quoted text, a number or a closing parenthesis is missing at character {position}"
            return ParsedCall(name, error=f"the call of {name} could not be read: {fault}. Write {PYTHON_FORM}")
        if key:
            named[key[1]] = value
        else:
            positional.append(value)
        position = end


def _python_value(line: str, position: int) -> tuple[Any, int]:
    """The literal at `position` and where it ends, or -1 where there is none."""
    if line.startswith("'", position):
        end = line.find("'", position + 1)
        return (line[position + 1:end], end + 1) if end >= 0 else (None, -1)
    if word := _PYTHON_WORD.match(line, position):
        return _PYTHON_WORDS[word[0]], word.end()
    try:
        value, end = _DECODER.raw_decode(line, position)
    except (ValueError, RecursionError):
        return None, -1
    return (None, -1) if _too_deep(value) else (value, end)


FORMATS: dict[str, Callable[[str], list[ParsedCall]]] = {
    "tags": _parse_tags,
    "fenced": _parse_fenced,
    "mistral": _parse_mistral,
    "llama": _parse_llama,
    "deepseek": _parse_deepseek,
    "json": _parse_json,
    "python": _parse_python,
}
