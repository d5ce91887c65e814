"""What the two sides of a PD pair share: how a coroutine follows its request on the compute thread, waits with the
deadlines of its machine, and ends it when something fails.

Promises: every wait ends at the deadline of the state it was begun in; whatever goes wrong leads to ABORTED, the
request ended and the other side told, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from turnout.core.errors import EngineBusy, TurnoutError
from turnout.core.types import Finish
from turnout.engine import pd_steps
from turnout.engine.core import EngineCore
from turnout.engine.loop import ComputeThread
from turnout.engine.pd_link import Link, PeerLost
from turnout.engine.pd_machine import Deadlines, Effect, Event, Side, SplitRequest, State
from turnout.engine.request_machine import KvMoved, Request
from turnout.engine.request_machine import State as Where
from turnout.protocol.pd import Message, Taken

log = logging.getLogger(__name__)
T = TypeVar("T")
COMMAND_DEADLINE_S = 60.0
ENDED = (Where.FINISHED, Where.ABORTED)


class Late(TurnoutError):
    """The deadline of a state passed."""


@dataclass
class Counters:
    """Since the start, of one engine."""

    transfers: int = 0
    bytes_shm: int = 0
    bytes_tcp: int = 0
    aborted: int = 0

    def moved(self, what: KvMoved) -> None:
        self.transfers += 1
        if what.path == "shm":
            self.bytes_shm += what.bytes
        elif what.path == "tcp":
            self.bytes_tcp += what.bytes


@dataclass(eq=False)
class Companion:
    """Follows one split request."""

    request: Request
    side: Side
    compute: ComputeThread
    counters: Counters
    machine: SplitRequest = field(init=False)
    link: Link | None = None
    task: asyncio.Task[None] | None = None
    _settled: bool = False  # how it ends is decided
    _seen: Where | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        settings = self.compute.settings
        deadlines = Deadlines(settings.disaggregation_timeout_s, settings.request_timeout_s)
        self.machine = SplitRequest(self.side, deadlines, time.monotonic())

    def saw(self, where: Where) -> None:
        """The compute thread moved the request. Where it was aborted, only the other side is left to be told."""
        self._seen = where
        self._news.set()
        if where is Where.ABORTED:
            self._cancel()

    def left(self) -> None:
        """The call that brought the request is over: with its answer, or because its client went away."""
        if self.request.finish in (None, Finish.ABORT):
            self._cancel()

    def _cancel(self) -> None:
        if self.task is not None and not self._settled:
            self._settled = True
            self.task.cancel()

    async def reached(self, *states: Where) -> None:
        """Returns when the request is in one of the states."""
        while self._seen not in states:
            self._news.clear()
            await self._news.wait()

    def on(self, event: Event) -> tuple[Effect, ...]:
        return self.machine.on(event, time.monotonic())

    async def within(self, work: Awaitable[T], what: str) -> T:
        """The result of `work`; raises Late, which names `what`, at the deadline of the machine's state."""
        state = self.machine.state
        limit = asyncio.timeout(max(0.0, self.machine.expires - time.monotonic()))
        try:
            async with limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            seconds = self.machine.expires - self.machine.since
            raise Late(f"waited {seconds:g} s for {what} ({self.side} side, {state})") from None

    async def either(self, work: Awaitable[T], other: asyncio.Future[Message], what: str) -> T:
        """As `within`; the other future, done first, ends it with its error: it reads the link, on which nothing
        is due."""
        task = asyncio.ensure_future(work)
        try:
            await self.within(asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED), what)
            if not task.done():
                raise PeerLost(f"{type(other.result()).__name__} came while waiting for {what}")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def run(self, steps: Callable[[Companion], Awaitable[None]]) -> None:
        """Goes through the steps of its side; never raises."""
        try:
            await steps(self)
        except asyncio.CancelledError:
            if not self.machine.over and self.machine.state is not State.DECODE:
                ended = self.request.message or "its client went away"
                await self._fail(Event.CANCELLED, f"ended on the {self.side} side: {ended}")
        except Late as fault:
            await self._fail(Event.DEADLINE, str(fault))
        except PeerLost as fault:
            await self._fail(Event.PEER_LOST, str(fault))
        except (TurnoutError, TimeoutError, OSError) as fault:
            await self._fail(Event.REFUSED, str(fault) or type(fault).__name__)

    async def taken(self) -> None:
        """The KV lies on the decode side."""
        self._settled = True
        await self._apply(self.on(Event.TAKEN), "")

    async def _fail(self, event: Event, message: str) -> None:
        self._settled = True
        self.counters.aborted += 1
        log.info("request %s aborted on the %s side: %s", self.request.rid, self.side, message)
        await self._apply(self.on(event), message)

    async def _apply(self, effects: tuple[Effect, ...], message: str) -> None:
        request, failed = self.request, self.machine.state is State.ABORTED
        for effect in effects:
            if effect is Effect.RETURN and self._seen not in ENDED:
                with contextlib.suppress(EngineBusy, TimeoutError):  # then the request's own deadline ends it
                    end = _abort(request, message) if failed else _release(request)
                    await self.compute.do(end, COMMAND_DEADLINE_S)
            elif effect is Effect.TELL and self.link is not None and not failed:
                with contextlib.suppress(PeerLost, TimeoutError):  # this side has all that it needs
                    async with asyncio.timeout(COMMAND_DEADLINE_S):
                        await self.link.send(Taken())
            elif effect is Effect.CLOSE and self.link is not None:
                await self.link.close(message if Effect.TELL in effects else "")


def _abort(request: Request, message: str) -> Callable[[EngineCore], int]:
    return lambda core: core.abort(request.rid, message)


def _release(request: Request) -> Callable[[EngineCore], None]:
    return lambda core: pd_steps.release(core, request)
