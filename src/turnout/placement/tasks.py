"""Several calls at once, of which none outlives the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


async def first(*work: Awaitable[T]) -> T:
    """The result of the first that is done, of the earlier one where several are. The rest is cancelled and
    awaited."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """The results, in order. At the first error, or when cancelled, the rest is cancelled and awaited: no
    request outlives what asked for it."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class Part(Generic[T]):
    """One call of `Parts`, in a task of its own. `loose`: nobody waits for that task if the others are cancelled
    now. `left`: its result, if it has one, is known; whatever it does now is of no use."""

    __slots__ = ("_whole", "at", "left", "loose")

    def __init__(self, whole: Parts[T], at: int) -> None:
        self._whole, self.at = whole, at
        self.left = self.loose = False

    @property
    def cancelled(self) -> bool:
        """Whether a cancellation is none of its own doing."""
        return self.left or self._whole.cancelled

    def leave(self, result: T) -> None:
        """This is its result. Its task is cancelled, and nobody waits for that."""
        if not self.left:
            self.left = True
            self._whole.tell(self.at, result)
            self._whole.drop(self.at)


class Parts(Generic[T]):
    """As `together`, of calls that one may leave. A call's end costs no callback: it tells its result itself."""

    def __init__(self) -> None:
        self._owner: asyncio.Task[Any] | None = None
        self._cancels = 0
        self._all: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._results: dict[int, T] = {}
        self._fault: BaseException | None = None

    async def made(self, items: Sequence[S], work: Callable[[Part[T], S], Awaitable[T]]) -> list[T]:
        """What `work` makes of the items, in order."""
        self._owner = asyncio.current_task()
        self._cancels = 0 if self._owner is None else self._owner.cancelling()
        loop, parts = asyncio.get_running_loop(), [Part(self, at) for at in range(len(items))]
        self._tasks = [loop.create_task(self._run(part, item, work)) for part, item in zip(parts, items)]
        try:
            if parts:
                await self._all
            if self._fault is not None:
                raise self._fault
            return [self._results[at] for at in range(len(parts))]
        except GeneratorExit:
            raise
        except BaseException:
            await self._end(parts)
            raise
        finally:
            self._tasks, self._fault = [], None  # their frames hold this

    @property
    def cancelled(self) -> bool:
        """Whether who waits for all of it is."""
        return self._owner is not None and self._owner.cancelling() > self._cancels

    def tell(self, at: int, result: T) -> None:
        self._results[at] = result
        if len(self._results) == len(self._tasks) and not self._all.done():
            self._all.set_result(None)

    def drop(self, at: int) -> None:
        """Nobody waits for this one any more."""
        task = self._tasks[at]
        _DROPPED.add(task)
        task.add_done_callback(_forget)
        task.cancel()

    async def _run(self, part: Part[T], item: S, work: Callable[[Part[T], S], Awaitable[T]]) -> None:
        try:
            result = await work(part, item)
        except BaseException as fault:
            if not part.left:
                part.left = True
                self._fail(fault)
            raise
        if not part.left:
            part.left = True
            self.tell(part.at, result)

    def _fail(self, fault: BaseException) -> None:
        if self._fault is None:
            self._fault = fault
            if not self._all.done():
                self._all.set_result(None)

    async def _end(self, parts: Sequence[Part[T]]) -> None:
        kept: list[asyncio.Task[None]] = []
        for part, task in zip(parts, self._tasks):
            if part.loose and not part.left:
                part.left = True
                self.drop(part.at)
            elif task not in _DROPPED:
                task.cancel()
                kept.append(task)
        await asyncio.gather(*kept, return_exceptions=True)


_DROPPED: set[asyncio.Task[Any]] = set()


def _forget(task: asyncio.Task[Any]) -> None:
    _DROPPED.discard(task)
    if not task.cancelled():
        task.exception()  # marks it as seen
