"""What all commands share in the terminal: `--json PATH`, and progress that is plain lines when nobody watches.

Idea: a person sees a live line, a log file sees one line per event, and a machine reads the JSON file; no command prints JSON
among its prose.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
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
