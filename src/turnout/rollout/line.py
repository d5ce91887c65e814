"""Requests on their way to engines: so many at once, those of the oldest group first.

An engine takes requests in the order in which they come, and a network mixes that. With all open groups in the
engines' queues the groups of the next train step would be complete when nearly all are, and the trainer would wait
for them. So engines are sent twice what they run at once (QUEUED): enough that none waits for a request, little
enough that the order of groups holds.

Owns who waits and what each engine was sent. Promises: a request that waits is sent before those of younger groups;
a place that is given to somebody who has gone goes to the next; the requests of a group go to one engine, which has
their prompt in its cache, the less loaded of two.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from turnout.core.ports import Clock
from turnout.serving.client import EngineClient

QUEUED = 2  # requests that an engine is sent for each that it runs


def endless() -> float:
    """Room for every request."""
    return inf


class Line:
    """`room`: how many requests all engines may have been sent. A request's `rank` is its group's ordinal."""

    def __init__(self, room: Callable[[], float] = endless) -> None:
        self._room = room
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # heap: rank, order of coming
        self._came = self._sent = 0
        self._load = Counter[str]()  # by engine
        self._homes: dict[int, tuple[str, int]] = {}  # by rank: the engine and how many requests it was sent

    async def enter(self, rank: int, clock: Clock, end: float) -> None:
        """Waits for a place, which the caller gives back (`leave`). Raises DeadlineExceeded at `end`."""
        if not self._waiting and self._sent < self._room():
            self._sent += 1
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
        self._call()

    def choose(self, rank: int, engines: Sequence[EngineClient], last: EngineClient | None) -> EngineClient:
        """The engine of a request of this group; after `last` another one where there is one. Which two of many are
        compared follows from the rank: that costs the same however many engines there are."""
        count = len(engines)
        if last in engines:
            return engines[(engines.index(last) + 1) % count]
        first = engines[rank % count]
        if count == 1 or self._room() == inf:
            return first
        second = engines[(rank + 1 + rank // count % (count - 1)) % count]
        home, _ = self._homes.get(rank, ("", 0))
        if home in (first.engine_id, second.engine_id):
            return first if home == first.engine_id else second
        return second if self._load[second.engine_id] < self._load[first.engine_id] else first

    @contextlib.contextmanager
    def sent(self, rank: int, engine_id: str) -> Iterator[None]:
        """The block is one request on its way."""
        home, count = self._homes.get(rank, (engine_id, 0))
        self._homes[rank] = home, count + 1
        self._load[engine_id] += 1
        try:
            yield
        finally:
            self._load[engine_id] -= 1
            home, count = self._homes.pop(rank)
            if count > 1:
                self._homes[rank] = home, count - 1

    def _call(self) -> None:
        while self._waiting and self._sent < self._room():
            *_, place = heappop(self._waiting)
            if not place.done():
                self._sent += 1
                place.set_result(None)
