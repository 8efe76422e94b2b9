"""Token ids as text that can be shown: with the run's tokenizer where it is at hand, and with nothing in it that acts.

Idea: what a model or a tool wrote is foreign. Control characters, and marks that turn the direction of writing, are shown as
escapes; letters of every script stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from longstraw_agents.cache import SMOLLM2, cache_folder
from longstraw_agents.types import TokenArray

log = logging.getLogger(__name__)

Ids = Sequence[int] | TokenArray


class Decoder(Protocol):
    """Ids to text."""

    def text(self, ids: Ids) -> str:
        """All ids as one text."""
        ...

    def pieces(self, ids: Ids) -> list[str]:
        """One text per id, which together are `text`. Of ids that make one character together, the last has it."""
        ...


class TokenizerDecoder:
    """With a tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def text(self, ids: Ids) -> str:
        """As `Decoder` says; control tokens are shown too."""
        return str(self.tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))

    def pieces(self, ids: Ids) -> list[str]:
        """As `Decoder` says."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        found = [stream.step(self.tokenizer, int(token)) or "" for token in ids]
        rest = self.text(ids)[sum(map(len, found)) :]  # of a character that is not complete
        if found:
            found[-1] += rest
        return found


class IdDecoder:
    """Where no tokenizer is at hand: the ids themselves."""

    def text(self, ids: Ids) -> str:
        """The ids with spaces between them."""
        return "".join(self.pieces(ids))

    def pieces(self, ids: Ids) -> list[str]:
        """Each id with a space behind it."""
        return [f"{int(token)} " for token in ids]


def decoder_of(config: Any) -> Decoder:
    """The decoder of a run, by its stored configuration; ids where the tokenizer cannot be had, which is logged."""
    model = config.get("model") if isinstance(config, Mapping) else None
    name = model.get("name") if isinstance(model, Mapping) else None
    if not isinstance(name, str) or not name:
        return IdDecoder()
    try:
        return TokenizerDecoder(_tokenizer(name))
    except Exception as error:  # whatever keeps a tokenizer from loading: the ids can still be shown
        log.warning("the tokenizer of %r could not be loaded (%s); token ids are shown", name, error)
        return IdDecoder()


def _tokenizer(name: str) -> Any:
    from tokenizers import Tokenizer

    file = (cache_folder() / SMOLLM2 if name == SMOLLM2 else Path(name)) / "tokenizer.json"
    if file.exists() or name == SMOLLM2:
        return Tokenizer.from_file(str(file))
    return Tokenizer.from_pretrained(name)


def printable(text: str) -> str:
    """Control and format characters, but for line ends and tabs, as escapes: nothing obeys what a model wrote."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)
