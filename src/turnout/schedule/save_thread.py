"""The thread that writes a checkpoint beside training (--async-save): one call at a time, within a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from turnout.core.ports import Clock
from turnout.placement.call_threads import CallThreads

T = TypeVar("T")


class SaveThread:
    """`call` raises DeadlineExceeded after `deadline_s`; what hangs then holds up nobody's end."""

    def __init__(self, clock: Clock, deadline_s: float) -> None:
        self._clock, self._deadline_s = clock, deadline_s
        self._threads = CallThreads("checkpoint")

    async def call(self, what: str, work: Callable[[], T]) -> T:
        return await self._threads.within(self._clock, self._deadline_s, what, work)

    def close(self) -> None:
        self._threads.close()
