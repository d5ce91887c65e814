"""The groups that are being made: one task and one cut for each.

Owns the tasks. Promises: each group's end is told once, from the event loop, however it ended; a cut ends it at a
token boundary with what it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from turnout.core.types import RolloutGroup
from turnout.rollout.sampler import Cut

Making = asyncio.Task[RolloutGroup]


class InFlight:
    """`ended` gets the group as it was begun and the task that is done."""

    def __init__(self, ended: Callable[[RolloutGroup, Making], None]) -> None:
        self._ended = ended
        self._tasks: dict[str, tuple[Making, Cut]] = {}  # in the order in which they began

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, group: RolloutGroup, make: Callable[[Cut], Coroutine[Any, Any, RolloutGroup]]) -> None:
        cut = Cut()
        task = asyncio.ensure_future(make(cut))
        self._tasks[group.group_id] = task, cut
        task.add_done_callback(lambda done: self._end(group, done))

    def _end(self, group: RolloutGroup, task: Making) -> None:
        del self._tasks[group.group_id]
        self._ended(group, task)

    def cut_newest(self, count: int) -> None:
        """Has the groups that began last end, the oldest of them first; they go on as PARTIAL when they may."""
        first = len(self._tasks) - count
        for at, (_, cut) in enumerate(list(self._tasks.values())):
            if at >= first:
                cut()

    async def cut(self) -> None:
        """Has all of them end, and waits for that. Rewards that are being computed are waited for: what has ended
        is no part of a group."""
        running = list(self._tasks.values())
        for _, cut in running:
            cut()
        await asyncio.gather(*(task for task, _ in running), return_exceptions=True)

    async def close(self) -> None:
        """Ends all of them now; what they have is in the journal."""
        running = [task for task, _ in self._tasks.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
