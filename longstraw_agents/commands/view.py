"""Look at a store in the browser: runs, curves, groups, trajectories, trees; read-only."""

from __future__ import annotations

import click


@click.command()
@click.argument("url")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on. Beyond loopback a token is needed.")
@click.option("--port", default=8322, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option("--token", help="The token that readers need; made up and printed where it is needed and not given.")
@click.option("--name", "names", multiple=True, help="A host name by which this machine is reached. May be repeated.")
def view(url: str, host: str, port: int, token: str | None, names: tuple[str, ...]) -> None:
    """Serve pages on the store at URL until Ctrl-C. The store is opened read-only; runs may go on meanwhile."""
    import contextlib
    import secrets
    import socket

    from longstraw_agents.errors import ConfigError
    from longstraw_agents.storage import Store, StoreConfig
    from longstraw_agents.terminal import Terminal

    try:
        import uvicorn

        from longstraw_agents.viewer import ViewerConfig, is_loopback, make_app
    except ImportError as error:
        raise ConfigError(f"the viewer needs {error.name}: pip install 'longstraw-agents[viewer]'") from error

    token = token or (None if is_loopback(host) else secrets.token_hex(16))
    config = ViewerConfig(host, port, token, names)
    with Store.open(url, create=False, config=StoreConfig(read_only=True)) as store:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as listening:
            shown = f"[{host}]" if ":" in host else host
            query = f"/?token={token}" if token else "/"
            Terminal().say(f"http://{shown}:{listening.getsockname()[1]}{query}   (Ctrl-C ends it)")
            server = uvicorn.Server(uvicorn.Config(make_app(store, config), log_level="warning", access_log=False))
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it ends
                server.run(sockets=[listening])
