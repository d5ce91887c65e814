"""Which completed groups may be taken: first in, first out, but for a window. Pure.

Owns the order of the groups that were admitted and not yet taken: by their places, the ordinals of their prompts,
which all attempts at a prompt share. Promise: at most `window` - 1 groups with later places are ever taken before a
group that is admitted and not complete: one slow group doesn't stop a batch at once, and a batch is no race that
short answers win. A window of 1 is strict order.

Only the oldest incomplete group can be in the way: whatever overtook a younger one overtook it too. (An attempt
that begins before all that wait may be taken for overtaken by what overtook these: that is stricter than the
promise, and ends with the attempt.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heappop, heappush, nsmallest


class WindowBuffer:
    """Keys are group ids. `admit`, `complete`, `remove` and `ready_count` take O(log n), `ready` O(count)."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._waiting: dict[str, int] = {}  # not complete: key -> place
        self._queue: list[tuple[int, str]] = []  # a heap of them, with some that wait no more
        self._places: dict[str, int] = {}  # complete: key -> place
        self._complete: list[tuple[int, str]] = []  # sorted
        self._overtakers: list[int] = []  # places that were taken before the oldest one that waits, sorted

    def __len__(self) -> int:
        return len(self._waiting) + len(self._complete)

    @property
    def complete_count(self) -> int:
        return len(self._complete)

    @property
    def complete_keys(self) -> list[str]:
        """The complete groups in the order in which they were admitted."""
        return [key for _, key in self._complete]

    def oldest(self, count: int) -> list[str]:
        """The first `count` that are not complete: no younger one is in the way of so many that are."""
        return nsmallest(count, self._waiting, key=self._waiting.__getitem__)

    def admit(self, key: str, place: int) -> None:
        """A group begins; another attempt than this had the place, if any."""
        self._waiting[key] = place
        heappush(self._queue, (place, key))
        at = bisect_left(self._overtakers, place)
        if self._overtakers[at : at + 1] == [place]:  # it was taken, and is sent back
            del self._overtakers[at]

    def complete(self, key: str) -> None:
        place = self._waiting.pop(key)
        self._places[key] = place
        insort(self._complete, (place, key))
        self._forget()

    def remove(self, key: str) -> None:
        """The group ends without being taken."""
        if key in self._waiting:
            del self._waiting[key]
            self._forget()
        else:
            place = self._places.pop(key)
            del self._complete[bisect_left(self._complete, (place, key))]

    @property
    def ready_count(self) -> int:
        """How many may be taken now."""
        oldest = self._oldest()
        if oldest is None:
            return len(self._complete)
        room = max(0, self._window - 1 - len(self._overtakers))
        return min(len(self._complete), bisect_left(self._complete, (oldest,)) + room)

    def ready(self, count: int) -> list[str]:
        """The oldest complete groups that may be taken now, at most `count`."""
        return [key for _, key in self._complete[: min(count, self.ready_count)]]

    def take(self, count: int) -> list[str]:
        """Takes what is ready."""
        taken = self.ready(count)
        self.take_these(taken)
        return taken

    def complete_all(self, keys: Iterable[str]) -> bool:
        """Whether these are complete."""
        return all(key in self._places for key in keys)

    def take_these(self, keys: Iterable[str]) -> None:
        """Takes complete groups whatever the window says: what is ready, or a batch that was taken before."""
        for key in keys:
            place = self._places.pop(key)
            del self._complete[bisect_left(self._complete, (place, key))]
            insort(self._overtakers, place)
        self._forget()

    def pass_by(self, place: int) -> None:
        """A group with this place was taken before a resume: it counts as one that overtook who waits longer."""
        insort(self._overtakers, place)
        self._forget()

    def _oldest(self) -> int | None:
        """The place of the oldest one that waits."""
        while self._queue and self._queue[0][1] not in self._waiting:
            heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def _forget(self) -> None:
        """Only those that overtook the oldest one that waits still count."""
        oldest = self._oldest()
        gone = len(self._overtakers) if oldest is None else bisect_left(self._overtakers, oldest)
        del self._overtakers[:gone]
