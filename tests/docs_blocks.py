"""The code blocks of README and docs: found, run, and checked. `python tests/docs_blocks.py --record` writes the figure.

Rules for pages
    ```python   all blocks of a page run in order, in one process, in an empty folder
    ```toml     must load as a run's configuration
    ```sh       each line: `longstraw ...` must parse (command, options, types), `make X` must be a target, and a
                `python FILE` must be a file of the repository
    ```sql      must run on a fresh store
    <!-- not run: REASON --> before a block leaves it out of the run, never out of sight
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]*?) -->\n)?^(?P<indent> *)```(?P<kind>\w+)[^\n]*\n(?P<body>.*?)^ *```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its page, its line, its language, its text, and why it is not run."""

    page: Path
    line: int
    kind: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """README and all pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page that name a language."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        body = "\n".join(line.removeprefix(match["indent"]) for line in match["body"].splitlines()) + "\n"
        yield Block(page, text[: match.start("body")].count("\n") + 1, match["kind"], body, match["reason"])


def python_program(page: Path) -> str:
    """The page's Python blocks as one program, with line numbers that match the page; empty where there is none."""
    lines: list[str] = []
    for block in blocks(page):
        if block.kind == "python" and block.reason is None:
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n" if lines else ""


def run_python(page: Path, folder: Path) -> str:
    """Run a page's program in `folder` and return what went wrong, or an empty string."""
    program = python_program(page)
    if not program:
        return ""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LONGSTRAW_DOCS": "1"}
    script = folder / page.with_suffix(".py").name
    script.write_text(program, encoding="utf-8")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    return done.stderr[-2000:] if done.returncode else ""


def check_toml(block: Block) -> str:
    """What is wrong with a configuration block, or an empty string."""
    from longstraw_agents import config, loop

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(block.text, encoding="utf-8")
        try:
            config.load(path, loop.RunConfig)
        except Exception as error:
            return f"{block}: {error}"
    return ""


def check_sql(block: Block) -> str:
    """What is wrong with a query, or an empty string."""
    import sqlite3

    from longstraw_agents.storage import Store

    with tempfile.TemporaryDirectory() as folder:
        Store.open(f"{folder}/store.sqlite").close()
        connection = sqlite3.connect(f"{folder}/store.sqlite")
        try:
            connection.execute(block.text, {"run": 1})
        except sqlite3.Error as error:
            return f"{block}: {error}"
        finally:
            connection.close()
    return ""


def check_shell(block: Block) -> list[str]:
    """What is wrong with the commands of a shell block."""
    faults = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        fault = _check_command(words) if words else ""
        if fault:
            faults.append(f"{block}: {line.strip()}: {fault}")
    return faults


def _check_command(words: list[str]) -> str:
    if words[0] == "longstraw":
        return _check_longstraw(words[1:])
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        return "" if all(word in targets for word in words[1:] if "=" not in word) else "no such target"
    if words[0].startswith("python") or words[0] == "torchrun":
        script = next((word for word in words[1:] if word.endswith(".py")), None)
        return "" if script is None or (ROOT / script).exists() else f"no file {script}"
    return ""


def _check_longstraw(arguments: list[str]) -> str:
    """Parse as the command line would, without running; files need not exist."""
    from longstraw_agents.cli import main

    command: click.Command = main
    context = click.Context(main, info_name="longstraw")
    try:
        while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
            found = command.get_command(context, arguments[0])
            if found is None:
                return f"no command {arguments[0]}"
            command, arguments = found, arguments[1:]
            context = click.Context(command, info_name=command.name, parent=context)
        parser = command.make_parser(context)
        _, left, _ = parser.parse_args(list(arguments))
        return f"unexpected {left}" if left else ""
    except click.UsageError as error:
        return error.format_message()


def main() -> None:
    """Check everything, print the faults, and record their number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write operate.docs_blocks_failing")
    arguments = parser.parse_args()
    faults, count = [], 0
    for page in pages():
        found = [block for block in blocks(page) if block.reason is None]
        count += len(found)
        faults += [fault for block in found if block.kind == "sh" for fault in check_shell(block)]
        faults += [fault for block in found if block.kind == "toml" and (fault := check_toml(block))]
        faults += [fault for block in found if block.kind == "sql" and (fault := check_sql(block))]
        with tempfile.TemporaryDirectory() as folder:
            fault = run_python(page, Path(folder))
        if fault:
            faults.append(f"{page.relative_to(ROOT)}: {fault}")
    print("\n".join(faults + [f"{count} blocks, {len(faults)} faults"]))
    if arguments.record:
        from longstraw_agents import figures

        figures.record("operate.docs_blocks_failing", len(faults), "blocks", trials=count)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
