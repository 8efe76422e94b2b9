"""The viewer: a local web page on a store, to look at runs and never to change them.

Idea: every page is made on the server from the store, which is opened so that the database itself refuses to write. What a
trajectory holds is foreign text: templates escape everything, control characters are shown as escapes, and the browser is told
to run no script but the viewer's own file. Pages work without script; with it they follow a run and obey a few keys.

Who may look
    host     only requests whose Host header is an IP address, localhost, or a name that was given: a name that an attacker's
             domain server points here is refused (DNS rebinding)
    token    needed where the viewer listens beyond loopback: once in the address, from then on as a cookie; or as a Bearer token
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longstraw_agents import viewer_pages as pages
from longstraw_agents.decoding import printable
from longstraw_agents.errors import ConfigError, LongStrawError, NotStoredError
from longstraw_agents.storage import Store
from longstraw_agents.terminal import cell

FILES = Path(__file__).parent / "viewer_files"
COOKIE = "longstraw_token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class ViewerConfig:
    """Where the viewer listens, and for whom. names: host names beside IP addresses and localhost that it is reached by.

    token: at least 16 characters; needed where `host` is not of loopback.
    """

    host: str = "127.0.0.1"
    port: int = 8322
    token: str | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"a port is a number from 0 to 65535, got {self.port}")
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(f"{self.host} is not of loopback: others can reach it, so it needs a token")
        if self.token is not None and not (len(self.token) >= 16 and self.token.isascii() and self.token.isalnum()):
            raise ConfigError("a token has at least 16 letters and digits")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_app(store: Store, config: ViewerConfig = ViewerConfig()) -> Starlette:
    """The application, for any ASGI server. `store` should be opened with `StoreConfig(read_only=True)`."""
    site, templates = pages.Site(store), _environment()

    def page(template: str, make: Callable[..., Mapping[str, Any]], **named: Callable[[Request], Any]) -> Callable[..., Response]:
        def answer(request: Request) -> Response:
            values = make(site, request.query_params, **{name: read(request) for name, read in named.items()})
            link = partial(_link, request.query_params)
            return HTMLResponse(templates.get_template(template).render(values, link=link, path=request.url.path))

        return answer

    def state(request: Request) -> Response:
        text = pages.stamp(site, request.query_params.get("of", ""))
        return JSONResponse({"stamp": hashlib.blake2b(text.encode(), digest_size=12).hexdigest()})

    def part(name: str) -> Callable[[Request], Any]:
        return lambda request: request.path_params[name]

    routes = [
        Route("/", page("runs.html", pages.runs_page)),
        Route("/runs/{run}", page("run.html", pages.run_page, run_id=part("run"))),
        Route("/runs/{run}/groups", page("groups.html", pages.groups_page, run_id=part("run"))),
        Route("/runs/{run}/receipts", page("receipts.html", pages.receipts_page, run_id=part("run"))),
        Route(
            "/runs/{run}/receipts/{step:int}", page("receipt.html", pages.receipt_page, run_id=part("run"), step=part("step"))
        ),
        Route("/groups/{group}", page("group.html", pages.group_page, group_id=part("group"))),
        Route("/trajectories/{name}", page("trajectory.html", pages.trajectory_page, trajectory_id=part("name"))),
        Route("/trajectories/{name}/tokens", page("tokens.html", pages.tokens_page, trajectory_id=part("name"))),
        Route("/compare", page("compare.html", pages.compare_page, run_ids=lambda r: r.query_params.getlist("run"))),
        Route("/search", page("search.html", pages.search_page)),
        Route("/state", state),
        Mount("/static", StaticFiles(directory=FILES / "static")),
    ]

    def failed(request: Request, error: Exception) -> Response:
        status = _status(error)
        text = str(error.detail) if isinstance(error, HTTPException) else str(error)
        values = {"status": status, "text": text, "live": "", "path": request.url.path, "link": _link}
        return HTMLResponse(templates.get_template("error.html").render(values), status_code=status)

    handlers: dict[Any, Any] = {LongStrawError: failed, HTTPException: failed}
    return Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(Guard, config=config)])


def _status(error: Exception) -> int:
    if isinstance(error, HTTPException):
        return error.status_code
    return 404 if isinstance(error, NotStoredError) else 400 if isinstance(error, ConfigError) else 500


class Guard:
    """What stands before every answer: the host, the token, and headers that tell the browser to run nothing foreign."""

    def __init__(self, app: ASGIApp, config: ViewerConfig) -> None:
        self.app, self.config = app, config
        self.names = {"localhost", config.host.lower(), *(name.lower() for name in config.names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        await (self._refusal(scope) or self.app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that is not let in; also the redirect that takes the token out of the address."""
        headers, query = Headers(scope=scope), QueryParams(scope["query_string"])
        if not self._known_host(headers.get("host", "")):
            return PlainTextResponse("this host name is not known here; give it with --name\n", status_code=421)
        if self.config.token is None:
            return None
        if self._is_token(query.get("token", "")):
            rest = urlencode([(name, value) for name, value in query.multi_items() if name != "token"])
            answer = RedirectResponse(scope["path"] + (f"?{rest}" if rest else ""), status_code=303)
            answer.set_cookie(COOKIE, self.config.token, httponly=True, samesite="strict", path="/")
            return answer
        given = [Request(scope).cookies.get(COOKIE, ""), headers.get("authorization", "").removeprefix("Bearer ")]
        if not any(map(self._is_token, given)):
            return PlainTextResponse("a token is needed: open the address that `longstraw view` printed\n", status_code=401)
        return None

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), (self.config.token or "").encode())

    def _known_host(self, host: str) -> bool:
        """Whether a Host header is an IP address, localhost, or a name that was given; the port does not matter."""
        name = host.rsplit("]", 1)[0].removeprefix("[") if host.startswith("[") else host.rsplit(":", 1)[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self.names
        return True


def _environment() -> Environment:
    """Templates that escape all they are given, and show control characters instead of passing them on."""
    made = Environment(
        loader=FileSystemLoader(FILES / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=_shown,
    )  # fmt: skip
    made.filters |= {"when": _when, "digits": _digits, "percent": _percent, "json": _json}
    return made


def _shown(value: Any) -> Any:
    """What any expression of a template becomes before it is escaped."""
    if type(value) is str:  # not Markup, which is ours
        return printable(value)
    return "–" if value is None else value


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1)


def _when(seconds: float | None) -> str:
    """Seconds since 1970 as a date and a time of day, UTC."""
    return "–" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _digits(value: Any) -> str:
    """A number as the terminal shows it; a dash for none."""
    return "–" if value is None or (isinstance(value, float) and math.isnan(value)) else cell(value)


def _link(query: QueryParams, **changes: Any) -> str:
    """The page's own address with some of its settings changed; None takes one out."""
    kept = [(name, value) for name, value in query.multi_items() if name not in changes]
    return "?" + urlencode([*kept, *((name, value) for name, value in changes.items() if value is not None)])
