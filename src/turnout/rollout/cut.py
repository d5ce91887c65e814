"""Samples that are ended before they have ended: the group or the run stops, and what they have is kept.

Owns which tasks make samples now. Promises: a sample ends at a token boundary, since all that is taken over of an
event is taken over at once; only samples are ended, not what else their tasks do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Cut:
    """Ends samples at a token boundary: called once, it ends all that run under it, and all that come later."""

    def __init__(self) -> None:
        self.made = False
        self._tasks: dict[asyncio.Task[object], None] = {}  # in order, so that one seed gives one run

    def __call__(self) -> None:
        if not self.made:
            self.made = True
            for task in self._tasks:
                task.cancel()

    async def under(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` returns, None where the cut ends it; a task that is cancelled besides stays cancelled."""
        task = asyncio.current_task()
        assert task is not None, "samples are made in tasks"
        before = task.cancelling()
        self._tasks[task] = None
        try:
            return await work
        except asyncio.CancelledError:
            if not self.made or task.uncancel() > before:
                raise
            return None
        finally:
            self._tasks.pop(task, None)
