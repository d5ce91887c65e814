"""The prefill side: the bootstrap server, the rooms, and the steps of a request whose KV goes elsewhere.

Owns the listening sockets and every room. Promises: a room is used once; a room's pages are held until its KV was
taken, its deadline passed, or either side ended it; what connects and doesn't speak the link's language, or doesn't
know the admin token, is dropped within FIRST_FRAME_S; at most LINKS_MAX connections at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from turnout.core.errors import Fault
from turnout.engine import pd_steps
from turnout.engine.loop import ComputeThread
from turnout.engine.pd_link import Link, PeerLost, expected
from turnout.engine.pd_machine import Event, Side, State
from turnout.engine.pd_pages import digest, layout
from turnout.engine.pd_shm import Counter, Segment, hand_over
from turnout.engine.pd_side import COMMAND_DEADLINE_S, Companion, Counters
from turnout.engine.request_machine import KvMoved, Request
from turnout.engine.request_machine import State as Where
from turnout.engine.requests import BadRequest
from turnout.protocol.pd import Ask, Go, Joined, Kv, LinkError, Message, Offer, Taken, prompt_digest, seal

log = logging.getLogger(__name__)
FIRST_FRAME_S = 5.0
LINKS_MAX = 4096
READS_MAX = 8  # KV copies alive at once
USED_ROOMS_MAX = 65536


@dataclass(eq=False)
class Room:
    """`joined`: the decode side's link and what it asked."""

    companion: Companion
    joined: asyncio.Future[tuple[Link, Ask]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class PrefillSide:
    """See the module."""

    def __init__(self, compute: ComputeThread) -> None:
        self.compute, self.settings = compute, compute.settings
        self.counters = Counters()
        self.rooms: dict[int, Room] = {}
        self._used: OrderedDict[int, str] = OrderedDict()
        self._came = asyncio.Condition()
        self._reads = asyncio.Semaphore(READS_MAX)
        self._links: set[asyncio.Task[None]] = set()
        self._local = Counter.open() if self.settings.disaggregation_transfer == "auto" else None
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listens; returns the port. Raises OSError."""
        self._server = await asyncio.start_server(
            self._accept, self.settings.host, self.settings.disaggregation_bootstrap_port
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._links):
            task.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        if self._local is not None:
            await self._local.close()

    async def open(self, request: Request) -> Companion:
        """The request's room; raises BadRequest for one that is or was in use."""
        number = request.bootstrap.room if request.bootstrap is not None else -1
        if number in self.rooms or number in self._used:
            state = "is in use" if number in self.rooms else f"was used: {self._used[number]}"
            raise BadRequest(Fault("bootstrap_room", str(number), state))
        request.hold = True
        companion = Companion(request, Side.PREFILL, self.compute, self.counters)
        self.rooms[number] = Room(companion)
        async with self._came:
            self._came.notify_all()
        return companion

    async def close(self, companion: Companion) -> None:
        """The room is over; a decode engine that comes from now on hears why."""
        number = companion.request.bootstrap.room if companion.request.bootstrap is not None else -1
        room = self.rooms.pop(number)
        finish = companion.request.finish
        self._used[number] = companion.request.message or f"it ended as {finish or 'refused'}"
        if len(self._used) > USED_ROOMS_MAX:
            self._used.popitem(last=False)
        if room.joined.done() and not room.joined.cancelled() and companion.link is None:
            await room.joined.result()[0].close(self._used[number])
        room.joined.cancel()

    async def steps(self, companion: Companion) -> None:
        """A request from its submission to its end; see turnout.protocol.pd for the messages."""
        bootstrap = companion.request.bootstrap
        room = self.rooms[bootstrap.room if bootstrap is not None else -1]
        await companion.within(companion.reached(Where.WAITING, Where.HELD), "the scheduler")
        companion.on(Event.JOINED)
        held = asyncio.ensure_future(companion.reached(Where.HELD))
        try:
            first = asyncio.wait({held, room.joined}, return_when=asyncio.FIRST_COMPLETED)
            await companion.within(first, "the prompt")
            if held.done():
                held.result()
                companion.on(Event.COMPUTED)
            link, ask = await companion.within(room.joined, "the decode engine")
            companion.link = link
            await link.send(Joined(self.settings.engine_id))
            reply = asyncio.ensure_future(link.receive())
            try:
                if companion.machine.state is State.PREFILL:
                    await companion.either(held, reply, "the prompt")
                    companion.on(Event.COMPUTED)
                await self._transfer(companion, link, ask, reply)
            finally:
                reply.cancel()
                await asyncio.gather(reply, return_exceptions=True)
        finally:
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
        await companion.taken()

    async def _transfer(
        self, companion: Companion, link: Link, ask: Ask, reply: asyncio.Future[Message]
    ) -> None:
        request = companion.request
        offer = await self.compute.do(lambda core: pd_steps.make_offer(core, request), COMMAND_DEADLINE_S)
        if self._local is None or offer.ended:
            await self._give(companion, link, ask, (offer, None, reply))
            return
        ticket, caller = self._local.ticket()
        try:
            offer = replace(offer, local=self._local.name, ticket=ticket)
            await self._give(companion, link, ask, (offer, caller, reply))
        finally:
            self._local.forget(ticket)

    async def _give(
        self,
        companion: Companion,
        link: Link,
        ask: Ask,
        way: tuple[Offer, asyncio.Future[socket.socket] | None, asyncio.Future[Message]],
    ) -> None:
        offer, caller, reply = way
        await companion.within(link.send(offer), "the decode engine to read")
        go = expected(await companion.within(reply, "pages on the decode engine"), Go)
        if (go.path == "none") != offer.ended or (go.path == "shm" and (caller is None or not caller.done())):
            raise LinkError(f"path {go.path} was not offered")
        if go.path == "shm" and caller is not None:
            await companion.within(self._over_memory(companion, link, offer, caller.result()), "the transfer")
        elif go.path == "tcp":
            await companion.within(self._over_link(companion, link, offer), "the transfer")
        await companion.within(link.expect(Taken), "the decode engine to take the KV")
        companion.request.moved = KvMoved(offer.kv_bytes, go.path, self.settings.engine_id, ask.engine_id)
        self.counters.moved(companion.request.moved)

    async def _over_memory(
        self, companion: Companion, link: Link, offer: Offer, caller: socket.socket
    ) -> None:
        async with self._reads:
            segment = Segment(offer.kv_bytes)
            try:
                kv = await self._read(companion, segment.view)
                fd = segment.sealed()
                await link.send(kv)
                hand_over(caller, fd)
            finally:
                segment.close()

    async def _over_link(self, companion: Companion, link: Link, offer: Offer) -> None:
        async with self._reads:
            data = bytearray(offer.kv_bytes)
            await link.send(await self._read(companion, memoryview(data)))
            await link.send_bytes(memoryview(data))

    async def _read(self, companion: Companion, out: memoryview) -> Kv:
        request = companion.request
        await self.compute.do(lambda core: pd_steps.read(core, request, out), COMMAND_DEADLINE_S)
        return Kv(await asyncio.to_thread(digest, out))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        if len(self._links) >= LINKS_MAX:
            await link.close("too many connections")
            return
        task = asyncio.current_task()
        if task is not None:
            self._links.add(task)
            task.add_done_callback(self._links.discard)
        try:
            async with asyncio.timeout(FIRST_FRAME_S):
                ask = await link.expect(Ask)
        except (LinkError, PeerLost, TimeoutError) as fault:
            log.debug("dropped a connection to the bootstrap port: %s", fault)
            await link.close()
            return
        refusal = await self._admit(link, ask)
        if refusal:
            await link.close(refusal)

    async def _admit(self, link: Link, ask: Ask) -> str:
        """Brings the asker to its room, waiting for that to open; why not, where it can't be."""
        if not hmac.compare_digest(ask.seal.encode(), seal(self.settings.admin_token, ask.room).encode()):
            return "the two engines have different admin tokens"
        own = layout(self.compute.core.runner.cache)
        if ask.layout != own:
            return f"KV does not fit: {own} here, {ask.layout} there"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.disaggregation_timeout_s), self._came:
                await self._came.wait_for(lambda: ask.room in self.rooms or ask.room in self._used)
        room = self.rooms.get(ask.room)
        if room is None:
            reason = self._used.get(ask.room, "no request with it came")
            return f"room {ask.room} of engine {self.settings.engine_id}: {reason}"
        if room.joined.done():
            return f"room {ask.room} is taken"
        if ask.prompt != prompt_digest(room.companion.request.tokens[: room.companion.request.prompt_tokens]):
            return f"room {ask.room} has another prompt"
        room.joined.set_result((link, ask))
        return ""
