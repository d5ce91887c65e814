"""Control calls: abort, pause, continue, flush. Beyond loopback each control call needs the admin token.

`ControlCalls` is what every group of control calls is built on: the server asks for the token before any handler
of such a class. Promises: bodies are bounded; a refusal changes nothing and says why.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from turnout.core.errors import EngineBusy, Fault, UserError, WeightError
from turnout.engine.loop import ComputeThread
from turnout.engine.requests import parse_abort, parse_object, parse_pause, parse_timeout
from turnout.placement.parent import Owner

CONTROL_BODY_MAX = 1 << 20
COMMAND_DEADLINE_S = 60.0
FLUSH_POLL_S = 0.05


class ControlCalls:
    """Handlers of control calls of one engine."""

    def __init__(self, compute: ComputeThread) -> None:
        self.compute, self.settings = compute, compute.settings

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    def authorised(self, request: web.Request) -> bool:
        """Whether the call may control: always without a token (then the host is loopback)."""
        token = self.settings.admin_token
        given = request.headers.get("Authorization", "")
        asked = given.encode("utf-8", "surrogateescape")  # aiohttp decodes headers that way
        return token is None or hmac.compare_digest(asked, f"Bearer {token}".encode())

    async def row(self, request: web.Request, limit: int = CONTROL_BODY_MAX) -> dict[str, Any]:
        """The body as a JSON object; 413 above `limit` bytes."""
        body = bytearray()
        async for part in request.content.iter_chunked(1 << 16):
            body += part
            if len(body) > limit:
                raise web.HTTPRequestEntityTooLarge(limit, len(body))
        return parse_object(bytes(body))


class Control(ControlCalls):
    """Handlers of calls about requests and their KV."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/abort_request", self.abort),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.get("/flush_cache", self.flush),
            web.post("/flush_cache", self.flush),
        ]

    async def abort(self, request: web.Request) -> web.Response:
        rid = parse_abort(await self.row(request))
        if rid is None:
            ended = await self.compute.do(lambda c: c.abort_all("aborted by a call"), COMMAND_DEADLINE_S)
        else:
            ended = await self.compute.do(lambda c: c.abort(rid, "aborted by a call"), COMMAND_DEADLINE_S)
        return web.json_response({"aborted": ended})

    async def pause(self, request: web.Request) -> web.Response:
        mode = parse_pause(await self.row(request))
        held = await self.compute.do(lambda c: c.pause(mode), COMMAND_DEADLINE_S)
        return web.json_response({"message": f"paused, mode {mode}", "status": "ok", "requests": held})

    async def resume(self, request: web.Request) -> web.Response:
        await self.row(request)
        await self.compute.do(lambda c: c.resume(), COMMAND_DEADLINE_S)
        return web.json_response({"message": "generation goes on", "status": "ok"})

    async def flush(self, request: web.Request) -> web.Response:
        """400 while requests run or wait, as SGLang; `?timeout=` seconds are waited for their end."""
        await self.row(request)
        wait_s = parse_timeout(request.query.get("timeout"))
        until = time.monotonic() + wait_s
        while not await self.compute.do(lambda c: c.flush_cache(), COMMAND_DEADLINE_S):
            if time.monotonic() >= until:
                waited = f" after {wait_s:g} s" if wait_s else ""
                return web.Response(
                    status=400, text=f"cache not flushed: requests are running or waiting{waited}\n"
                )
            await asyncio.sleep(FLUSH_POLL_S)
        return web.Response(text="cache flushed\n")


class Adoption(ControlCalls):
    """A run that goes on takes over the engines that its killed controller left, or the same one's run before."""

    def __init__(self, compute: ComputeThread, owner: Owner, forget: Callable[[], Awaitable[None]]) -> None:
        """`forget` ends what updates the controller before had begun."""
        super().__init__(compute)
        self._owner, self._forget = owner, forget

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/adopt", self.adopt)]

    async def adopt(self, request: web.Request) -> web.Response:
        """Belongs to the process `pid` of this machine from now on; what the one before had asked for ends, also
        that memory is given back."""
        pid = (await self.row(request)).get("pid")
        if not self._owner.linger_s and pid != os.getppid():
            raise UserError(Fault("pid", str(pid), "this engine ends with the process that started it"))
        try:
            if self._owner.linger_s:
                self._owner.adopt(int(pid))  # type: ignore[arg-type]
        except (ProcessLookupError, TypeError, ValueError, OverflowError):
            raise UserError(Fault("pid", str(pid), "there is no such process")) from None
        await self._forget()
        await self.compute.do(lambda c: c.abort_all("its controller ended"), COMMAND_DEADLINE_S)
        await self.compute.do(lambda c: c.resume(), COMMAND_DEADLINE_S)
        await self.compute.do(lambda c: c.memory.resume(None), COMMAND_DEADLINE_S)
        return web.json_response({"engine_id": self.settings.engine_id, "pid": os.getpid()})


async def told(work: Awaitable[dict[str, Any]]) -> web.Response:
    """The answer to a call about weights or memory, in SGLang's form: success and message, 400 for a refusal,
    409 while another update is under way, 503 where the engine is too slow or too busy to say."""
    try:
        return web.json_response({"success": True, **await work})
    except (UserError, WeightError) as fault:
        message, status = str(fault), 400
    except EngineBusy as fault:
        message, status = str(fault), 409 if fault.phase == "update" else 503
    except TimeoutError:
        message, status = "the engine did not answer within its deadline", 503
    return web.json_response({"success": False, "message": message}, status=status)
