"""List environments, or check one: gymnasium's checker, seeds, solver, round trip."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import click

from longstraw_agents.terminal import json_option, write_json


@click.group()
def envs() -> None:
    """List environments, or check one of your own."""


@envs.command("list")
@json_option
def list_environments(json_path: Path | None) -> None:
    """The built-in environments, what they are, and their options."""
    import gymnasium

    from longstraw_agents.envs import BUILT_IN
    from longstraw_agents.envs.tool_env import ToolEnv

    rows: list[dict[str, Any]] = []
    for env_id in BUILT_IN:
        entry: Any = gymnasium.envs.registration.load_env_creator(BUILT_IN[env_id])
        assert isinstance(entry, type) and issubclass(entry, ToolEnv)
        summary = (importlib.import_module(entry.__module__).__doc__ or "").splitlines()[0]
        rows.append({"id": env_id, "summary": summary.partition(": ")[2], "options": dict(entry.option_defaults)})
        click.echo(f"{env_id:<30} {rows[-1]['summary']}")
        for name, value in rows[-1]["options"].items():
            click.echo(f"{'':<30}   {name} = {value!r}")
    write_json(json_path, {"environments": rows, "version": importlib.metadata.version("gymnasium")})


@envs.command("check")
@click.argument("environment", metavar="PATH|MODULE:ID|ID")
@click.option("--tasks", default=8, show_default=True, type=click.IntRange(min=1), help="Tasks of each split to go through.")
@click.option("--unsafe-no-sandbox", is_flag=True, help="Run commands of the environment with your own rights.")
@json_option
def check(environment: str, tasks: int, unsafe_no_sandbox: bool, json_path: Path | None) -> None:
    """Check the environments in a Python file, or one by its id. Exit status 1 where a check fails."""
    from longstraw_agents.envs.checking import check_environment, find_environments
    from longstraw_agents.envs.sandbox import UNSAFE_VARIABLE

    if unsafe_no_sandbox:
        os.environ[UNSAFE_VARIABLE] = "1"
    reports = {}
    for env_id in find_environments(environment):
        click.echo(env_id)
        reports[env_id] = check_environment(env_id, tasks, environment)
        for finding in reports[env_id]:
            detail = f": {finding.detail}" if finding.detail else ""
            mark = "ok  " if finding.holds and finding.checked else "--  " if finding.holds else "FAIL"
            click.echo(f"  {mark} {finding.check}{detail}")
    write_json(json_path, {env_id: [vars(finding) for finding in report] for env_id, report in reports.items()})
    if not all(finding.holds for report in reports.values() for finding in report):
        raise SystemExit(1)
