"""The virtual network: clients of virtual engines, whose calls travel, get lost, come late, twice or not at all.

Promises: `VirtualClient` is turnout.serving.client.EngineClient with only its exchange of bytes replaced, so that
refusals, deadlines and errors are the production's own; an engine works on what reached it whether or not the
caller still waits; a client of a killed controller sends nothing more.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from turnout.core.errors import DeadlineExceeded, EngineDead
from turnout.core.ports import Clock
from turnout.core.types import Finish
from turnout.protocol.sglang import GenerateReply, GenerateRequest
from turnout.protocol.stream import PartialReply
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.sim.engine import CHANGES, Row, VirtualEngine
from turnout.sim.faults import Faults
from turnout.sim.loop import Life

NEVER_S = 1e5  # longer than any deadline
FASTEST_S, SLOWEST_S = 0.001, 0.05  # of one way
CHANGE_S = (0.05, 0.6)  # of a call that changes weights
RATE = 0.004  # of each fault per call, in a world of middling luck
ENDED = "the controller is gone"
EXPIRED = "the deadline of a stream"


class Stream:
    """What an engine sends for one request, in order, read by one client for at most `seconds`, until `end`."""

    def __init__(self, seconds: float, end: float) -> None:
        self.seconds, self.end = seconds, end
        self._items: deque[PartialReply | GenerateReply | str] = deque()
        self._news: asyncio.Future[None] | None = None

    def put(self, item: PartialReply | GenerateReply) -> None:
        self._add(item)

    def cut(self, reason: str) -> None:
        self._add(reason)

    def _add(self, item: PartialReply | GenerateReply | str) -> None:
        self._items.append(item)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def next(self) -> PartialReply | GenerateReply | str:
        while not self._items:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._items.popleft()


@dataclass
class Wire:
    """What connects one controller to the engines. `sent` is told of each request to an engine before it travels,
    `later` sets timers of the world, which outlive the controller; `way_s`, `change_s` are as FASTEST_S,
    CHANGE_S."""

    faults: Faults
    life: Life
    later: Callable[..., Any]
    sent: Callable[[VirtualEngine, GenerateRequest], None]
    lost: Callable[[VirtualEngine], None]
    way_s: tuple[float, float] = (FASTEST_S, SLOWEST_S)
    change_s: tuple[float, float] = CHANGE_S

    def __post_init__(self) -> None:
        self.cut_until: dict[str, float] = {}

    def delay(self) -> float:
        return self.faults.uniform(*self.way_s)

    def partitioned(self, engine: VirtualEngine, now: float) -> float:
        """Seconds for which the engine cannot be reached."""
        if self.faults.hit("partition", RATE / 4, engine.name):
            self.cut_until[engine.name] = now + self.faults.uniform(0.5, 30.0)
        return 0.0 if self.faults.calm else max(0.0, self.cut_until.get(engine.name, 0.0) - now)


class VirtualClient(EngineClient):
    """The client of one virtual engine."""

    def __init__(self, engine: VirtualEngine, clock: Clock, wire: Wire) -> None:
        super().__init__(engine.name, Address("127.0.0.1", 1), clock)
        self.engine, self._wire = engine, wire
        self.plan, self.bootstrap_port = replace(self.plan, worker_type=engine.half), 1

    async def close(self) -> None: ...

    async def _exchange(self, path: str, data: bytes | None) -> tuple[int, str]:
        """One control call: there, done by the engine, and back."""
        wire, engine, faults = self._wire, self.engine, self._wire.faults
        body = None if data is None else json.loads(data)
        await self._travel()
        if faults.hit("request_lost", RATE, engine.name):
            await self._clock.sleep(NEVER_S)
        self._check_alive()
        if faults.hit("refused", RATE, engine.name):
            return 500, json.dumps({"error": {"message": "internal error"}})
        if path in CHANGES and engine.updating:
            return 409, json.dumps({"success": False, "message": "an update is under way"})
        done: asyncio.Future[tuple[int, Row]] = asyncio.get_running_loop().create_future()
        process = engine.process
        engine.updating = engine.updating or path in CHANGES
        seconds = faults.uniform(*wire.change_s) if path in CHANGES else 0.002
        wire.later(seconds * engine.slowed, self._work, path, body, process, done)
        status, row = await done
        if faults.hit("answer_lost", RATE, engine.name):
            await self._clock.sleep(NEVER_S)
        if faults.hit("answer_late", RATE, engine.name):
            await self._clock.sleep(faults.uniform(1.0, 20.0))
        if path in CHANGES and faults.hit("engine_crash", 2 * RATE, engine.name):
            wire.lost(engine)
            self._check_alive()
        await self._clock.sleep(wire.delay())
        return status, json.dumps(row)

    def _work(self, path: str, body: Row | None, process: int, done: asyncio.Future[tuple[int, Row]]) -> None:
        """What the engine does, in its own time."""
        engine, faults = self.engine, self._wire.faults
        if engine.process != process or not engine.alive:
            if not done.done():
                done.set_exception(aiohttp.ServerDisconnectedError("the engine has gone"))
            return
        if path in CHANGES:
            engine.updating = False
        loads = path in ("/prepare_weights", "/update_weights_from_disk")
        other = loads and faults.hit("other_weights", 2 * RATE, engine.name)
        found = engine.answer(path, body, other)
        if faults.hit("request_doubled", RATE, engine.name):
            engine.answer(path, body, False)
        if not done.done():
            done.set_result(found)

    async def generate(self, request: GenerateRequest, deadline_s: float) -> GenerateReply:
        async for item in self.generate_stream(request, deadline_s):
            if isinstance(item, GenerateReply):
                return item
        raise self.fault(EngineDead, "rollout", "a stream of /generate ended before its last event")

    async def prefill(self, request: GenerateRequest, deadline_s: float) -> str:
        made = await self.generate(request, deadline_s)
        return (made.message or "aborted") if made.finish is Finish.ABORT else ""

    async def generate_stream(
        self, request: GenerateRequest, deadline_s: float
    ) -> AsyncGenerator[PartialReply | GenerateReply, None]:
        self._wire.sent(self.engine, request)
        stream = Stream(deadline_s, self._clock.now() + deadline_s)
        with self._faults("/generate", "rollout"):
            await self._open(request, stream)
            expiry = asyncio.get_running_loop().call_at(stream.end, stream.cut, EXPIRED)
            ended = False
            try:
                while not ended:
                    item = await self._item(stream)
                    ended = isinstance(item, GenerateReply)
                    if not ended and self._wire.faults.hit("request_aborted", RATE, self.engine_id):
                        self.engine.abort(request.rid, "aborted by the scheduler")
                    yield item
            finally:
                expiry.cancel()
                if not ended and self._wire.life.alive:  # the engine sees the connection closed
                    process = self.engine.process
                    self._wire.later(self._wire.delay(), self._closed, request.rid, process)

    def _closed(self, rid: str, process: int) -> None:
        if self.engine.process == process:
            self.engine.abort(rid, "the connection was closed")

    async def _open(self, request: GenerateRequest, stream: Stream) -> None:
        faults, engine = self._wire.faults, self.engine
        await self._pass(self._way(), stream)
        if faults.hit("request_lost", RATE, engine.name):
            await self._pass(NEVER_S, stream)
        self._check_alive()
        if faults.hit("refused", RATE, engine.name):
            raise self._refusal(500, "internal error", "/generate", "rollout")
        refused = engine.generate(request, stream)
        if faults.hit("request_doubled", RATE, engine.name):
            engine.generate(request, Stream(stream.seconds, stream.end))
        if refused is not None:
            status, why = refused
            served = {"version": engine.label, "root": engine.root}
            body = json.dumps({"served": served, "error": {"message": why}})
            raise self._refusal(status, body, "/generate", "rollout")

    async def _item(self, stream: Stream) -> PartialReply | GenerateReply:
        faults, engine = self._wire.faults, self.engine
        item = await stream.next()
        if item is EXPIRED:
            raise self._late(stream)
        left = self._wire.partitioned(engine, self._clock.now())
        if left:
            await self._pass(left, stream)
        if faults.hit("stream_cut", RATE, engine.name):
            raise aiohttp.ClientPayloadError("connection cut")
        if faults.hit("answer_late", RATE, engine.name):
            await self._pass(faults.uniform(1.0, 20.0), stream)
        if faults.hit("engine_crash", RATE / 4, engine.name):
            self._wire.lost(engine)
        if isinstance(item, str):
            raise aiohttp.ClientPayloadError(item)
        return item

    async def _pass(self, seconds: float, stream: Stream) -> None:
        """Time goes by; raises DeadlineExceeded at the end of the stream. (A timer of each stream and a look at the
        clock here cost a fraction of what the real client has: a deadline of each event.)"""
        await self._clock.sleep(min(seconds, max(0.0, stream.end - self._clock.now())))
        if self._clock.now() >= stream.end:
            raise self._late(stream)

    def _late(self, stream: Stream) -> DeadlineExceeded:
        return DeadlineExceeded(f"engine {self.engine_id} to end a stream of /generate", stream.seconds)

    async def _travel(self) -> None:
        await self._clock.sleep(self._way())

    def _way(self) -> float:
        """Seconds of one way to the engine."""
        if not self._wire.life.alive:
            raise DeadlineExceeded(ENDED, 0.0)
        return self._wire.partitioned(self.engine, self._clock.now()) + self._wire.delay()

    def _check_alive(self) -> None:
        if not self.engine.alive:
            raise aiohttp.ClientConnectionError("connection refused")
