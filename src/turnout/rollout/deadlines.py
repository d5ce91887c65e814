"""Many waits with deadlines, by one timer.

A timer and a scope for each wait cost more than the wait (asyncio.timeout and shield: 10 to 20 us). Promise: a wait
ends once its work has, or at its deadline; the work goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

from turnout.core.errors import DeadlineExceeded
from turnout.core.ports import Clock

K = TypeVar("K", bound=Hashable)


class Deadlines:
    """One task waits for the first deadline; there is none where nobody waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: list[tuple[float, int, asyncio.Future[bool]]] = []
        self._count = 0
        self._watch: asyncio.Task[None] | None = None
        self._until = 0.0  # the deadline that the watch waits for
        self._sooner = asyncio.Event()

    async def ended(self, work: asyncio.Future[Any], seconds: float) -> bool:
        """Whether `work` has ended within so many seconds. It is not cancelled, also where the caller is."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        work.add_done_callback(partial(_wake, waiter))
        self._count += 1
        waiting = self._open
        while waiting and waiting[0][2].done():
            heapq.heappop(waiting)
        end = self._clock.now() + seconds
        heapq.heappush(waiting, (end, self._count, waiter))
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(self._watching())
        elif end < self._until:
            self._sooner.set()
        return await waiter

    async def _watching(self) -> None:
        while self._open:
            self._until, _, waiter = self._open[0]
            left = self._until - self._clock.now()
            if waiter.done():
                heapq.heappop(self._open)
            elif left <= 0:
                waiter.set_result(False)
            else:
                self._sooner.clear()
                with contextlib.suppress(DeadlineExceeded):
                    await self._clock.within(left, "the next deadline", self._sooner.wait())


def _wake(waiter: asyncio.Future[bool], _work: asyncio.Future[Any]) -> None:
    if not waiter.done():
        waiter.set_result(True)


class Limit(Generic[K]):
    """One limit for many calls: `late` is called for each that has not ended so many seconds after it began."""

    def __init__(self, clock: Clock, seconds: float, late: Callable[[K], None]) -> None:
        self._clock, self._seconds, self._late = clock, seconds, late
        self._ends: dict[K, float] = {}  # in the order of the ends
        self._watch: asyncio.Task[None] | None = None

    def begin(self, call: K) -> None:
        self._ends[call] = self._clock.now() + self._seconds
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(self._watching())

    def end(self, call: K) -> None:
        self._ends.pop(call, None)

    async def _watching(self) -> None:
        while self._ends:
            call, end = next(iter(self._ends.items()))
            left = end - self._clock.now()
            if left > 0:
                await self._clock.sleep(left)
            else:
                del self._ends[call]
                self._late(call)
