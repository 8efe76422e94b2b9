"""The command line without its commands: help that loads nothing, suggestions, errors as messages."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from longstraw_agents import cli
from longstraw_agents.errors import ConfigError

HEAVY = ("torch", "transformers", "sqlalchemy", "gymnasium", "numpy", "longstraw_agents.loop")


def test_help_lists_all_commands_without_importing_them() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom longstraw_agents import cli\n"
        "result = CliRunner().invoke(cli.main, ['--help'])\nassert result.exit_code == 0, result.output\nprint(result.output)\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\nassert not loaded, loaded\n"
        "assert not [name for name in sys.modules if name.startswith('longstraw_agents.commands.')]\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    for path in cli.COMMANDS.glob("[a-z]*.py"):
        assert path.stem.replace("_", "-") in output.stdout


@pytest.mark.parametrize("name", [path.stem for path in sorted(cli.COMMANDS.glob("[a-z]*.py"))])
def test_each_command_has_help_and_a_first_line(name: str) -> None:
    result = CliRunner().invoke(cli.main, [name.replace("_", "-"), "--help"])
    assert result.exit_code == 0, result.output
    assert len(cli._summary(name)) > 20


def test_a_command_nearly_right_is_suggested() -> None:
    result = CliRunner().invoke(cli.main, ["figurs"])
    assert result.exit_code == 2
    assert "Did you mean 'figures'?" in result.output


def test_errors_of_ours_are_shown_as_their_message(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        raise ConfigError("steps must be at least 1, not 0")

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: broken)
    result = CliRunner().invoke(cli.main, ["broken"])
    assert result.exit_code == 1
    assert result.output == "Error: steps must be at least 1, not 0\n"
