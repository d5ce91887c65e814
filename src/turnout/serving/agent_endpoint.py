"""The OpenAI-compatible endpoint of one trajectory: a port of its own on loopback, and a secret in its path.

Promises: it is there while the block runs and no longer; nobody who was not told its address is answered; what goes
wrong in an answer is told in OpenAI's shape, and clients are told not to try again by themselves.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web

from turnout.core.errors import TurnoutError
from turnout.protocol.openai_chat import (
    ChatAnswer,
    ChatRefused,
    ChatRequest,
    chunks,
    completion,
    parse_chat,
)

BODY_BYTES_MAX = 64 << 20
RETRY_HEADER = "x-stainless-retry-count"  # of OpenAI's clients: how often they sent this already
NO_RETRY = {"x-should-retry": "false"}
ENDS_S = 0.01  # for requests in flight at the end; 0 would be without a limit
Gone = Callable[[], bool]  # whether the client that asked has left
Answerer = Callable[[ChatRequest, Gone], Awaitable[ChatAnswer]]


@asynccontextmanager
async def agent_endpoint(answerer: Answerer, model: str) -> AsyncIterator[str]:
    """The base URL under which `answerer` answers, as OpenAI's clients take it."""
    secret = secrets.token_urlsafe(24)
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    endpoint = _Endpoint(answerer, model)
    app.add_routes(
        [
            web.post(f"/{secret}/v1/chat/completions", endpoint.chat),
            web.get(f"/{secret}/v1/models", endpoint.models),
            web.route("*", f"/{secret}/{{path:.*}}", endpoint.unknown),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=ENDS_S, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/{secret}/v1"
    finally:
        await runner.cleanup()


class _Endpoint:
    def __init__(self, answerer: Answerer, model: str) -> None:
        self._answerer, self._model = answerer, model

    async def chat(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = parse_chat(await _row(request), request.headers.get(RETRY_HEADER, "0") != "0")
            answer = await self._answerer(asked, partial(_gone, request))
        except ChatRefused as fault:
            return web.json_response(fault.row, status=fault.status, headers=NO_RETRY)
        except TurnoutError as fault:  # the trajectory's own end, told to its agent as well
            row = ChatRefused(str(fault), "sample_failed").row
            return web.json_response(row, status=500, headers=NO_RETRY)
        if not asked.stream:
            return web.json_response(completion(answer))
        told = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await told.prepare(request)
        for event in (*chunks(answer, asked.include_usage), "[DONE]"):
            await told.write(f"data: {event}\n\n".encode())
        await told.write_eof()
        return told

    async def models(self, _request: web.Request) -> web.Response:
        card = {"id": self._model, "object": "model", "created": 0, "owned_by": "turnout"}
        return web.json_response({"object": "list", "data": [card]})

    async def unknown(self, request: web.Request) -> web.Response:
        fault = ChatRefused(
            f"{request.match_info['path']} is not served: only chat completions are", "not_found"
        )
        return web.json_response(fault.row, status=404, headers=NO_RETRY)


def _gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


async def _row(request: web.Request) -> Any:
    try:
        return await request.json()
    except (ValueError, LookupError, RecursionError) as fault:
        raise ChatRefused(f"the body is no JSON: {fault}") from None
    except web.HTTPRequestEntityTooLarge:
        raise ChatRefused(f"the body has more than {BODY_BYTES_MAX} bytes", status=413) from None
