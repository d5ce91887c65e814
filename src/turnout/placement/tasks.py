"""Several calls at once, of which none outlives the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

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
