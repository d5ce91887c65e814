"""The prefix cache alone: who is found, who is evicted, and what an epoch's end leaves."""

from __future__ import annotations

import pytest

from turnout.core.errors import InvariantBroken
from turnout.engine.radix import Node, RadixCache


def put(cache: RadixCache, path: str, pages: list[int], namespace: str = "") -> Node:
    """Pins a path, one letter a page, inserting what is missing with the given pages."""
    node: Node = cache.pin_root(namespace)
    left = list(pages)
    for letter in path:
        child = node.children.get((ord(letter),))
        if child is None:
            child = cache.insert(node, (ord(letter),), left.pop(0))
        else:
            cache.pin(child)
        node = child
    assert not left
    return node


def find(cache: RadixCache, path: str, namespace: str = "") -> list[int]:
    """Pages of the longest cached beginning."""
    node, pages = cache.root(namespace), []
    for letter in path:
        node = node.children.get((ord(letter),)) if node is not None else None
        if node is not None:
            pages.append(node.page)
    return pages


def test_the_longest_unused_leaf_goes_first_and_no_path_is_broken():
    cache = RadixCache()
    for path, pages in (("ab", [0, 1]), ("cd", [2, 3]), ("ax", [4]), ("ce", [5])):
        assert cache.release(put(cache, path, pages)) == []
    assert cache.release(put(cache, "ab", [])) == []  # ab is used again: cd is the oldest now
    cache.check([])
    assert [cache.evict() for _ in range(cache.evictable)] == [3, 4, 5, 2, 1, 0]
    assert cache.root("") is None  # an empty namespace is no more
    with pytest.raises(InvariantBroken):
        cache.evict()


def test_what_is_held_is_not_evicted_nor_flushed():
    cache = RadixCache()
    cache.release(put(cache, "abcd", [0, 1, 2, 3]))
    held = put(cache, "ab", [])
    assert cache.evictable == 2 and [cache.evict(), cache.evict()] == [3, 2]
    with pytest.raises(InvariantBroken):
        cache.evict()
    cache.release(put(cache, "xy", [5, 6]))
    assert sorted(cache.flush()) == [5, 6] and find(cache, "ab") == [0, 1]
    assert cache.check([held]) and cache.release(held) == []
    assert sorted(cache.flush()) == [0, 1] and cache.check([]) == []


def test_a_page_that_was_queued_before_it_was_pinned_can_go_again_after_a_flush():
    cache = RadixCache()
    cache.release(put(cache, "a", [0]))
    held = put(cache, "a", [])
    cache.flush()
    cache.release(held)
    cache.check([])
    assert cache.evict() == 0


def test_an_epoch_ends_for_all_who_come_later():
    cache = RadixCache()
    first, second = put(cache, "abc", [0, 1, 2]), put(cache, "abd", [3])
    cache.release(put(cache, "ax", [4]))
    assert cache.forget() == [4] and find(cache, "abc") == []
    new = put(cache, "ab", [7, 8])
    assert sorted(cache.check([first, second, new])) == [0, 1, 2, 3, 7, 8]
    with pytest.raises(InvariantBroken):
        cache.insert(first, (9,), 9)  # KV on top of the old weights' is no one else's
    assert cache.release(first) == [2] and cache.release(second) == [3, 1, 0]
    assert cache.release(new) == [] and cache.evictable == 2


def test_namespaces_share_nothing():
    cache = RadixCache()
    cache.release(put(cache, "ab", [0, 1]))
    assert find(cache, "ab", "v2") == []
    cache.release(put(cache, "ab", [2, 3], "v2"))
    assert find(cache, "ab") == [0, 1] and find(cache, "ab", "v2") == [2, 3]


def test_one_path_has_one_page():
    cache = RadixCache()
    put(cache, "a", [0])
    root = cache.root("")
    assert root is not None
    with pytest.raises(InvariantBroken):
        cache.insert(root, (ord("a"),), 1)


def test_check_finds_wrong_books():
    cache = RadixCache()
    held = put(cache, "ab", [0, 1])
    with pytest.raises(InvariantBroken, match="refs"):
        cache.check([])
    cache.release(held)
    cache.evictable += 1
    with pytest.raises(InvariantBroken, match="counted"):
        cache.check([])
