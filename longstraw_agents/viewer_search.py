"""Text search over what was collected, without an index: a page searches for a part of a second and says where to go on.

Idea: text is stored as token ids, so searching means decoding. What trajectories share is decoded once. A search that is not
done gives the place where the next page takes it up; the page's script follows these by itself, a reader without script clicks.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from longstraw_agents.decoding import Decoder
from longstraw_agents.errors import ConfigError
from longstraw_agents.storage import Store, browse
from longstraw_agents.storage.browse import Passage, Place

BUDGET = 0.35  # seconds a page searches
MOST_HITS = 50
AROUND = 70  # characters shown on both sides of a hit
OVERLAP = 64  # ids of the passage before that are decoded again, so that a hit across the border is seen
LONGEST = 200  # characters of a query


@dataclass(frozen=True)
class Hit:
    """A turn that holds the text: the trajectory (None where none goes through it), and the text around its first hit."""

    trajectory_id: str | None
    turn: int
    position: int
    action: bool
    before: str
    found: str
    after: str


@dataclass
class Found:
    """One page of a search. rest: where the next one begins, None at the end; tokens: how many were looked at."""

    hits: list[Hit] = field(default_factory=list)
    tokens: int = 0
    rest: str | None = None


def search(
    store: Store, run_id: str, decoder: Decoder, query: str, *, trajectory_id: str | None = None, after: str | None = None,
    seconds: float = BUDGET,
) -> Found:  # fmt: skip
    """The turns of a run (or of one trajectory) whose observation or action holds `query`, whatever the case of its letters.

    Raises ConfigError for an empty or overlong query, or a place that is none.
    """
    wanted = query.casefold()
    if not wanted.strip() or len(query) > LONGEST:
        raise ConfigError(f"search for 1 to {LONGEST} characters, got {len(query)}")
    deadline = time.monotonic() + seconds
    found = Found()
    missed: set[bytes] = set()
    raw: list[tuple[Passage, tuple[str, str, str]]] = []
    last: Passage | None = None
    for passage in browse.passages(store, run_id, trajectory_id=trajectory_id, after=_place(after), batch=64):
        if after and last is None:  # the page before has searched it; here it is what comes before the next one
            last = passage
            continue
        carried, before, last = _carried(last, passage), last, passage
        found.tokens += len(passage.ids)
        if carried or passage.digest not in missed:
            at = _first(decoder, [*carried, *passage.ids.tolist()], wanted)
            if at is not None:
                raw.append((passage, at))
            elif not carried:
                missed.add(passage.digest)
        if before is not None and (len(raw) >= MOST_HITS or time.monotonic() > deadline):
            found.rest = f"{before.branch}-{before.start}"
            break
    places = [(passage.branch, passage.turn) for passage, _ in raw]
    names = browse.through(store, run_id, places) if trajectory_id is None else [trajectory_id] * len(raw)
    found.hits = [
        Hit(name, passage.turn, passage.start, passage.action, *around)
        for name, (passage, around) in zip(names, raw, strict=True)
    ]
    return found


def _carried(last: Passage | None, passage: Passage) -> list[int]:
    """The end of the passage before, where it is of the same part of the same turn."""
    if passage.begins or last is None or last.branch != passage.branch:
        return []
    return [int(token) for token in last.ids[-OVERLAP:]]


def _first(decoder: Decoder, ids: list[int], wanted: str) -> tuple[str, str, str] | None:
    """The first hit with what is around it."""
    text = decoder.text(ids)
    if wanted not in text.casefold():
        return None
    match = re.search(re.escape(wanted), text, re.IGNORECASE)
    start, stop = match.span() if match else (0, 0)  # casefold may find what differs in length: then the beginning is shown
    return text[max(start - AROUND, 0) : start], text[start:stop], text[stop : stop + AROUND]


def _place(after: str | None) -> Place | None:
    if not after:
        return None
    match = re.fullmatch(r"(\d{1,18})-(\d{1,18})", after)
    if match is None:
        raise ConfigError(f"{after[:40]!r} is no place where a search can go on")
    return int(match[1]), int(match[2])
