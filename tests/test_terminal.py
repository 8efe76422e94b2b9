"""What commands write: a live line on a terminal, plain lines elsewhere, tables with one head, numbers as people read them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from longstraw_agents.terminal import Progress, Terminal, cell, duration, sparkline, write_json


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_rewritten_and_cleared() -> None:
    screen = Screen()
    progress = Progress("collect", 4, "episodes", stream=screen)
    progress.shown = 0.0
    progress.update(2, "reward 0.5")
    progress.update(4)
    progress.close()
    text = screen.getvalue()
    assert "\n" not in text and text.endswith("\r\x1b[K")
    assert "collect  2/4 episodes" in text and "left" in text and "reward 0.5" in text and "4/4" in text


def test_a_log_file_gets_plain_lines_now_and_then() -> None:
    log = io.StringIO()
    progress = Progress("collect", 4, "episodes", stream=log, quiet_seconds=0.0)
    progress.update(1)
    progress.update(2)
    progress.close()
    assert "\x1b" not in log.getvalue() and "\r" not in log.getvalue()
    assert [line.split("/")[0] for line in log.getvalue().splitlines()] == ["collect  1", "collect  2", "collect  2"]
    silent = io.StringIO()
    progress = Progress("collect", 4, "episodes", stream=silent, quiet_seconds=1000.0)
    progress.update(4)
    progress.close()
    assert silent.getvalue() == ""


def test_a_table_has_its_head_once_and_again_after_other_lines() -> None:
    out = io.StringIO()
    terminal = Terminal(out)
    terminal.row({"update": 1, "reward": 0.25})
    terminal.row({"update": 2, "reward": None})
    terminal.say("a line")
    terminal.row({"update": 3, "reward": 1.0})
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines == [["update", "reward"], ["1", "0.25"], ["2", "-"], ["a", "line"], ["update", "reward"], ["3", "1"]]


def test_styles_reach_terminals_only() -> None:
    log, screen = io.StringIO(), Screen()
    for stream in (log, screen):
        Terminal(stream).say("\x1b[2mfaint\x1b[0m")
    assert log.getvalue() == "faint\n" and screen.getvalue() == "\x1b[2mfaint\x1b[0m\n"


def test_a_silent_terminal_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal.silent()
    terminal.say("x")
    terminal.row({"a": 1})
    progress = terminal.progress("p", 2, "u")
    progress.update(2)
    progress.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (3600, "1 h 0 min"), (7500, "2 h 5 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_cells_and_curves() -> None:
    assert [cell(value) for value in (1234567, 0.123456, None, True, "x")] == ["1,234,567", "0.1235", "-", "True", "x"]
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" and sparkline([2.0, 2.0]) == "▁▁" and sparkline([]) == ""


def test_json_is_written_where_asked_and_folders_are_made(tmp_path: Path) -> None:
    write_json(None, {"a": 1})
    write_json(tmp_path / "new" / "report.json", {"path": Path("x"), "value": 1.5})
    assert json.loads((tmp_path / "new" / "report.json").read_text()) == {"path": "x", "value": 1.5}
