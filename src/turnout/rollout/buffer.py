"""Which completed groups may be taken: first in, first out, but for a window. Pure.

Owns the order of the groups that were admitted and not yet taken. Promise: at most `window` - 1 groups that were
admitted later are ever taken before a group that is not complete: one slow group doesn't stop a batch at once, and
a batch is no race that short answers win. A window of 1 is strict order.

Only the oldest incomplete group can be in the way: whatever overtook a younger one overtook it too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable


class WindowBuffer:
    """Keys are group ids. `admit`, `complete`, `remove` and `ready_count` take O(log n), `ready` O(count)."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._next = 0
        self._waiting: OrderedDict[str, int] = OrderedDict()  # not complete: key -> place
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

    def admit(self, key: str) -> None:
        self._waiting[key] = self._next
        self._next += 1

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
        oldest = next(iter(self._waiting.values()), None)
        if oldest is None:
            return len(self._complete)
        room = self._window - 1 - len(self._overtakers)
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

    def pass_by(self) -> None:
        """A group that was admitted here and taken before a resume: it counts as one that overtook who waits
        longer."""
        insort(self._overtakers, self._next)
        self._next += 1
        self._forget()

    def _forget(self) -> None:
        """Only those that overtook the oldest one that waits still count."""
        oldest = next(iter(self._waiting.values()), self._next)
        del self._overtakers[: bisect_left(self._overtakers, oldest)]
