"""Control calls: abort, pause, continue, flush, weight updates. Beyond loopback each needs the admin token.

Promises: one update at a time (409 for a second); an update is validated while the engine goes on serving and
put into place between two steps; a refusal leaves everything as it was and says so with success false.
"""

from __future__ import annotations

import asyncio
import hmac
import time

from aiohttp import web

from turnout.core.errors import UserError, WeightError
from turnout.core.version import label_counter
from turnout.engine.core import Activation, Attested
from turnout.engine.loop import ComputeThread
from turnout.engine.requests import (
    Update,
    parse_abort,
    parse_label,
    parse_object,
    parse_pause,
    parse_timeout,
    parse_update,
)
from turnout.engine.weights import Staged

CONTROL_BODY_MAX = 1 << 20
COMMAND_DEADLINE_S = 60.0
UPDATE_DEADLINE_S = 600.0
FLUSH_POLL_S = 0.05


class Control:
    """Handlers of one engine's control calls."""

    def __init__(self, compute: ComputeThread) -> None:
        self.compute, self.settings = compute, compute.settings
        self._updating: str | None = None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/abort_request", self.abort),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.get("/flush_cache", self.flush),
            web.post("/flush_cache", self.flush),
            web.post("/update_weights_from_disk", self.update_from_disk),
            web.post("/update_weight_version", self.update_version),
        ]

    def authorised(self, request: web.Request) -> bool:
        """Whether the call may control: always without a token (then the host is loopback)."""
        token = self.settings.admin_token
        given = request.headers.get("Authorization", "")
        asked = given.encode("utf-8", "surrogateescape")  # aiohttp decodes headers that way
        return token is None or hmac.compare_digest(asked, f"Bearer {token}".encode())

    async def abort(self, request: web.Request) -> web.Response:
        rid = parse_abort(parse_object(await self._body(request)))
        if rid is None:
            ended = await self.compute.do(lambda c: c.abort_all("aborted by a call"), COMMAND_DEADLINE_S)
        else:
            ended = await self.compute.do(lambda c: c.abort(rid, "aborted by a call"), COMMAND_DEADLINE_S)
        return web.json_response({"aborted": ended})

    async def pause(self, request: web.Request) -> web.Response:
        mode = parse_pause(parse_object(await self._body(request)))
        held = await self.compute.do(lambda c: c.pause(mode), COMMAND_DEADLINE_S)
        return web.json_response({"message": f"paused, mode {mode}", "status": "ok", "requests": held})

    async def resume(self, request: web.Request) -> web.Response:
        parse_object(await self._body(request))
        await self.compute.do(lambda c: c.resume(), COMMAND_DEADLINE_S)
        return web.json_response({"message": "generation goes on", "status": "ok"})

    async def flush(self, request: web.Request) -> web.Response:
        """400 while requests run or wait, as SGLang; `?timeout=` seconds are waited for their end."""
        await self._body(request)
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

    async def update_from_disk(self, request: web.Request) -> web.Response:
        try:
            update = parse_update(parse_object(await self._body(request)), self.settings)
        except UserError as fault:
            return _refused(str(fault), 400)
        if self._updating is not None:
            return _refused(f"an update from {self._updating} is under way", 409)
        self._updating = str(update.folder)
        work = asyncio.ensure_future(self._update(update))
        work.add_done_callback(self._update_over)
        try:
            # shielded: an update that has begun goes on when its caller hangs up
            attested, met = await asyncio.wait_for(asyncio.shield(work), UPDATE_DEADLINE_S)
        except WeightError as fault:
            return _refused(str(fault), 400)
        return web.json_response(
            {
                "success": True,
                "message": f"serving {attested.version}",
                "num_paused_requests": met,
                "version": attested.version,
                "root": attested.root,
                "level": attested.level,
            }
        )

    async def update_version(self, request: web.Request) -> web.Response:
        """Names the weights that are served already; a label of ours for other content is refused."""
        label, abort_all = parse_label(parse_object(await self._body(request)))
        if self._updating is not None:
            return _refused(f"an update from {self._updating} is under way", 409)
        try:
            check_label(label, self.compute.attested.root)
        except WeightError as fault:
            return _refused(str(fault), 400)
        if abort_all:
            await self.compute.do(lambda c: c.abort_all("the weights are renamed"), COMMAND_DEADLINE_S)
        await self.compute.do(lambda c: c.rename(label), COMMAND_DEADLINE_S)
        return web.json_response({"success": True, "message": f"serving {label}", "new_version": label})

    async def _update(self, update: Update) -> tuple[Attested, int]:
        staged = await asyncio.to_thread(self.compute.core.weights.stage_folder, update.folder)
        activation = Activation(staged, _label(update, staged), update.abort_all, update.flush)
        return await self.compute.do(lambda c: c.activate(activation), UPDATE_DEADLINE_S)

    def _update_over(self, work: asyncio.Future[tuple[Attested, int]]) -> None:
        self._updating = None
        if not work.cancelled():
            work.exception()  # retrieved, so that a caller who hung up leaves no warning behind

    async def _body(self, request: web.Request) -> bytes:
        """The body of a control call; 413 above CONTROL_BODY_MAX."""
        body = bytearray()
        async for part in request.content.iter_chunked(1 << 16):
            body += part
            if len(body) > CONTROL_BODY_MAX:
                raise web.HTTPRequestEntityTooLarge(CONTROL_BODY_MAX, len(body))
        return bytes(body)


def _label(update: Update, staged: Staged) -> str:
    """The label for the new weights. One that names other content is refused: a label must not lie."""
    if update.label is None:
        return staged.manifest.version.label if staged.manifest else f"root-{staged.root[:16]}"
    check_label(update.label, staged.root)
    return update.label


def check_label(label: str, root: str) -> None:
    """Raises WeightError for a label of ours that names other content; other texts name nothing."""
    if label_counter(label) is not None and label.split("-")[1] != root[:16]:
        raise WeightError(f"weight_version {label} names other weights: the root is {root}")


def _refused(message: str, status: int) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=status)
