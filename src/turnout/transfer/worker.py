"""Blocking work of the trainer's side on a thread, one piece at a time.

A thread cannot be stopped: work that passes its deadline goes on. Promises: what it makes reaches nobody then, and
the next piece starts only after it has ended, within its own deadline; it holds up no process's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from turnout.core.ports import Clock
from turnout.placement.call_threads import CallThreads

T = TypeVar("T")


class Worker:
    """See the module."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._threads = CallThreads("weights")
        self._last: asyncio.Future[Any] | None = None

    async def run(self, what: str, work: Callable[[], T], deadline_s: float) -> T:
        """The result of `work`; raises DeadlineExceeded that names `what`, or the work before it that still
        runs."""
        end = self._clock.now() + deadline_s
        if self._last is not None and not self._last.done():
            earlier = asyncio.wait({self._last})
            await self._clock.within(deadline_s, f"earlier work to end before {what}", earlier)
        task = self._threads.call(work)
        task.add_done_callback(_retrieved)
        self._last = task
        return await self._clock.within(max(0.001, end - self._clock.now()), what, asyncio.shield(task))


def _retrieved(task: asyncio.Future[T]) -> None:
    if not task.cancelled():
        task.exception()  # so that work that nobody waits for any more leaves no warning behind
