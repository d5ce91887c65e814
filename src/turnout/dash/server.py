"""The dashboard's web server: a page of three files, and JSON. It changes nothing, in the run or its files.

Promises: beyond loopback every call needs the token, compared in constant time; on loopback only calls that name a
loopback host are answered, so that no page of another site reads a run through a name that it points here; the page
runs its own script only (Content-Security-Policy) and puts texts of a model in as text. Files and ledger are read
on one thread; a call that takes longer than CALL_S ends as 503.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

from aiohttp import web

from turnout.core.address import Address
from turnout.core.errors import ConfigError, DeadlineExceeded, Fault, TurnoutError
from turnout.dash.source import RunSource
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger_list import LIMIT, Wanted

T = TypeVar("T")
CALL_S = 30.0
MAX_TEXT = 500
GROUP_ID = re.compile(r"g\d{8,12}\.\d{1,6}")
PAGE = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/dom.js": ("dom.js", "text/javascript"),
    "/views.js": ("views.js", "text/javascript"),
    "/lanes.js": ("lanes.js", "text/javascript"),
    "/trajectories.js": ("trajectories.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class DashSettings:
    """Where it listens. `token` is needed beyond loopback; port 0 is any that is free."""

    host: str = "127.0.0.1"
    port: int = 7860
    token: str | None = None

    def check(self) -> None:
        """Raises ConfigError."""
        if not 0 <= self.port < 65536:
            raise ConfigError(Fault("--port", str(self.port), "must be from 0 to 65535"))
        if not Address(self.host, self.port).loopback and not self.token:
            remedy = "name the variable that holds one with --token-env, or bind to 127.0.0.1"
            raise ConfigError(Fault("--host", self.host, "beyond loopback a token is needed", remedy))


class DashServer:
    """See the module."""

    def __init__(self, source: RunSource, settings: DashSettings) -> None:
        settings.check()
        self._source, self._settings = source, settings
        self._thread = ThreadPoolExecutor(1, "dash")
        self._views: dict[str, Callable[[int], dict[str, Any]]] = {
            "overview": source.series,
            "distributions": source.shapes,
            "versions": source.versions,
            "health": source.health,
            "states": source.states,
        }

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 16)
        for path in PAGE:
            app.router.add_get(path, self._page)
        app.router.add_get("/api/live/{view}", self._live)
        app.router.add_get("/api/lanes", self._lanes)
        app.router.add_get("/api/groups", self._groups)
        app.router.add_get("/api/groups/{group}", self._group)
        app.router.add_get("/api/groups/{group}/members/{member}", self._member)
        app.cleanup_ctx.append(self._reading)
        return app

    async def _reading(self, _app: web.Application) -> AsyncIterator[None]:
        """Reads what there is at the start, so that the first view finds it; then what is asked for reads on."""
        task = asyncio.ensure_future(self._catch_up())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._thread.submit(self._source.close)
            self._thread.shutdown(wait=True, cancel_futures=False)

    async def _catch_up(self) -> None:
        while await self._call(lambda: self._source.reader.advance() and self._source.reader.progress < 1):
            pass

    async def _call(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(loop.run_in_executor(self._thread, work), CALL_S)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._settings.token is not None:
            if not self._authorised(request):
                asked = {"WWW-Authenticate": 'Basic realm="turnout dash: any user, the token as password"'}
                return web.json_response(
                    {"error": "the token is needed"}, status=401, headers=HEADERS | asked
                )
        elif not Address(_host(request.host), 0).loopback:
            return web.json_response({"error": "not a loopback host"}, status=403, headers=HEADERS)
        try:
            answer = await handler(request)
        except web.HTTPException as fault:
            return web.json_response({"error": fault.reason}, status=fault.status, headers=HEADERS)
        except (OSError, DeadlineExceeded) as fault:  # TimeoutError is one
            return web.json_response({"error": str(fault) or "took too long"}, status=503, headers=HEADERS)
        except TurnoutError as fault:
            return web.json_response({"error": str(fault)}, status=409, headers=HEADERS)
        answer.headers.update(HEADERS)
        return answer

    def _authorised(self, request: web.Request) -> bool:
        """By a bearer token, or as the password of a browser's dialogue."""
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except ValueError:  # no base64, or no text
                return False
        elif kind.lower() != "bearer":
            return False
        token = self._settings.token or ""
        return hmac.compare_digest(*(text.encode("utf-8", "surrogateescape") for text in (given, token)))

    async def _page(self, request: web.Request) -> web.Response:
        name, kind = PAGE[request.path]
        body = (resources.files("turnout.dash") / "page" / name).read_bytes()
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def _live(self, request: web.Request) -> web.Response:
        """A view, or what has changed of it since (epoch, revision)."""
        view = self._views.get(request.match_info["view"])
        if view is None:
            raise web.HTTPNotFound(reason="there is no such view")
        epoch, since = _number(request, "epoch", -1), _number(request, "revision", 0)
        return _answer(await self._call(lambda: self._read(view, epoch, since)))

    def _read(self, view: Callable[[int], dict[str, Any]], epoch: int, since: int) -> dict[str, Any]:
        reader = self._source.reader
        reader.advance()
        whole = epoch != reader.epoch
        revision = reader.picture.revision
        row: dict[str, Any] = {"epoch": reader.epoch, "revision": revision, "whole": whole}
        row |= {"width": reader.picture.bins.width, "head": self._source.head()}
        if whole or revision != since:
            found = view(0 if whole else since)
            row |= {
                "view": found,
                "revision": found.pop("revision", revision),
            }  # an older one is asked for again
        return row

    async def _lanes(self, request: web.Request) -> web.Response:
        start, end = _seconds(request, "start"), _seconds(request, "end")
        return _answer(await self._call(lambda: self._source.lanes(start, end)))

    async def _groups(self, request: web.Request) -> web.Response:
        state, cause, below = (request.query.get(key) for key in ("state", "cause", "below"))
        if state is not None and state not in {one.value for one in GroupState}:
            raise web.HTTPBadRequest(reason="state: there is no such state")
        if cause is not None and len(cause) > MAX_TEXT:
            raise web.HTTPBadRequest(reason="cause: too long")
        if below is not None:
            _checked(below)
        step = _number(request, "step", -1)
        limit = max(1, min(LIMIT, _number(request, "limit", 50)))
        found = None if state is None else GroupState(state)
        wanted = Wanted(found, cause, None if step < 0 else step, below, limit)
        slowest = request.query.get("order") == "slowest"
        return _answer(await self._call(lambda: self._source.groups(wanted, slowest)))

    async def _group(self, request: web.Request) -> web.Response:
        name = _checked(request.match_info["group"])
        return _answer(_there(await self._call(lambda: self._source.group(name))))

    async def _member(self, request: web.Request) -> web.Response:
        name, member = _checked(request.match_info["group"]), request.match_info["member"]
        if not member.isascii() or not member.isdecimal() or len(member) > 6:
            raise web.HTTPBadRequest(reason="member: must be a number")
        first = max(0, _number(request, "first", 0))
        return _answer(_there(await self._call(lambda: self._source.tokens(name, int(member), first))))


def _host(text: str) -> str:
    """Of a Host header, without its port and brackets."""
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]


def _checked(group: str) -> str:
    if not GROUP_ID.fullmatch(group):
        raise web.HTTPBadRequest(reason="group: write g00000012.0")
    return group


def _number(request: web.Request, key: str, otherwise: int) -> int:
    text = request.query.get(key)
    if text is None:
        return otherwise
    if not re.fullmatch(r"-?[0-9]{1,15}", text):
        raise web.HTTPBadRequest(reason=f"{key}: must be a whole number")
    return int(text)


def _seconds(request: web.Request, key: str) -> float | None:
    text = request.query.get(key)
    if text is not None and not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", text):
        raise web.HTTPBadRequest(reason=f"{key}: must be seconds")
    return None if text is None else float(text)


def _there(found: dict[str, Any] | None) -> dict[str, Any]:
    if found is None:
        raise web.HTTPNotFound(reason="the ledger has no such group, or no tokens of this member")
    return found


def _answer(value: dict[str, Any]) -> web.Response:
    return web.Response(text=json.dumps(value, separators=(",", ":")), content_type="application/json")
