"""longstraw/DocumentSearch-v0: questions over a corpus of any size, through search, open and scroll.

Idea: any text will do as a corpus, the user's folder or the language reference that ships with Python, because the questions
are about facts planted in it: a chain of sentences, each in another document, that leads from a name to a number. Answers can
be checked exactly, can't be guessed, and the depth of the chain is an option. How much text an episode sees is an option too:
`page_chars` is what one call shows, `preload_chars` puts whole documents into the first observation, from none to millions.

Vocabulary
    document  a title and a text; a folder's files (*.txt, *.md, *.rst) or a topic of the language reference
    page      a slice of `page_chars` characters of a document
    chain     planted sentences: "The keeper of N0 is N1." ... "The number of Nk is V."
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from longstraw_agents.envs.rewards import Episode, Grade, RewardPart
from longstraw_agents.envs.tool_env import ToolEnv, in_split
from longstraw_agents.envs.tools import ToolLimits, tool
from longstraw_agents.errors import ConfigError, ToolFault

_WORD = re.compile(r"\w+")
_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ha", "ki", "lo", "mu", "ne", "pa", "ri", "so", "tu", "va", "wen", "xi", "yor", "zel")


@functools.lru_cache(maxsize=4)
def read_corpus(folder: str | None) -> tuple[tuple[str, str], ...]:
    """(title, text) of every document: files below `folder`, or Python's own language reference. Raises ConfigError."""
    if folder is None:
        from pydoc_data.topics import topics

        return tuple(sorted(topics.items()))
    root = Path(folder)
    files = sorted(path for path in root.rglob("*") if path.suffix in (".txt", ".md", ".rst") and path.is_file())
    if not files:
        raise ConfigError(f"corpus folder {folder!r} holds no .txt, .md or .rst file; give one that does, or None")
    return tuple((str(path.relative_to(root)), path.read_text("utf-8", "replace")) for path in files)


class Index:
    """BM25 over whole documents (Robertson and Zaragoza 2009, k1 = 1.2, b = 0.75)."""

    def __init__(self, texts: list[str]) -> None:
        self._counts = [Counter(_WORD.findall(text.lower())) for text in texts]
        self._lengths = [sum(count.values()) for count in self._counts]
        self._mean = sum(self._lengths) / max(1, len(texts))
        self._holders: dict[str, list[int]] = {}
        for number, count in enumerate(self._counts):
            for word in count:
                self._holders.setdefault(word, []).append(number)

    def search(self, query: str, limit: int) -> list[int]:
        """Numbers of the best documents, best first."""
        scores: dict[int, float] = {}
        for word in set(_WORD.findall(query.lower())):
            holders = self._holders.get(word, [])
            weight = math.log(1 + (len(self._counts) - len(holders) + 0.5) / (len(holders) + 0.5))
            for number in holders:
                count = self._counts[number][word]
                scale = 1.2 * (0.25 + 0.75 * self._lengths[number] / max(1.0, self._mean))
                scores[number] = scores.get(number, 0.0) + weight * count * 2.2 / (count + scale)
        return sorted(scores, key=lambda number: (-scores[number], number))[:limit]


class DocumentSearchEnv(ToolEnv):
    """Follow a chain of facts through documents."""

    instructions: ClassVar[str] = (
        "Answer the question from the documents. Search, open documents, scroll. Answer with the number only."
    )
    option_defaults: ClassVar[Mapping[str, Any]] = {
        "corpus": None, "documents": 40, "hops": 2, "page_chars": 2000, "preload_chars": 0
    }  # fmt: skip
    reward_parts: ClassVar[tuple[RewardPart, ...]] = (RewardPart("found", weight=0.2), RewardPart("answer", weight=1.0))
    max_turns: ClassVar[int] = 40

    def new_task(self, rng: np.random.Generator, split: str) -> str:
        """One task from the random numbers of its seed."""
        options = self.options
        for name, least in (("documents", 2), ("hops", 1), ("page_chars", 100), ("preload_chars", 0)):
            if options[name] < least:
                raise ConfigError(f"{name} is {options[name]}; give at least {least}")
        corpus = read_corpus(options["corpus"])
        while True:
            self.names = [self._name(rng) for _ in range(options["hops"])]
            self.value = int(rng.integers(1000, 10000))
            if len(set(self.names)) == len(self.names) and in_split(f"{self.names} {self.value}", split):
                break
        picked = [corpus[int(i)] for i in rng.integers(0, len(corpus), options["documents"])]
        self.documents = [[f"{number + 1}: {title}", text] for number, (title, text) in enumerate(picked)]
        holders = rng.permutation(len(picked))[: options["hops"]]
        chain = [f"The keeper of {a} is {b}." for a, b in zip(self.names, self.names[1:], strict=False)]
        chain.append(f"The number of {self.names[-1]} is {self.value}.")
        for step, sentence in enumerate(chain):
            document = self.documents[int(holders[step % len(holders)])]
            document[1] = _plant(document[1], sentence, rng)
        self._index: Index | None = None
        self._place = (0, 0)
        keepers = "the keeper of " * (len(self.names) - 1)
        return f"{self._preload(options['preload_chars'])}What is the number of {keepers}{self.names[0]}?"

    def _name(self, rng: np.random.Generator) -> str:
        return "".join(str(part) for part in rng.choice(_SYLLABLES, 4)).capitalize()

    def _preload(self, limit: int) -> str:
        """Whole documents until `limit` characters, cut at exactly the limit."""
        pieces: list[str] = []
        size = 0
        number = 0
        while size < limit:
            title, text = self.documents[number % len(self.documents)]
            pieces.append(f"# {title}\n{text}\n\n")
            size += len(pieces[-1])
            number += 1
        return "".join(pieces)[:limit] + ("\n\n" if limit else "")

    @tool
    def search(self, query: str) -> str:
        """Find documents by words; shows the best five with a line around the first word found.

        Args:
            query: words to look for
        """
        if self._index is None:
            self._index = Index([text for _, text in self.documents])
        found = self._index.search(query, 5)
        if not found:
            raise ToolFault("no document holds any of these words")
        return "\n".join(f"{self.documents[number][0]} ... {self._snippet(number, query)}" for number in found)

    def _snippet(self, number: int, query: str) -> str:
        text = self.documents[number][1]
        words = sorted(set(_WORD.findall(query.lower())), key=len, reverse=True)
        lowered = text.lower()
        place = next((place for place in map(lowered.find, words) if place >= 0), 0)
        return " ".join(text[max(0, place - 60): place + 100].split())

    @tool(limits=ToolLimits(output_chars=4_000_000))
    def open(self, document: int, page: int = 1) -> str:
        """Show a page of a document.

        Args:
            document: its number in the search results
            page: counted from 1
        """
        if not 1 <= document <= len(self.documents):
            raise ToolFault(f"there is no document {document}; they are numbered 1 to {len(self.documents)}")
        title, text = self.documents[document - 1]
        size = self.options["page_chars"]
        pages = max(1, math.ceil(len(text) / size))
        if not 1 <= page <= pages:
            raise ToolFault(f"document {document} has pages 1 to {pages}")
        self._place = (document, page)
        return f"# {title} (page {page} of {pages})\n{text[(page - 1) * size: page * size]}"

    @tool(limits=ToolLimits(output_chars=4_000_000))
    def scroll(self, pages: int = 1) -> str:
        """Show the page that many pages further on in the open document.

        Args:
            pages: how many; below 0 goes back
        """
        if self._place[0] == 0:
            raise ToolFault("no document is open; call open first")
        return str(self.open(self._place[0], self._place[1] + pages))

    def grade_turn(self, episode: Episode) -> Mapping[str, float]:
        """Parts of the reward that a turn earned."""
        wanted = f"The number of {self.names[-1]} is"
        seen = [any(wanted in (call.result or "") for call in calls) for calls in episode.calls]
        return {"found": float(seen[-1] and not any(seen[:-1]))}

    def grade(self, episode: Episode) -> Grade:
        """The outcome and the parts of the reward, at the end."""
        right = (episode.answer or "").strip() == str(self.value)
        return Grade(right, {"answer": float(right)})

    def solver(self) -> Generator[str, str, None]:
        """Actions that earn everything."""
        for name in self.names:
            seen = yield f'<tool_call>{{"name": "search", "arguments": {{"query": "{name}"}}}}</tool_call>'
            for line in seen.splitlines():  # a name is found where it is kept and where it keeps
                number = int(line.split(":", 1)[0])
                text = self.documents[number - 1][1]
                if f" of {name} is " in text:
                    page = text.index(f" of {name} is ") // self.options["page_chars"] + 1
                    arguments = f'{{"document": {number}, "page": {page}}}'
                    yield f'<tool_call>{{"name": "open", "arguments": {arguments}}}</tool_call>'
                    break
        if self.options["page_chars"] < 10_000:  # the sentence may lie across a page border
            yield '<tool_call>{"name": "scroll", "arguments": {}}</tool_call>'
        yield f"<answer>{self.value}</answer>"


def _plant(text: str, sentence: str, rng: np.random.Generator) -> str:
    """The text with a paragraph more, between two of its own."""
    places = [match.end() for match in re.finditer(r"\n\s*\n", text)] or [len(text)]
    place = places[int(rng.integers(len(places)))]
    return f"{text[:place]}{sentence}\n\n{text[place:]}"
