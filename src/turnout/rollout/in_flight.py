"""The groups that are being made: one task and one cut for each.

Owns the tasks. Promises: each group's end is told once, however it ended, before the event loop goes round again,
those of a round together: what they write is one commit; a cut ends a group at a token boundary with what it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import islice
from typing import Any

from turnout.core.types import RolloutGroup
from turnout.rollout.cut import Cut

Making = asyncio.Task[RolloutGroup]
Ends = list[tuple[RolloutGroup, Making]]


class InFlight:
    """`ended` gets groups as they were begun, with their tasks, which are done."""

    def __init__(self, ended: Callable[[Ends], None]) -> None:
        self._ended, self._ends = ended, Ends()
        self._tasks: dict[str, tuple[Making, Cut]] = {}  # in the order in which they began

    def __len__(self) -> int:
        return len(self._tasks) + len(self._ends)

    @property
    def keys(self) -> list[str]:
        """Of those that are being made, in the order in which they began."""
        return list(self._tasks)

    def begin(self, group: RolloutGroup, make: Callable[[Cut], Coroutine[Any, Any, RolloutGroup]]) -> None:
        cut = Cut()
        task = asyncio.ensure_future(make(cut))
        self._tasks[group.group_id] = task, cut
        task.add_done_callback(lambda done: self._end(group, done))

    def _end(self, group: RolloutGroup, task: Making) -> None:
        del self._tasks[group.group_id]
        if not self._ends:
            asyncio.get_running_loop().call_soon(self._tell)
        self._ends.append((group, task))

    def _tell(self) -> None:
        ends, self._ends = self._ends, []
        if ends:
            self._ended(ends)

    def cut_newest(self, count: int) -> None:
        """Has the groups that began last end, the oldest of them first; they go on as PARTIAL when they may."""
        newest = list(islice(reversed(self._tasks.values()), count))
        for _, cut in reversed(newest):
            cut()

    async def cut(self) -> None:
        """Has all of them end, and waits for that. Rewards that are being computed are waited for: what has ended
        is no part of a group."""
        running = list(self._tasks.values())
        for _, cut in running:
            cut()
        await asyncio.gather(*(task for task, _ in running), return_exceptions=True)
        self._tell()

    async def close(self) -> None:
        """Ends all of them now; what they have is in the journal."""
        running = [task for task, _ in self._tasks.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._tell()
