"""Threads for calls that may hang: a call past its deadline is left behind with its thread, and told apart.

Owns its threads, which are daemons, so that none of them holds the end of a process. Promises: a call's result or
exception reaches the event loop that asked, or nobody, once it was abandoned; a thread whose call came back takes
the next one; there are never more threads than calls that ran at once and calls that never came back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from turnout.core.ports import Clock

T = TypeVar("T")
Job = tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Callable[[], Any]] | None  # None: end


class CallThreads:
    """`left_behind` counts the threads that are still in an abandoned call. `name` is that of each thread."""

    def __init__(self, name: str) -> None:
        self.left_behind, self._name = 0, name
        self._idle = 0
        self._jobs: SimpleQueue[Job] = SimpleQueue()

    def call(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """The result of `work` to come. Whoever stops waiting for it calls `abandon`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if self._idle:
            self._idle -= 1
        else:
            threading.Thread(target=self._serve, daemon=True, name=self._name).start()
        self._jobs.put((loop, future, work))
        return future

    def abandon(self, future: asyncio.Future[Any]) -> None:
        """Nobody waits for this call any more."""
        if not future.done():
            self.left_behind += 1
            future.cancel()

    async def done(self, work: Callable[[], T]) -> T:
        """The result of `work`; abandoned where who waits is cancelled."""
        future = self.call(work)
        try:
            return await future
        finally:
            if future.cancelled():
                self.left_behind += 1

    async def within(self, clock: Clock, deadline_s: float, what: str, work: Callable[[], T]) -> T:
        """The result of `work`; raises DeadlineExceeded, which names `what`, where it does not come in time."""
        return await clock.within(deadline_s, what, self.done(work))

    def close(self) -> None:
        """Ends the threads that are in no call. Nothing is called after this."""
        for _ in range(self._idle):
            self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            loop, future, work = job
            result, fault = body(work)
            try:
                loop.call_soon_threadsafe(self._deliver, future, result, fault)
            except RuntimeError:  # the loop is closed: nobody waits, and nobody counts this thread as idle
                return

    def _deliver(self, future: asyncio.Future[Any], result: Any, fault: BaseException | None) -> None:
        self._idle += 1
        if future.cancelled():
            self.left_behind -= 1
        elif fault is None:
            future.set_result(result)
        else:
            future.set_exception(fault)


def body(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What a call came to; an exit of the thread would leave its caller waiting for ever."""
    try:
        return work(), None
    except Exception as raised:  # noqa: BLE001 - handed to the caller
        return None, RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
    except BaseException as raised:  # noqa: BLE001 - handed to the caller
        return None, RuntimeError(repr(raised))
