"""Rendering with a tokenizer's own chat template, whatever it is, turn by turn.

Idea: a template turns a whole conversation into text. What follows an action is found by rendering the conversation with it and
taking what stands behind it; that alone is encoded, behind the sampled ids. While the conversation before reads as the policy
read it, this is all. Where it does not (Qwen3 shows earlier answers without their thinking), the settings choose: begin a part
with what the template shows now, or keep what was sampled; the turn says which. White space alone is no difference: sampled ids
stand.

Text that is not the template's own must not be taken for it. While a template runs, private-use characters stand in for the added
tokens that a message spells; afterwards every added token left in the text is the template's, and the stand-ins are put back and
encoded as ordinary text. In the policy's own earlier messages only special tokens are stood in for: its `<think>` stays one.

Vocabulary
    stand-in   a private-use character for a string that would be read as an added token
    fitted     messages as the template takes them: one without a tool role gets the user's, one without a system role finds the
               system's text before the user's, one that wants alternating roles gets neighbours joined. Found out by trying
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
import numpy as np

from longstraw_agents.errors import ModelError, TokenError
from longstraw_agents.rendering import DisarmedEncoder, History, Rendered, RenderingConfig
from longstraw_agents.types import Message, TokenArray

#: Templates that print the date print this one: a resumed episode must read what it read before.
_DATE = datetime.datetime(2024, 7, 26)
_STAND_INS = range(0xF0000, 0xFFFFE)
#: How templates say no to a conversation.
_REFUSALS = (jinja2.TemplateError, TypeError, KeyError, IndexError)
_PLAIN = RenderingConfig()
_PROBE = (Message("user", "bravo"), Message("assistant", "charlie"), Message("user", "foxtrot"))


class TemplateRenderer:
    """A Renderer over `tokenizer.chat_template`. Tools stand in the system message, put there by the environment.

    Each turn renders the conversation's text three times; only what is new is encoded.
    """

    def __init__(self, tokenizer: Any, config: RenderingConfig = _PLAIN) -> None:
        """Raises ModelError for a tokenizer without a template, or whose template marks no end of an action."""
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(f"{type(tokenizer).__name__} has no chat template; give it one, or set rendering.format to chatml")
        self._tokenizer, self._config = tokenizer, config
        self._template = _dated(tokenizer.get_chat_template())
        self._encode = DisarmedEncoder(tokenizer)
        self._tokens = _AddedTokens.of(tokenizer)
        self.fitting = _Fitting.found(self._accepts)
        self.end_id = self._end_of_action()
        self.stop_ids = frozenset({self.end_id, *([] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)])})

    def first(self, messages: Sequence[Message]) -> Rendered:
        """The first observation: all messages as the template shows them, up to the policy's turn."""
        if not messages:
            raise TokenError("the environment's reset gave no message; there is nothing to begin a trajectory with")
        standing = _StandIns(messages)
        return self._rendered(self._text(self._disguised(messages, standing)), standing)

    def following(self, action: TokenArray, messages: Sequence[Message], history: Sequence[Message] = ()) -> Rendered:
        """What the template puts behind an action, or the whole context where it shows it otherwise and a part shall begin."""
        said = Message("assistant", self.text(action))
        standing = _StandIns([*history, said, *messages])
        before, added = self._disguised(history, standing), self._disguised(messages, standing)
        (answer,), word = self._disguised([said], standing), standing.unused()
        _, found, rest = self._text([*before, Message("assistant", word), *added]).rpartition(word)
        if not found:
            raise ModelError("the chat template drops the policy's messages; it cannot be used turn by turn")
        whole = self._text([*before, answer, *added])
        same = _without_space(whole) == _without_space(self._text(before) + answer.content + rest)
        if not same and self._config.rewritten == "branch":
            return self._rendered(whole, standing, "rewritten")
        return self._rendered(self._behind(action, rest), standing, "appended" if same else "kept")

    def text(self, action: TokenArray) -> str:
        """An action as text, without the token that ended it."""
        ids = [int(token) for token in action]
        return self._decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def _behind(self, action: TokenArray, rest: str) -> str:
        """What is to be put behind the action, which may have ended with the template's own end token."""
        after = rest.lstrip()
        closing = self._tokens.every.match(after)
        if closing is None or not len(action) or self._tokens.id_of(closing) != int(action[-1]):
            return rest
        return after[closing.end() :]

    def _rendered(self, text: str, standing: _StandIns, history: History = "appended") -> Rendered:
        ids: list[int] = []
        start = 0
        for match in self._tokens.every.finditer(text):
            ids += [*self._encode(standing.put_back(text[start : match.start()])), self._tokens.id_of(match)]
            start = match.end()
        ids += self._encode(standing.put_back(text[start:]))
        plain = standing.put_back(text)
        source = None if self._decode(ids) == plain else plain.encode("utf-8", "surrogatepass")
        return Rendered(np.array(ids, np.int32), source, history)

    def _disguised(self, messages: Sequence[Message], standing: _StandIns) -> list[Message]:
        def hidden(message: Message) -> str:
            tokens = self._tokens.special if message.role == "assistant" else self._tokens.visible
            return tokens.sub(lambda match: standing.of(match[0]), message.content)

        return [replace(message, content=hidden(message)) for message in messages]

    def _text(self, messages: Sequence[Message], *, asks: bool = True) -> str:
        """The conversation's text; `asks`: up to where the policy begins to write. Raises TokenError where it is refused."""
        try:
            return self._apply(_conversation(self.fitting(messages), self.fitting.typed), asks)
        except _REFUSALS as error:
            roles = ", ".join(message.role for message in messages)
            raise TokenError(f"the chat template refuses a conversation of {roles}: {error}") from error

    def _apply(self, conversation: list[dict[str, Any]], asks: bool) -> str:
        options = {"date_string": _DATE.strftime("%d %b %Y"), **self._config.options}
        given = {"chat_template": self._template, "add_generation_prompt": asks, **options}
        return str(self._tokenizer.apply_chat_template(conversation, tokenize=False, **given))

    def _accepts(self, messages: Sequence[Message], typed: bool) -> bool:
        try:
            text = self._apply(_conversation(messages, typed), True)
        except _REFUSALS:
            return False
        return all(message.content in text for message in messages)

    def _end_of_action(self) -> int:
        word = chr(_STAND_INS[0])
        closing = self._text([Message("user", "hello"), Message("assistant", word)], asks=False).rpartition(word)[2].lstrip()
        match = self._tokens.every.match(closing)
        if match is not None:
            return self._tokens.id_of(match)
        if self._tokenizer.eos_token_id is None:
            raise ModelError("neither the chat template nor the tokenizer says which token ends an action; set its eos_token")
        return int(self._tokenizer.eos_token_id)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@dataclass(frozen=True)
class _AddedTokens:
    """The tokenizer's added tokens as patterns: all of them with the white space that they swallow, those that are not white
    space, and the special ones."""

    ids: Mapping[str, int]
    every: re.Pattern[str]
    visible: re.Pattern[str]
    special: re.Pattern[str]

    @classmethod
    def of(cls, tokenizer: Any) -> _AddedTokens:
        entries = json.loads(tokenizer.backend_tokenizer.to_str())["added_tokens"]
        entries.sort(key=lambda entry: -len(entry["content"]))  # the longest that fits is taken
        shown = [entry for entry in entries if not entry["content"].isspace()]
        space = {True: r"\s*", False: ""}
        swallowing = [space[entry["lstrip"]] + re.escape(entry["content"]) + space[entry["rstrip"]] for entry in entries]
        return cls(
            {entry["content"]: int(entry["id"]) for entry in entries},
            _any_of(swallowing),
            _any_of(re.escape(entry["content"]) for entry in shown),
            _any_of(re.escape(entry["content"]) for entry in shown if entry["special"]),
        )

    def id_of(self, match: re.Match[str]) -> int:
        """Of the token that a match of `every` is."""
        text = match[0]
        return self.ids[text] if text in self.ids else self.ids[text.strip()]


def _any_of(patterns: Any) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or r"(?!)")


class _StandIns:
    """Private-use characters that none of the messages holds, one for each string that was asked for."""

    def __init__(self, messages: Sequence[Message]) -> None:
        taken = {character for message in messages for character in message.content if ord(character) in _STAND_INS}
        self._free = (chr(code) for code in _STAND_INS if chr(code) not in taken)
        self._by_text: dict[str, str] = {}

    def unused(self) -> str:
        """One that stands for nothing."""
        return next(self._free)

    def of(self, text: str) -> str:
        """The one for a string."""
        if text not in self._by_text:
            self._by_text[text] = next(self._free)
        return self._by_text[text]

    def put_back(self, text: str) -> str:
        """The text with the strings in place of their stand-ins."""
        return text.translate({ord(character): string for string, character in self._by_text.items()})


@dataclass(frozen=True)
class _Fitting:
    """What a template takes: contents as lists of typed parts (models that also see images want it), a tool role, a system
    message first, one later, neighbours of the same role."""

    typed: bool
    tool: bool
    system: bool
    late_system: bool
    neighbours: bool

    @classmethod
    def found(cls, accepts: Callable[[Sequence[Message], bool], bool]) -> _Fitting:
        """By trying. Raises ModelError where not even a plain question and answer are taken."""
        typed = not accepts(_PROBE, False)
        if typed and not accepts(_PROBE, True):
            raise ModelError("the chat template does not render a plain conversation of user and assistant")
        (user, answer, _), system = _PROBE, Message("system", "alpha")
        return cls(
            typed=typed,
            tool=accepts([user, answer, Message("tool", "delta")], typed),
            system=accepts([system, user], typed),
            late_system=accepts([user, answer, system], typed),
            neighbours=accepts([user, Message("user", "echo")], typed),
        )

    def __call__(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them."""
        fitted: list[Message] = []
        leading = ""
        for index, message in enumerate(messages):
            content = message.content
            if message.role == "system" and index == 0 and not self.system:
                leading = f"{content}\n\n"
                continue
            late = message.role == "system" and index > 0 and not self.late_system
            role = "user" if late or (message.role == "tool" and not self.tool) else message.role
            if role == "user":
                content, leading = leading + content, ""
            if fitted and fitted[-1].role == role and not self.neighbours:
                content = f"{fitted.pop().content}\n\n{content}"
            fitted.append(Message(role, content))
        return [*fitted, *([Message("user", leading.rstrip("\n"))] if leading else [])]


def _conversation(messages: Sequence[Message], typed: bool) -> list[dict[str, Any]]:
    contents = ([{"type": "text", "text": m.content}] if typed else m.content for m in messages)
    return [{"role": message.role, "content": content} for message, content in zip(messages, contents, strict=True)]


def _dated(template: str) -> str:
    """The template with `strftime_now`, which some print, replaced by one that always gives the same day."""
    form = "form"
    for code in ("-d", *"YymdBbAaHIMSpj"):
        form += f"|replace('%{code}', '{_DATE.strftime('%' + code)}')"
    return f"{{%- macro strftime_now(form) -%}}{{{{ {form} }}}}{{%- endmacro -%}}{template}"


def _without_space(text: str) -> str:
    return "".join(text.split())
