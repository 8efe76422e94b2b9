"""The capture proxy: an agent program's model calls, served by a policy and recorded as token-exact trajectories.

Idea: the program is not changed. A session is opened, the program is started with the session's base URL as its API's, and at
the end the reward is posted. In between it speaks OpenAI's chat or responses interface, streaming or not.

    POST /sessions                         {"task": {"env_id", "seed", "split", "options"}, "size": 8} or {"group": "g1"}
                                           -> {"session", "group", "member", "base_url"}
    POST /sessions/S/v1/chat/completions   as OpenAI's
    POST /sessions/S/v1/responses          as OpenAI's
    GET  /sessions/S/v1/models             as OpenAI's
    POST /sessions/S/reward                {"reward": 1.0, "success": true, "parts": {}}, reward null for a failed episode

Temperature and top-p are the run's: a call that asks for others is answered with the run's, and the reply's header
`x-longstraw-overruled` says so.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from longstraw_agents import wire
from longstraw_agents.errors import LongStrawError, NotStoredError, PolicyError, StoreError
from longstraw_agents.recorder import Recorder
from longstraw_agents.transcripts import Entry
from longstraw_agents.types import Task

Handler = Callable[[Request], Awaitable[Response]]


class Proxy:
    """The routes over one recorder. `model` is the name that replies carry; programs may ask for any."""

    def __init__(self, recorder: Recorder, *, model: str = "longstraw") -> None:
        self.recorder, self.model = recorder, model
        self._answered = 0
        self._histories: dict[str, tuple[Entry, ...]] = {}  # what a previous_response_id stands for

    def app(self) -> Starlette:
        """The application, for any ASGI server."""
        session = "/sessions/{session}"
        return Starlette(
            routes=[
                Route("/sessions", _answered(self.open), methods=["POST"]),
                Route(f"{session}/reward", _answered(self.reward), methods=["POST"]),
                Route(f"{session}/v1/models", _answered(self.models), methods=["GET"]),
                Route(f"{session}/v1/chat/completions", _answered(self.chat), methods=["POST"]),
                Route(f"{session}/v1/responses", _answered(self.responses), methods=["POST"]),
            ]
        )

    async def open(self, request: Request) -> Response:
        """POST /sessions."""
        body = await _body(request)
        given = body.get("task")
        task = Task(**given) if given is not None else None
        session = self.recorder.open(task, group_id=body.get("group"), size=int(body.get("size", 1)))
        base = f"{str(request.base_url).rstrip('/')}/sessions/{session.session_id}/v1"
        opened = {"session": session.session_id, "group": session.group_id, "member": session.member, "base_url": base}
        return JSONResponse(opened, status_code=201)

    async def reward(self, request: Request) -> Response:
        """POST /sessions/S/reward."""
        body = await _body(request)
        reward = None if body["reward"] is None else float(body["reward"])
        parts = {str(name): float(value) for name, value in (body.get("parts") or {}).items()}
        name = request.path_params["session"]
        count = await self.recorder.finish(name, reward, reward_parts=parts, success=body.get("success"))
        return JSONResponse({"session": name, "trajectories": count})

    async def models(self, request: Request) -> Response:
        """GET /sessions/S/v1/models."""
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "longstraw"}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        """POST /sessions/S/v1/chat/completions."""
        body = await _body(request)
        asked = wire.chat_request(body, self.recorder.config.sampling)
        reply = await self.recorder.answer(request.path_params["session"], asked.entries, asked.max_tokens)
        identity = self._identity("chatcmpl")
        if asked.stream:
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return _stream(wire.chat_events(reply, identity, self.model, with_usage=with_usage), asked)
        return JSONResponse(wire.chat_reply(reply, identity, self.model), headers=_headers(asked))

    async def responses(self, request: Request) -> Response:
        """POST /sessions/S/v1/responses."""
        body = await _body(request)
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self._histories:
            raise NotStoredError(f"there is no response {previous!r}")
        sampling = self.recorder.config.sampling
        asked = wire.responses_request(body, self._histories.get(previous or "", ()), sampling)
        reply = await self.recorder.answer(request.path_params["session"], asked.entries, asked.max_tokens)
        identity = self._identity("resp")
        said = [entry for entry in asked.entries if not (entry.role == "system" and entry.content == body.get("instructions"))]
        self._histories[identity] = (*said, reply.entry)
        if asked.stream:
            return _stream(wire.responses_events(reply, identity, self.model, body, sampling), asked)
        return JSONResponse(wire.responses_reply(reply, identity, self.model, body, sampling), headers=_headers(asked))

    def _identity(self, kind: str) -> str:
        self._answered += 1
        return f"{kind}-{self._answered}"


async def _body(request: Request) -> dict[str, Any]:
    body = json.loads(await request.body() or b"{}")
    if not isinstance(body, dict):
        raise TypeError("the body must be a JSON object")
    return body


def _stream(events: Iterable[str], asked: wire.Asked) -> Response:
    return StreamingResponse(iter(list(events)), media_type="text/event-stream", headers=_headers(asked))


def _headers(asked: wire.Asked) -> dict[str, str]:
    """Says what was overruled, for whoever looks."""
    return {"x-longstraw-overruled": ", ".join(asked.overruled)} if asked.overruled else {}


def _answered(handler: Handler) -> Handler:
    """Errors as the API's clients expect them; those that a second try may mend are 503, which clients try again."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except NotStoredError as error:
            return _refusal(404, error)
        except PolicyError as error:
            return _refusal(503, error)
        except StoreError as error:
            return _refusal(500, error)
        except (LongStrawError, KeyError, TypeError, ValueError, AttributeError) as error:
            return _refusal(400, error)

    return answer


def _refusal(status: int, error: Exception) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = str(error) if isinstance(error, LongStrawError) else f"the request is malformed: {type(error).__name__}: {error}"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status_code=status)
