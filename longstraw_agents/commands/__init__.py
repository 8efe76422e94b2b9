"""One file per command of `longstraw`; see `longstraw_agents.cli`. Here: what the commands on a run's configuration share."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from longstraw_agents.errors import ConfigError, UpdateStoppedError
from longstraw_agents.launch import launch

if TYPE_CHECKING:
    from longstraw_agents.loop import Loop

#: Exit status of a command that stopped as asked for and is to be run again (EX_TEMPFAIL of sysexits.h).
AGAIN = 75

F = TypeVar("F", bound=Callable[..., Any])


def run_options(command: F) -> F:
    """The argument CONFIG.toml and the option `--set KEY=VALUE`, passed as `configuration` and `settings`."""
    settings = click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE",
        help="Override a key of the configuration, as in --set trainer.optimizer.learning_rate=1e-4. May be repeated.",
    )  # fmt: skip
    argument = click.argument("configuration", metavar="CONFIG.toml", type=click.Path(dir_okay=False, path_type=Path))
    return argument(settings(command))


def workers_option(command: F) -> F:
    """The option `--workers threads|ray`, which is short for `--set collect.workers=...`."""

    @functools.wraps(command)
    def run(*args: Any, workers: str | None, settings: tuple[str, ...], **kwargs: Any) -> Any:
        chosen = () if workers is None else (f"collect.workers={workers}",)
        return command(*args, settings=(*settings, *chosen), **kwargs)

    option = click.option(
        "--workers", type=click.Choice(["threads", "ray"]),
        help="Where environments run: in threads here, or spread over a Ray cluster ([collect] ray_address, ray_workers).",
    )  # fmt: skip
    return option(run)  # type: ignore[return-value]


def nproc_option(command: F) -> F:
    """The option `--nproc N`: the command runs as N processes, of which this one only waits for the others."""

    @functools.wraps(command)
    def run(*args: Any, nproc: int, **kwargs: Any) -> Any:
        if nproc == 1 or "RANK" in os.environ:
            return command(*args, **kwargs)
        launch([sys.executable, "-m", "longstraw_agents.cli", *sys.argv[1:]], nproc)
        return None

    option = click.option(
        "--nproc", default=1, show_default=True, type=click.IntRange(min=1),
        help="Processes on this machine that share the updates; [parallel] in CONFIG.toml says how, by default by tokens (cp).",
    )  # fmt: skip
    return option(run)  # type: ignore[return-value]


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE pairs with values as in TOML; a value that is no TOML is taken as a string."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set takes KEY=VALUE, not {setting!r}")
        try:
            values[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.strip()] = text.strip()
    return values


@contextlib.contextmanager
def open_loop(configuration: Path, settings: Sequence[str]) -> Iterator[Loop]:
    """The loop of a configuration file, closed at the end. Ctrl-C says how to go on."""
    from longstraw_agents import config
    from longstraw_agents.loop import Loop, RunConfig, follow_loop
    from longstraw_agents.terminal import Terminal
    from longstraw_agents.trainer.ranks import among

    loaded = config.load(configuration, RunConfig, parse_settings(settings))
    quiet_libraries()
    sys.path.insert(0, os.getcwd())  # so that "module:id" finds an environment beside the configuration
    again = ["longstraw", "run", str(configuration), *(word for setting in settings for word in ("--set", setting))]
    with resumable(shlex.join(again)), among(loaded.parallel, loaded.model.device) as ranks:
        if ranks.number > 0:
            follow_loop(loaded, ranks)
            raise SystemExit(0)
        with Loop(loaded, Terminal(), ranks=ranks) as loop:
            yield loop


@contextlib.contextmanager
def resumable(command: str) -> Iterator[None]:
    """Turn Ctrl-C (status 130), and a journal's stop as asked for (75), into a line that says how to go on."""
    try:
        yield
    except UpdateStoppedError as stop:
        click.echo(f"{stop}\nGo on with: {command}", err=True)
        raise SystemExit(AGAIN) from None
    except KeyboardInterrupt:
        click.echo(f"\nstopped; all that was committed is kept. Go on with: {command}", err=True)
        raise SystemExit(130) from None


def quiet_libraries() -> None:
    """Keep the model libraries' progress bars and notices out of the output."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
