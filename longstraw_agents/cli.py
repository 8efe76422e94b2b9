"""The command line: `longstraw COMMAND`.

Idea: a command is a file of longstraw_agents/commands/ that exposes a click command of its own name; `longstraw show-x` lies in
commands/show_x.py. A file is imported only when its command runs, so that `longstraw --help` loads neither torch nor the store:
the line shown there is the first line of the file's docstring, read as text.
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

import click

from longstraw_agents import __version__
from longstraw_agents.errors import LongStrawError, RankError
from longstraw_agents.launch import FOLLOWED

COMMANDS = Path(__file__).parent / "commands"


class LazyGroup(click.Group):
    """A click group whose commands are the files of one folder, imported when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, sorted."""
        return sorted(path.stem.replace("_", "-") for path in COMMANDS.glob("[a-z]*.py"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command; None where there is no such file."""
        if cmd_name not in self.list_commands(ctx):
            return None
        stem = cmd_name.replace("-", "_")
        command = getattr(importlib.import_module(f"longstraw_agents.commands.{stem}"), stem)
        assert isinstance(command, click.Command), f"commands/{stem}.py must expose a click command called {stem}"
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with a suggestion for a name that is nearly right."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"no command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with the first line of their files."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(name)) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of ours is shown as its message alone."""
        try:
            return super().invoke(ctx)
        except LongStrawError as error:
            shown = click.ClickException(str(error))
            shown.exit_code = FOLLOWED if isinstance(error, RankError) else 1  # type: ignore[misc]
            raise shown from error


def _summary(name: str) -> str:
    with open(COMMANDS / f"{name.replace('-', '_')}.py", encoding="utf-8") as file:
        return file.readline().strip().strip('"')


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="longstraw")
def main() -> None:
    """Train language-model agents on long trajectories, with exact gradients."""


if __name__ == "__main__":
    main()
