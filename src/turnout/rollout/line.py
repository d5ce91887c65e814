"""Requests on their way to engines: so many at once, those of the oldest group first.

An engine takes requests in the order in which they come, and a network mixes that. With all open groups in the
engines' queues the groups of the next train step would be complete when nearly all are, and the trainer would wait
for them. So engines are sent twice what they run at once (QUEUED): enough that none waits for a request, little
enough that the order of groups holds.

Owns who waits. Promises: a request that waits is sent before those of younger groups; a place that is given to
somebody who has gone goes to the next. Which engine it goes to, turnout.rollout.spread says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush

from turnout.core.ports import Clock
from turnout.rollout.spread import endless

QUEUED = 2  # requests that an engine is sent for each that it runs


class Line:
    """`room`: how many requests all engines may have been sent. A request's `rank` is its group's ordinal."""

    def __init__(self, room: Callable[[], float] = endless) -> None:
        self._room = room
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # heap: rank, order of coming
        self._came = self._sent = 0

    def enters(self) -> bool:
        """Takes a place where one is free and nobody waits for it."""
        free = not self._waiting and self._sent < self._room()
        self._sent += free
        return free

    async def enter(self, rank: int, clock: Clock, end: float) -> None:
        """Waits for a place, which the caller gives back (`leave`). Raises DeadlineExceeded at `end`."""
        if self.enters():
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._came += 1
        heappush(self._waiting, (rank, self._came, place))
        self._call()
        try:
            await clock.within(max(0.001, end - clock.now()), "room on the engines", place)
        except BaseException:
            if place.done() and not place.cancelled():  # it came too late
                self.leave()
            raise

    def leave(self) -> None:
        self._sent -= 1
        if self._waiting:
            self._call()

    def _call(self) -> None:
        while self._waiting and self._sent < self._room():
            *_, place = heappop(self._waiting)
            if not place.done():
                self._sent += 1
                place.set_result(None)
