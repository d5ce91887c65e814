"""The pages of the KV cache as numbers. Owns which page is free and how many requests hold each other one.

Pages are handed out lowest first, so that the same schedule uses the same pages.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from turnout.core.errors import InvariantBroken


class PageAllocator:
    """`total` pages numbered from 0."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))
        self._holders: Counter[int] = Counter()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> set[int]:
        return set(self._holders)

    def take(self, count: int) -> list[int]:
        """`count` free pages; raises InvariantBroken where there are fewer (the caller looks at `free`)."""
        if count > len(self._free):
            raise InvariantBroken(f"{count} pages asked for, {len(self._free)} of {self.total} free")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        self._holders.update(pages)
        return pages

    def hold(self, page: int) -> None:
        """One holder more for a page that has one; raises InvariantBroken for a free page."""
        if page not in self._holders:
            raise InvariantBroken(f"page {page} is free and can't be shared")
        self._holders[page] += 1

    def give(self, pages: Sequence[int]) -> list[int]:
        """One holder less for each; returns the pages that are free now. Raises InvariantBroken for a page
        that nobody holds."""
        freed: list[int] = []
        for page in pages:
            if page not in self._holders:
                raise InvariantBroken(f"page {page} was returned without being taken")
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                heapq.heappush(self._free, page)
                freed.append(page)
        return freed

    def check(self, held: Sequence[int]) -> None:
        """Raises InvariantBroken unless `held` names every taken page once per holder and the rest is free."""
        if Counter(held) != self._holders:
            raise InvariantBroken(
                f"held pages {sorted(held)[:9]} are not the taken {sorted(self._holders.elements())[:9]}"
            )
        if len(self._free) + len(self._holders) != self.total or self.taken & set(self._free):
            raise InvariantBroken(
                f"{len(self._free)} free and {len(self._holders)} taken of {self.total} pages"
            )
