"""Secrets given to tools and endpoints, kept out of the store, of receipts and of logs.

Idea: whoever is given a secret says so once, with `hide`. From then on every store of this process replaces it in all that it is
told, collection in what environments say before it is encoded, and logging in every record. What a policy samples is never
changed: it can only repeat a secret that it was shown, and it is shown none.

Found are a secret as it is, and in the forms in which it travels: quoted in a URL, in base64, escaped in JSON.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from longstraw_agents.errors import ConfigError
from longstraw_agents.types import ToolCall, Turn

REPLACEMENT = "[hidden]"
#: Shorter values would be found in ordinary words.
SHORTEST = 6

_hidden: set[str] = set()
_pattern: re.Pattern[str] | None = None
_lock = threading.Lock()


def hide(secret: str) -> None:
    """Makes `secret` unwritable in this process. Raises ConfigError for one too short to tell from ordinary text."""
    global _pattern
    if len(secret) < SHORTEST:
        raise ConfigError(f"a secret of {len(secret)} characters cannot be hidden: give one of at least {SHORTEST}")
    with _lock:
        if not _hidden:
            _watch_logs()
        _hidden.update(_forms(secret))
        longest_first = sorted(_hidden, key=len, reverse=True)
        _pattern = re.compile("|".join(map(re.escape, longest_first)))


def _forms(secret: str) -> set[str]:
    raw = secret.encode("utf-8", "surrogatepass")
    encoded = {base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()}
    escaped = {json.dumps(secret, ensure_ascii=ascii)[1:-1] for ascii in (True, False)}
    return {secret, quote(raw, safe=""), *escaped, *encoded, *(text.rstrip("=") for text in encoded)}


def redact(text: str) -> str:
    """`text` without hidden secrets."""
    return text if _pattern is None else _pattern.sub(REPLACEMENT, text)


def redact_value(value: Any) -> Any:
    """A JSON-able value without hidden secrets, in keys and values."""
    if _pattern is None:
        return value
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact(key) if isinstance(key, str) else key: redact_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value(item) for item in value]
    return value


def redact_turn(turn: Turn) -> Turn:
    """A turn whose tool calls and source hold no hidden secret; its ids stay as they are."""
    if _pattern is None:
        return turn
    source = turn.observation_source
    if source is not None:
        source = redact(source.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    return replace(turn, tool_calls=tuple(_redact_call(call) for call in turn.tool_calls), observation_source=source)


def _redact_call(call: ToolCall) -> ToolCall:
    result, error = (None if text is None else redact(text) for text in (call.result, call.error))
    return replace(call, name=redact(call.name), arguments=redact_value(call.arguments), result=result, error=error)


def _watch_logs() -> None:
    """Lets every log record pass through `redact`, its traceback too."""
    make = logging.getLogRecordFactory()
    formatter = logging.Formatter()

    def redacted(*arguments: Any, **rest: Any) -> logging.LogRecord:
        record = make(*arguments, **rest)
        record.msg, record.args = redact(record.getMessage()), None
        if record.exc_info:
            record.exc_text = redact(formatter.formatException(record.exc_info))
        return record

    logging.setLogRecordFactory(redacted)
