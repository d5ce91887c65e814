"""A proxy before a real engine that lies in one way, to see that the conformance kit notices."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

Row = dict[str, Any]


@dataclass(frozen=True)
class Passed:
    """What a lie may answer in the engine's place."""

    status: int
    row: Any


Ask = Callable[[str, Row], Awaitable[tuple[int, Any]]]
# (path, body, ask) -> what the engine is asked instead (a body), or what is answered in its place
OnRequest = Callable[[str, Row, Ask], Awaitable[Row | Passed]]
OnReply = Callable[[str, Row, int, Any], tuple[int, Any]]


@dataclass(frozen=True)
class Lie:
    """One way to lie: about requests, about replies, or by going on when the client has left."""

    request: OnRequest | None = None
    reply: OnReply | None = None
    deaf: bool = False


class LyingEngine:
    """`async with LyingEngine(url, lie) as engine:`; `engine.url` is where it serves."""

    def __init__(self, upstream: str, lie: Lie) -> None:
        self._upstream, self._lie = upstream, lie
        self.url = ""

    async def __aenter__(self) -> LyingEngine:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=not self._lie.deaf, shutdown_timeout=1.0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        try:
            body = json.loads(data) if data else {}
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return _response(*await self._forward(request.method, request.path, data))
        if self._lie.request is not None:
            changed = await self._lie.request(request.path, body, self._ask)
            if isinstance(changed, Passed):
                return _response(changed.status, changed.row)
            body = changed
        sent = json.dumps(body).encode() if data else None
        status, row = await self._forward(request.method, request.path, sent)
        if self._lie.reply is not None:
            status, row = self._lie.reply(request.path, body, status, row)
        return _response(status, row)

    async def _ask(self, path: str, body: Row) -> tuple[int, Any]:
        return await self._forward("POST", path, json.dumps(body).encode())

    async def _forward(self, method: str, path: str, data: bytes | None) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"} if data else {}
        async with self._session.request(method, self._upstream + path, data=data, headers=headers) as answer:
            text = await answer.text()
        try:
            return answer.status, json.loads(text) if text else ""
        except ValueError:
            return answer.status, text


def _response(status: int, row: Any) -> web.Response:
    return (
        web.Response(text=row, status=status)
        if isinstance(row, str)
        else web.json_response(row, status=status)
    )
