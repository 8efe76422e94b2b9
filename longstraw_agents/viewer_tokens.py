"""Tokens in colour: by who wrote them, by log-probability, advantage or ratio.

Idea: what a page shows of a long trajectory is a range; the numbers of that range come from the store's log-probabilities and
from the receipt of the step that trained on it. A colour has eight steps at most, and every token says its numbers in words.

Vocabulary
    advantage   what the update gave the token, from the receipt
    ratio       the token's probability under the weights that the update's last step began with, over the one it was sampled with
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from longstraw_agents.decoding import Decoder, printable
from longstraw_agents.errors import ConfigError
from longstraw_agents.trainer.credit import unpacked

COLOURS = ("mask", "log-probability", "advantage", "ratio")
Numbers = npt.NDArray[np.float64]

#: Upper ends of the steps of -log-probability; of |advantage|; of |log ratio|.
SURPRISE = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
STRENGTH = (1e-9, 0.3, 1.0)
DRIFT = (0.005, 0.05, 0.3)


@dataclass(frozen=True)
class TokenNumbers:
    """What is known of the tokens [start, start + T): arrays [T], NaN where there is no number."""

    start: int
    logp: Numbers
    advantage: Numbers
    ratio: Numbers

    def slice(self, start: int, stop: int) -> TokenNumbers:
        """Those of positions [start, stop)."""
        cut = slice(start - self.start, stop - self.start)
        return TokenNumbers(start, self.logp[cut], self.advantage[cut], self.ratio[cut])


def token_numbers(start: int, behaviour: npt.NDArray[np.float32], receipt: Mapping[str, Any], name: str) -> TokenNumbers:
    """The numbers of a range: `behaviour` [T] from the store, the rest from the receipt of the step, where it has them."""
    stop = start + len(behaviour)
    advantage, ratio = np.full(stop - start, np.nan), np.full(stop - start, np.nan)
    spans = receipt.get("credit", {}).get(name, [])
    packed = receipt.get("log_ratio", {}).get(name)
    ratios = None if packed is None else np.exp(unpacked(packed))
    before = 0
    for first, last, value in spans:
        low, high = max(int(first), start), min(int(last), stop)
        if low < high:
            advantage[low - start : high - start] = value
            if ratios is not None:
                ratio[low - start : high - start] = ratios[before + low - int(first) : before + high - int(first)]
        before += int(last) - int(first)
    return TokenNumbers(start, behaviour.astype(np.float64), advantage, ratio)


def classes(numbers: TokenNumbers, colour: str) -> list[str]:
    """One CSS class per token; empty where there is no number. Raises ConfigError for an unknown colour."""
    if colour not in COLOURS:
        raise ConfigError(f"tokens are coloured by one of {COLOURS}, got {colour!r}")
    sampled = ~np.isnan(numbers.logp)
    if colour == "mask":
        return ["act" if one else "" for one in sampled]
    if colour == "log-probability":
        level = np.searchsorted(SURPRISE, np.nan_to_num(-numbers.logp))
        return [f"l{step}" if one else "" for one, step in zip(sampled, level, strict=True)]
    value, ends = (numbers.advantage, STRENGTH) if colour == "advantage" else (np.log(numbers.ratio), DRIFT)
    level = np.searchsorted(ends, np.abs(np.nan_to_num(value)))
    signs = np.where(value < 0, "n", "p")
    known = ~np.isnan(value)
    return [f"{sign}{step}" if one else "" for one, sign, step in zip(known, signs, level, strict=True)]


def in_colour(decoder: Decoder, ids: Sequence[int], numbers: TokenNumbers, colour: str) -> Markup:
    """Tokens of one part of a turn as HTML. Line ends of coloured tokens are shown as ↵ too, for they have a colour as well."""
    kinds = classes(numbers, colour)
    if not any(kinds) or colour == "mask":
        text = escape(printable(decoder.text(ids)))
        return Markup('<span class="act">{}</span>').format(text) if any(kinds) else text
    parts = []
    for offset, (piece, kind) in enumerate(zip(decoder.pieces(ids), kinds, strict=True)):
        shown = printable(piece).replace("\n", "↵\n")
        told = told_of(numbers, offset, int(ids[offset]))
        parts.append(f'<span class="{kind}" title="{told}">{escape(shown)}</span>')
    return Markup("".join(parts))  # pieces are escaped; classes and numbers are ours


def told_of(numbers: TokenNumbers, offset: int, token: int) -> str:
    """A token's numbers in words."""
    named = (("log-probability", numbers.logp), ("advantage", numbers.advantage), ("ratio", numbers.ratio))
    told = [f"{name} {values[offset]:.4g}" for name, values in named if not np.isnan(values[offset])]
    return ", ".join([f"position {numbers.start + offset:,}", f"id {token}", *told])


def legend(colour: str) -> list[tuple[str, str]]:
    """(class, meaning) of a colour's steps."""
    if colour == "mask":
        return [("act", "sampled by the policy"), ("", "written by the environment")]
    if colour == "log-probability":
        ends = [0.0, *(-end for end in SURPRISE)]
        return [(f"l{i}", f"{end:g} and below") for i, end in enumerate(ends)]
    if colour == "advantage":
        below = [("n3", "below -1"), ("n2", "to -0.3"), ("n1", "to 0")]
        return [*below, ("p0", "0"), ("p1", "above 0"), ("p2", "above 0.3"), ("p3", "above 1")]
    low, middle, high = (float(np.exp(end)) for end in DRIFT)
    below = [("n3", f"below {1 / high:.2f}"), ("n2", f"to {1 / middle:.2f}"), ("n1", f"to {1 / low:.3f}")]
    return [*below, ("p0", "1"), ("p1", f"above {low:.3f}"), ("p2", f"above {middle:.2f}"), ("p3", f"above {high:.2f}")]
