"""From an environment's messages to token ids, turn by turn.

Idea: only what is new is encoded, and it is encoded once. Sampled ids are never decoded and encoded again: an observation's ids
are put behind them, beginning with exactly the bytes that the format wants after an action. The text of an environment is
encoded apart from the format's control tokens, by a tokenizer that knows none of the added ones, so a tool that prints
`<|im_end|>` gives ten characters in ordinary tokens.

Vocabulary
    added token   a token outside the tokenizer's own model, special or not (`<|im_end|>`, `<tool_call>`)
    disarmed      encoded without recognizing any added token
    source        the bytes of a rendered observation, kept only where decoding its ids does not give them back
    history       how an observation stands to what was said before: "appended" behind the sampled ids, as the format wants it;
                  "kept", appended although the format would now show earlier turns otherwise; "rewritten", the whole context
                  as the format now shows it, which begins a part of its own. All but "appended" is noted in the turn
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from longstraw_agents.errors import ConfigError, ModelError, TokenError
from longstraw_agents.types import Message, TokenArray

_ROLE = re.compile(r"[a-z][a-z_]*")
_SURROGATE = re.compile("[\ud800-\udfff]")

History = Literal["appended", "kept", "rewritten"]


@dataclass(frozen=True)
class RenderingConfig:
    """format: "chatml" (`ChatML`), "template" (the tokenizer's own chat template, `templates.TemplateRenderer`), or "auto":
    ChatML where the tokenizer has its two control tokens, else the template. rewritten: what to do where the template shows
    earlier turns otherwise than they were sampled: "branch" begins a part with what it shows, "keep" goes on behind the sampled
    ids. options: variables of the template, such as enable_thinking."""

    format: Literal["auto", "chatml", "template"] = "auto"
    rewritten: Literal["branch", "keep"] = "branch"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.format not in ("auto", "chatml", "template"):
            raise ConfigError(f'rendering format must be "auto", "chatml" or "template", got {self.format!r}')
        if self.rewritten not in ("branch", "keep"):
            raise ConfigError(f'rendering rewritten must be "branch" or "keep", got {self.rewritten!r}')


@dataclass(frozen=True)
class Rendered:
    """ids [O] of an observation; source: its bytes (UTF-8, surrogates passed) where the ids do not decode to them, else None."""

    ids: TokenArray
    source: bytes | None
    history: History = "appended"


class Renderer(Protocol):
    """A chat format. `stop_ids` end an action and are part of it; `end_id` is the one that the format itself puts there."""

    stop_ids: frozenset[int]
    end_id: int

    def first(self, messages: Sequence[Message]) -> Rendered:
        """The first observation, up to where the policy begins to write."""
        ...

    def following(self, action: TokenArray, messages: Sequence[Message], history: Sequence[Message] = ()) -> Rendered:
        """The observation behind `action`, up to where the policy begins to write again. history: what was said before the
        action in this part, the policy's messages as "assistant"; formats that never look back need none."""
        ...

    def text(self, action: TokenArray) -> str:
        """What the environment reads of an action: its text without the token that ended it."""
        ...


class DisarmedEncoder:
    """Encodes text as if the tokenizer had no added tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a fast transformers tokenizer. Raises ModelError for another kind."""
        from tokenizers import Tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"{type(tokenizer).__name__} is no fast tokenizer; convert it (tokenizer.json) to use it here")
        spec = json.loads(backend.to_str())
        # White space forges nothing: Gemma's tokenizer lists runs of newlines among its added tokens.
        self._added = frozenset(entry["id"] for entry in spec["added_tokens"] if not entry["content"].isspace())
        spec["added_tokens"], spec["truncation"], spec["padding"] = [], None, None
        _never_prefix(spec.get("pre_tokenizer"))
        self._bare = Tokenizer.from_str(json.dumps(spec))

    def __call__(self, text: str) -> list[int]:
        """Ids of the text; surrogates, which no tokenizer takes, become U+FFFD."""
        clean = _SURROGATE.sub("\ufffd", text)
        ids = self._bare.encode(clean, add_special_tokens=False).ids
        if self._added.isdisjoint(ids):
            return ids
        # A model whose own vocabulary lists added tokens as words can still meet one, but not within one character.
        ids = [token for character in clean for token in self._bare.encode(character, add_special_tokens=False).ids]
        if not self._added.isdisjoint(ids):
            raise TokenError("the tokenizer makes control tokens out of ordinary text; it cannot be used with tools")
        return ids


def _never_prefix(pre_tokenizer: Any) -> None:
    """What is encoded apart stands within a text: a tokenizer that puts a space before a text's first word must not here."""
    if isinstance(pre_tokenizer, dict):
        if pre_tokenizer.get("prepend_scheme") == "first":
            pre_tokenizer["prepend_scheme"] = "never"
        for part in pre_tokenizer.get("pretokenizers", ()):
            _never_prefix(part)


def renderer_for(tokenizer: Any, config: RenderingConfig = RenderingConfig()) -> Renderer:
    """The renderer that the settings name. Raises ModelError where the tokenizer has no such format."""
    added = tokenizer.get_added_vocab()
    if config.format == "chatml" or (config.format == "auto" and {"<|im_start|>", "<|im_end|>"} <= added.keys()):
        return ChatML(tokenizer)
    from longstraw_agents.templates import TemplateRenderer

    return TemplateRenderer(tokenizer, config)


class ChatML:
    """The format of SmolLM2, Qwen and others: `<|im_start|>role\\n...<|im_end|>\\n`. Byte for byte what their templates give for
    plain messages; tools stand in the system message, put there by the environment."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode = DisarmedEncoder(tokenizer)
        self._begin, self._end = (self._control(name) for name in ("<|im_start|>", "<|im_end|>"))
        self.stop_ids, self.end_id = frozenset({self._end}), self._end

    def first(self, messages: Sequence[Message]) -> Rendered:
        """The first observation: all messages, and the header of the assistant's."""
        if not messages:
            raise TokenError("the environment's reset gave no message; there is nothing to begin a trajectory with")
        return self._render([], "", messages)

    def following(self, action: TokenArray, messages: Sequence[Message], history: Sequence[Message] = ()) -> Rendered:
        """What follows an action: its end if it was cut, the messages, and the next header."""
        # An action that was cut has no end token; the environment's side closes it.
        if len(action) and action[-1] == self._end:
            return self._render(self._encode("\n"), "\n", messages)
        return self._render([self._end, *self._encode("\n")], "<|im_end|>\n", messages)

    def text(self, action: TokenArray) -> str:
        """An action as text, without the token that ended it."""
        ids = [int(token) for token in action]
        return self._decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def _render(self, ids: list[int], text: str, messages: Sequence[Message]) -> Rendered:
        for message in messages:
            if not _ROLE.fullmatch(message.role):
                raise TokenError(f"a message's role must be a word such as 'user' or 'tool', got {message.role!r}")
            body = f"{message.role}\n{message.content}"
            ids += [self._begin, *self._encode(body), self._end, *self._encode("\n")]
            text += f"<|im_start|>{body}<|im_end|>\n"
        ids += [self._begin, *self._encode("assistant\n")]
        text += "<|im_start|>assistant\n"
        source = None if self._decode(ids) == text else text.encode("utf-8", "surrogatepass")
        return Rendered(np.array(ids, np.int32), source)

    def _control(self, name: str) -> int:
        token = self._tokenizer.get_added_vocab().get(name)
        if token is None:
            raise ModelError(
                f'the tokenizer has no {name} token, so the model does not speak ChatML; set rendering.format to "template"'
            )
        return int(token)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
