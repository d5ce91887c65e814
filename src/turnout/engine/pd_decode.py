"""The decode side: fetches first token and KV of a request's prompt from the prefill engine that it names.

Promises: no prompt token is computed here; pages are taken only when the prefill engine has the KV, so that
two engines never wait for each other's pages; what arrives (layout, size, digest, weights) is checked before it is
used.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from turnout.core.errors import Fault
from turnout.core.types import Finish
from turnout.engine import pd_steps
from turnout.engine.loop import ComputeThread
from turnout.engine.pd_link import Link, expected
from turnout.engine.pd_machine import Event, Side, State
from turnout.engine.pd_pages import digest, layout
from turnout.engine.pd_shm import receive, show_ticket
from turnout.engine.pd_side import COMMAND_DEADLINE_S, Companion, Counters
from turnout.engine.request_machine import KvMoved, Request
from turnout.engine.request_machine import State as Where
from turnout.engine.requests import BadRequest
from turnout.protocol.pd import Ask, Bootstrap, Go, Joined, Kv, LinkError, Message, Offer, prompt_digest, seal

READS_MAX = 8  # KV copies alive at once


class DecodeSide:
    """See the module."""

    def __init__(self, compute: ComputeThread) -> None:
        self.compute, self.settings = compute, compute.settings
        self.counters = Counters()
        self._live: set[Bootstrap] = set()
        self._reads = asyncio.Semaphore(READS_MAX)

    async def start(self) -> int:
        """Listens to nothing."""
        return 0

    async def stop(self) -> None:
        """Holds nothing: every companion ends with its request."""

    async def open(self, request: Request) -> Companion:
        """Raises BadRequest for a room that another request here uses."""
        if request.bootstrap in self._live:
            raise BadRequest(Fault("bootstrap_room", str(request.bootstrap.room), "is in use"))
        if request.bootstrap is not None:
            self._live.add(request.bootstrap)
        request.remote = True
        return Companion(request, Side.DECODE, self.compute, self.counters)

    async def close(self, companion: Companion) -> None:
        if companion.request.bootstrap is not None:
            self._live.discard(companion.request.bootstrap)
        if companion.machine.state is State.DECODE:
            whole = companion.request.finish not in (None, Finish.ABORT)
            companion.on(Event.FINISHED if whole else Event.CANCELLED)

    async def steps(self, companion: Companion) -> None:
        """A request from its submission until it decodes; see turnout.protocol.pd for the messages."""
        request, where = companion.request, companion.request.bootstrap
        if where is None:
            raise LinkError("the request names no prefill engine")
        await companion.within(companion.reached(Where.PENDING), "the scheduler")
        link = await companion.within(
            Link.connect(where.host, where.port), "the prefill engine's bootstrap port"
        )
        companion.link = link
        own = layout(self.compute.core.runner.cache)
        secret = seal(self.settings.admin_token, where.room)
        ask = Ask(where.room, self.settings.engine_id, own, prompt_digest(request.tokens), secret)
        await companion.within(link.send(ask), "the prefill engine to read")
        joined = await companion.within(link.expect(Joined), f"room {where.room} on the prefill engine")
        companion.on(Event.JOINED)
        offer = await companion.within(link.expect(Offer), "the prompt on the prefill engine")
        companion.on(Event.COMPUTED)
        await self.compute.do(lambda core: pd_steps.offered(core, request), COMMAND_DEADLINE_S)
        reply = asyncio.ensure_future(link.receive())
        try:
            await companion.either(companion.reached(Where.RECEIVING), reply, "free pages")
            async with self._reads:
                await self._take(companion, (offer, joined.engine_id, reply))
        finally:
            reply.cancel()
            await asyncio.gather(reply, return_exceptions=True)
        await companion.taken()

    async def _take(self, companion: Companion, what: tuple[Offer, str, asyncio.Future[Message]]) -> None:
        offer, engine_id, reply = what
        request, link = companion.request, companion.link
        size = await self.compute.do(lambda core: pd_steps.expected_bytes(core, request), COMMAND_DEADLINE_S)
        if link is None or offer.kv_bytes != (0 if offer.ended else size):
            raise LinkError(f"{offer.kv_bytes} bytes of KV are offered, {size} are due")
        caller = None
        if not offer.ended and self.settings.disaggregation_transfer == "auto":
            caller = await asyncio.to_thread(show_ticket, offer.local, offer.ticket)
        with contextlib.ExitStack() as stack:
            if caller is not None:
                stack.enter_context(caller)
            path = "none" if offer.ended else "tcp" if caller is None else "shm"
            await companion.within(link.send(Go(path)), "the prefill engine to read")
            data = await companion.within(self._fetch(link, offer, caller, reply), "the KV")
        moved = KvMoved(offer.kv_bytes, path, engine_id, self.settings.engine_id)
        arrival = pd_steps.Arrival(offer, data, moved)
        await self.compute.do(lambda core: pd_steps.attach(core, request, arrival), COMMAND_DEADLINE_S)
        self.counters.moved(moved)

    async def _fetch(
        self, link: Link, offer: Offer, caller: socket.socket | None, reply: asyncio.Future[Message]
    ) -> bytearray | memoryview | None:
        """The bytes, checked against their digest; None where none are due."""
        if offer.ended:
            return None
        kv = expected(await reply, Kv)
        if caller is None:
            data: bytearray | memoryview = await link.receive_bytes(offer.kv_bytes)
        else:
            deadline_s = self.settings.disaggregation_timeout_s
            data = await asyncio.to_thread(receive, caller, offer.kv_bytes, deadline_s)
        if await asyncio.to_thread(digest, data) != kv.digest:
            raise LinkError("the KV that came has another digest than the KV that was sent")
        return data
