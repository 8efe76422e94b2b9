"""What all commands share in the terminal: `--json PATH`, and progress that is plain lines when nobody watches.

Idea: a person sees a live line, a log file sees one line per event, and a machine reads the JSON file; no command prints JSON
among its prose.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """The option `--json PATH`, passed to the command as `json_path`."""
    option = click.option(
        "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), default=None,
        help="Write the figures of this command to a JSON file.",
    )  # fmt: skip
    return option(command)


def write_json(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report for machines, where one was asked for; folders are made."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")


class Progress:
    """One line that is rewritten while `done` of `total` grows, with the rate and the time left.

    Where the stream is no terminal, a plain line is printed at most every `quiet_seconds`, and one at the end.
    """

    def __init__(self, label: str, total: int, unit: str, stream: TextIO | None = None, quiet_seconds: float = 30.0) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.stream = stream if stream is not None else sys.stderr
        self.quiet_seconds = quiet_seconds
        self.started = self.shown = time.monotonic()
        self.done = 0.0
        self.note = ""

    def update(self, done: float, note: str = "") -> None:
        """Set how much is done; `note` is shown at the end of the line."""
        self.done, self.note = done, note
        now = time.monotonic()
        if self.stream.isatty():
            if now - self.shown >= 0.1 or done >= self.total:
                self.stream.write("\r\x1b[K" + self.line())
                self.stream.flush()
                self.shown = now
        elif now - self.shown >= self.quiet_seconds:
            print(self.line(), file=self.stream, flush=True)
            self.shown = now

    def line(self) -> str:
        """The line as text: label, done of total, rate, time left."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        rate = self.done / seconds
        left = duration((self.total - self.done) / rate) if rate > 0 else "?"
        text = f"{self.label}  {self.done:g}/{self.total} {self.unit}  {rate:.3g}/s  {left} left"
        return f"{text}  {self.note}" if self.note else text

    def close(self) -> None:
        """Clear the live line, or print the last plain one if a plain one was printed before."""
        if self.stream.isatty():
            self.stream.write("\r\x1b[K")
            self.stream.flush()
        elif self.shown > self.started:
            print(self.line(), file=self.stream, flush=True)


def duration(seconds: float) -> str:
    """Seconds as "8 s", "3 min 20 s" or "2 h 5 min"."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Terminal:
    """Where a command writes for people: lines, a table that grows, and one progress line below them."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.stream = stream if stream is not None else sys.stdout
        self.quiet = quiet
        self._columns: tuple[str, ...] = ()

    @classmethod
    def silent(cls) -> Terminal:
        """One that writes nothing: for use as a library."""
        return cls(quiet=True)

    def say(self, text: str = "") -> None:
        """A line."""
        self._columns = ()
        self._print(text)

    def row(self, values: Mapping[str, Any]) -> None:
        """A row of a table; the head is written where the columns change."""
        if tuple(values) != self._columns:
            self._print("  ".join(f"{name:>{_width(name)}}" for name in values))
            self._columns = tuple(values)
        self._print("  ".join(f"{cell(value):>{_width(name)}}" for name, value in values.items()))

    def progress(self, label: str, total: int, unit: str) -> Progress:
        """A progress line. On a terminal it is the line below the last one; elsewhere a plain line now and then."""
        return Progress(label, total, unit, stream=self.stream if not self.quiet else _Nowhere(), quiet_seconds=30.0)

    def _print(self, text: str) -> None:
        if not self.quiet:
            click.echo(text, file=self.stream)  # leaves styles out where the stream is no terminal
            self.stream.flush()


class _Nowhere(io.StringIO):
    """A stream that forgets."""

    def write(self, text: str, /) -> int:
        """Forgets the text; returns its length, as a stream does."""
        return len(text)


def cell(value: Any) -> str:
    """A value as a table shows it: four digits of a fraction, whole numbers with separators, a dash for nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,d}" if isinstance(value, int) else f"{value:.4g}"


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line of text: eight heights between the lowest and the highest value."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (value - low) / span))] for value in values)


def _width(name: str) -> int:
    return max(len(name), 7)
