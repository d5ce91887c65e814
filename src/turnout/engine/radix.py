"""The prefix cache: a radix tree over full pages of the KV cache, keyed by their tokens. Pure.

Owns the pages that lie in the tree. A node is one page; the path to it from the root of its namespace is all
tokens before it, so equal paths mean equal KV (a row's result depends on its own sequence only). Promises:
- a page enters the tree when all of it was computed, and one path has one page;
- a node is pinned while a running request holds it or one below it (`refs` counts those requests); only a node
  without refs is evicted, leaves first, the longest unused first;
- `forget` ends an epoch of the weights: nothing computed before is found again; what running requests hold stays
  theirs and is freed with the last of them;
- every operation costs the pages it moves over, not the pages that are cached.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from turnout.core.errors import InvariantBroken

PageKey = tuple[int, ...]


class Node:
    """One cached page, or a Root."""

    __slots__ = ("children", "key", "page", "parent", "queued", "refs", "stale", "used")

    def __init__(self, parent: Node | None, key: PageKey, page: int) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.children: dict[PageKey, Node] = {}
        self.refs = 0
        self.used = 0  # when its last holder left, in releases
        self.stale = False  # of an epoch that is over
        self.queued = False  # whether it has an entry in the eviction queue

    def path(self) -> list[int]:
        """Pages from the root to here."""
        pages: list[int] = []
        node = self
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        return pages[::-1]


class Root(Node):
    """Where the paths of one namespace begin."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(None, (), -1)
        self.namespace = namespace


class RadixCache:
    """See the module. Pages come in by `insert` and go out by `evict`, `release`, `flush` and `forget`."""

    def __init__(self) -> None:
        self.evictable = 0  # nodes without refs
        self._roots: dict[str, Root] = {}
        self._queue: list[tuple[int, int, Node]] = []  # (used, entry, leaf); an entry may be out of date
        self._releases = 0
        self._entries = 0

    def root(self, namespace: str) -> Root | None:
        """The root of what was cached under this name; None where nothing was."""
        return self._roots.get(namespace)

    def pin_root(self, namespace: str) -> Root:
        """Starts a request's path; `release` ends it."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
        root.refs += 1
        return root

    def pin(self, child: Node) -> None:
        """Lengthens a path by a child of its last node."""
        self.evictable -= child.refs == 0
        child.refs += 1

    def insert(self, node: Node, key: PageKey, page: int) -> Node:
        """Lengthens a path by a page that was computed and has no node yet."""
        if node.stale or key in node.children:
            raise InvariantBroken(f"page {page} can't enter the cache: its path is over or has one")
        child = node.children[key] = Node(node, key, page)
        child.refs = 1
        return child

    def release(self, node: Node) -> list[int]:
        """Ends the path whose last node this is. Returns the pages that are free now: those of an epoch that
        is over; others stay cached."""
        self._releases += 1
        freed: list[int] = []
        at: Node | None = node
        while at is not None:
            parent = at.parent
            at.refs -= 1
            if at.refs == 0:
                at.used = self._releases
                if isinstance(at, Root):
                    self._drop_root(at)
                elif at.stale:
                    self._unlink(at)
                    freed.append(at.page)
                else:
                    self.evictable += 1
                    self._offer(at)
            at = parent
        return freed

    def evict(self) -> int:
        """Takes the page of the leaf that is unused for longest; raises InvariantBroken where none is left."""
        while self._queue:
            used, _, node = heapq.heappop(self._queue)
            node.queued = False
            if node.refs or node.children or node.stale:
                continue  # it is offered again when it is free again
            if node.used != used:
                self._offer(node)
                continue
            parent = self._unlink(node)
            node.stale = True  # whoever still looks at it must not go on from it
            self.evictable -= 1
            if isinstance(parent, Root):
                self._drop_root(parent)
            elif not parent.refs:
                self._offer(parent)
            return node.page
        raise InvariantBroken("a page was to be evicted and none can be")

    def flush(self) -> list[int]:
        """Drops all that nobody holds; returns its pages."""
        pages: list[int] = []
        for node in list(self._nodes()):
            node.queued = False
            if not node.refs:
                node.stale = True
                pages.append(node.page)
                if node.parent is not None and node.parent.refs:
                    self._unlink(node)
        for root in list(self._roots.values()):
            if not root.refs:
                root.children.clear()
                self._drop_root(root)
        self.evictable = 0
        self._queue = []
        return pages

    def forget(self) -> list[int]:
        """Ends the epoch: drops all that nobody holds, and lets nobody find the rest. Returns the freed pages."""
        pages = self.flush()
        for node in self._nodes():
            node.stale = True
        for root in self._roots.values():
            root.stale = True
        self._roots.clear()
        return pages

    def check(self, paths: list[Node]) -> list[int]:
        """All pages of the tree; raises InvariantBroken where refs, counts or links contradict `paths`, the last
        node of each running request."""
        refs: dict[Node, int] = {}
        for path in paths:
            at: Node | None = path
            while at is not None:
                refs[at] = refs.get(at, 0) + 1
                at = at.parent
        current = list(self._nodes())
        stale = [node for node in refs if node.stale and not isinstance(node, Root)]
        free = [node for node in current if not node.refs]
        if any(node.refs != refs.get(node, 0) for node in [*current, *self._roots.values(), *stale]):
            raise InvariantBroken("a node of the prefix cache has other refs than requests that hold it")
        if len(free) != self.evictable or any(not (n.queued or n.children) for n in free):
            raise InvariantBroken(f"{len(free)} cached pages can go, {self.evictable} are counted as such")
        if any(node.stale for node in current) or any(
            not node.stale for node in refs.keys() - {*current, *self._roots.values()}
        ):
            raise InvariantBroken("a node of an epoch that is over can be found, or one of this can't")
        return [node.page for node in [*current, *stale]]

    def _nodes(self) -> Iterator[Node]:
        """All nodes of this epoch but the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _offer(self, node: Node) -> None:
        """Queues a node for eviction if it is a leaf; it has at most one entry."""
        if not node.children and not node.queued:
            self._entries += 1
            node.queued = True
            heapq.heappush(self._queue, (node.used, self._entries, node))

    def _unlink(self, node: Node) -> Node:
        parent = node.parent
        if parent is None or parent.children.pop(node.key, None) is not node:
            raise InvariantBroken(f"page {node.page} is not where its path leads")
        return parent

    def _drop_root(self, root: Root) -> None:
        """A namespace that caches nothing and serves nobody is no more."""
        if not (root.stale or root.refs or root.children):
            root.stale = True
            del self._roots[root.namespace]
