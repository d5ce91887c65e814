"""The pages of requests: private ones, and the beginnings that lie in the prefix cache. Pure.

Owns the allocator and the cache. Promises: a page is free, private to one request, or in the cache; a request's
first `depth` pages are those of its path in the cache; a cached page is evicted only where no free one is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnout.core.errors import InvariantBroken
from turnout.engine.pages import PageAllocator
from turnout.engine.radix import Node, PageKey, RadixCache
from turnout.engine.request_machine import Request


class PagePool:
    """`total` pages of `page_tokens` positions."""

    def __init__(self, total: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._pages = PageAllocator(total)
        self._cache = RadixCache()

    @property
    def available(self) -> int:
        """Pages that are free or can be evicted."""
        return self._pages.free + self._cache.evictable

    @property
    def free(self) -> int:
        """Pages that nothing lies in."""
        return self._pages.free

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def open(self, request: Request) -> None:
        """Starts the path of a request that begins to compute."""
        request.node, request.seen = self._cache.pin_root(request.namespace), (None, 0)

    def held(self, request: Request) -> int:
        """How many pages of a waiting request's beginning others hold: those cost it nothing. Looks on from where
        it looked last, so that waiting costs nothing in the prompt's length."""
        node, depth = request.seen
        while node is not None and (node.stale or not node.refs):
            node, depth = node.parent, depth - 1
        if node is None:
            node, depth = self._cache.root(request.namespace), 0
        size = self.page_tokens
        while node is not None and (depth + 1) * size <= request.reusable:
            child = node.children.get(tuple(request.tokens[depth * size : (depth + 1) * size]))
            if child is None or not child.refs:
                break
            node, depth = child, depth + 1
        request.seen = (node, depth)
        return depth

    def next_page(self, request: Request) -> tuple[Node | None, PageKey]:
        """What names the first page of a request that is not on its path: its last node, and the page's tokens."""
        size = self.page_tokens
        return request.node, tuple(request.tokens[request.depth * size : (request.depth + 1) * size])

    def may_adopt(self, request: Request) -> bool:
        """Whether the next page to compute may come from the cache as a whole."""
        whole = request.depth * self.page_tokens
        at_page = request.computed == whole and len(request.pages) == request.depth
        fits = whole + self.page_tokens <= request.reusable
        return at_page and fits and request.node is not None and not request.node.stale

    def adopt(self, request: Request) -> None:
        """Takes over the pages of its beginning that are cached."""
        while request.node is not None and self.may_adopt(request):
            child = request.node.children.get(self.next_page(request)[1])
            if child is None:
                return
            self._cache.pin(child)
            request.node, request.depth = child, request.depth + 1
            request.pages.append(child.page)
            request.computed += self.page_tokens
            if not request.preempted:
                request.cached += self.page_tokens

    def share(self, request: Request) -> None:
        """Puts pages of a request that are computed by now into the cache; one that has a twin there gives way."""
        while (request.depth + 1) * self.page_tokens <= request.computed:
            node, key = self.next_page(request)
            if node is None or node.stale:
                return
            page, child = request.pages[request.depth], node.children.get(key)
            if child is None:
                child = self._cache.insert(node, key, page)
            else:
                self._cache.pin(child)
                # a new list, so that the workers' page table hears of a change before its end
                request.pages = list(request.pages)
                request.pages[request.depth] = child.page
                self._pages.give([page])
            request.node, request.depth = child, request.depth + 1

    def extend(self, request: Request, tokens: int) -> None:
        """Gives a request pages for so many tokens in all, or what is there."""
        missing = min(self.pages_for(tokens) - len(request.pages), self.available)
        while self._pages.free < missing:
            self._pages.give([self._cache.evict()])
        if missing > 0:
            request.pages.extend(self._pages.take(missing))

    def release(self, request: Request) -> None:
        """Takes a request's pages back; those in the cache stay there while their epoch lasts."""
        self._pages.give(request.pages[request.depth :])
        if request.node is not None:
            self._pages.give(self._cache.release(request.node))
        request.pages, request.computed, request.node, request.depth = [], 0, None, 0

    def flush(self) -> None:
        """Frees all cached pages that nobody holds."""
        self._pages.give(self._cache.flush())

    def forget(self) -> None:
        """Ends the epoch of the weights: nobody finds what was computed before; holders keep what they hold."""
        self._pages.give(self._cache.forget())

    def check(self, requests: Sequence[Request]) -> None:
        """Raises InvariantBroken where pages of these, of the cache and the free ones are not all pages."""
        cached = self._cache.check([request.node for request in requests if request.node is not None])
        private = [page for request in requests for page in request.pages[request.depth :]]
        self._pages.check([*cached, *private])
        for request in requests:
            if request.node is not None and request.node.path() != request.pages[: request.depth]:
                raise InvariantBroken(f"{request.rid}: its first pages are not those of its path")
            if request.computed > len(request.pages) * self.page_tokens:
                raise InvariantBroken(f"{request.rid}: computed positions without a page")
