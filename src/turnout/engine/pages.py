"""The pages of the KV cache as numbers. Owns which page is free and which is taken; who holds a taken one is
the scheduler's and the prefix cache's to know.

Pages are handed out lowest first, so that the same schedule uses the same pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from turnout.core.errors import InvariantBroken


class PageAllocator:
    """`total` pages numbered from 0."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages; raises InvariantBroken where there are fewer (the caller looks at `free`)."""
        if count > len(self._free):
            raise InvariantBroken(f"{count} pages asked for, {len(self._free)} of {self.total} free")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        self._taken.update(pages)
        return pages

    def give(self, pages: Sequence[int]) -> None:
        """Takes pages back; raises InvariantBroken for one that is free."""
        for page in pages:
            if page not in self._taken:
                raise InvariantBroken(f"page {page} was returned without being taken")
            self._taken.remove(page)
            heapq.heappush(self._free, page)

    def check(self, held: Sequence[int]) -> None:
        """Raises InvariantBroken unless `held` names every taken page once and the rest is free."""
        if len(held) != len(self._taken) or set(held) != self._taken:
            raise InvariantBroken(
                f"held pages {sorted(held)[:9]} are not the taken {sorted(self._taken)[:9]}"
            )
        if len(self._free) + len(self._taken) != self.total or self._taken & set(self._free):
            raise InvariantBroken(
                f"{len(self._free)} free and {len(self._taken)} taken of {self.total} pages"
            )
