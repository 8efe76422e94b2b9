"""Serve a run's newest weights to an agent program that speaks OpenAI's API, and record its episodes."""

from __future__ import annotations

from pathlib import Path

import click

from longstraw_agents.commands import open_loop, run_options


@click.command()
@run_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on. There is no authentication.")
@click.option("--port", default=8321, show_default=True, help="Port to listen on.")
@click.option("--cancel-open", is_flag=True, help="First finish, as cancelled, what an earlier process of this run left open.")
def proxy(configuration: Path, settings: tuple[str, ...], host: str, port: int, cancel_open: bool) -> None:
    """Serve the newest weights of CONFIG.toml; episodes become groups of its run, for `longstraw train`.

    POST /sessions opens an episode and gives the base URL that the program is started with; POST /sessions/S/reward ends it.
    """
    import uvicorn

    from longstraw_agents.proxy import Proxy
    from longstraw_agents.recorder import Recorder, RecorderConfig

    with open_loop(configuration, settings) as loop:
        limits = loop.config.collect
        config = RecorderConfig(limits.sampling, limits.max_action_tokens, limits.max_trajectory_tokens, loop.config.run.seed)
        recorder = Recorder(loop.store, loop.policy, loop.renderer, loop.run_id, config)
        if cancel_open:
            loop.terminal.say(f"cancelled {recorder.cancel_open()} open trajectories")
        loop.terminal.say(f"run {loop.config.run.name}, version {loop.policy.version}: POST http://{host}:{port}/sessions")
        uvicorn.run(Proxy(recorder, model=loop.config.run.name).app(), host=host, port=port, log_level="warning")
