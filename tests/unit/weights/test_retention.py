"""What is removed, by tables; and whatever happens, nobody who lives loses its way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.weights.test_chain import delta, full, version
from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.weights.chain import cheapest
from turnout.weights.manifest import ANCHOR, FULL, WeightManifest
from turnout.weights.retention import FULL_KEPT, FollowerWatch, Holders, removable

BASE = version(0).root


def at(*counters: int) -> tuple[WeightVersion, ...]:
    return tuple(version(n) for n in counters)


def holders(committed: int, **more: tuple[WeightVersion, ...]) -> Holders:
    return Holders(BASE, frozenset(range(1, committed + 1)), **more)


FULLS = [full(n) for n in range(1, 6)]
CHAIN = [delta(1), delta(2), full(2, form=ANCHOR), delta(3), delta(4), full(4, form=ANCHOR), delta(5)]


@pytest.mark.parametrize(
    ("versions", "who", "expected"),
    [
        (FULLS, holders(5, engines=at(5)), [1, 2, 3]),
        (FULLS, holders(5, engines=at(5, 3)), [1, 2]),
        (FULLS, holders(5, engines=at(5, 3), pins=at(1)), [2]),
        (FULLS, holders(4, engines=at(4)), [1, 2]),  # 5 is being activated
        (FULLS, holders(3, engines=at(3)), [1]),
        (FULLS, Holders(BASE, frozenset({1, 2, 4})), [1, 3]),  # 3 was aborted
        (FULLS[:2], holders(2, engines=at(2)), []),
        (FULLS, holders(5, followers=at(1)), [1, 2, 3]),  # it takes the newest
    ],
)
def test_full_versions(versions: list[WeightManifest], who: Holders, expected: list[int]) -> None:
    assert removable(versions, who) == [f"weight_v{n:06d}" for n in expected]


@pytest.mark.parametrize(
    ("versions", "who", "expected"),
    [
        (CHAIN, holders(5, engines=at(5)), [1, 2, 3, 4]),
        (CHAIN, holders(5, engines=at(5), followers=at(3)), [1, 2]),
        (CHAIN, holders(5, engines=at(5), followers=at(4)), [1, 2, 3, 4]),
        (CHAIN, holders(5, engines=at(5), pins=at(3)), [1, 2, 4]),
        (CHAIN[:2], holders(2, engines=at(2)), []),  # no anchor: a joiner begins with the base
        (CHAIN[:4], holders(2, engines=at(2)), [1, 2]),
    ],
)
def test_deltas(versions: list[WeightManifest], who: Holders, expected: list[int]) -> None:
    assert removable(versions, who) == [f"weight_v{n:06d}" for n in expected]


def test_an_anchor_that_nobody_passed_yet_stays() -> None:
    who = holders(5, engines=at(5), followers=at(1))
    assert removable(CHAIN, who) == []


def way(versions: list[WeightManifest], target: str, held: str | None) -> bool:
    try:
        cheapest(versions, target, held)
    except WeightError:
        return False
    return True


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["delta", "full", "anchored", "abort", "engine", "follower", "join", "pin", "leave"]),
        st.integers(0, 9),
        st.integers(1, 1500),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_nobody_loses_the_way(actions: list[tuple[str, int, int]]) -> None:
    """A store grows, versions commit or abort, engines and followers move at their own pace; after each step what
    is removable goes."""
    store: list[WeightManifest] = []
    committed, newest, current = [0], 0, 0
    engines, followers, pins = [0, 0], [0], []
    for what, which, size in actions:
        if what in ("delta", "full", "anchored", "abort"):
            newest += 1
            made = full(newest, size) if what == "full" else delta(newest, size, since=None)
            if what != "full":
                made = replace(made, base=version(current))
            store += [made, *([full(newest, size, form=ANCHOR)] if what == "anchored" else [])]
            if what != "abort":
                committed.append(newest)
                current = newest
        elif what == "engine":
            engines[which % len(engines)] = current
        elif what == "follower" and followers:
            followers[which % len(followers)] = current
        elif what == "join":
            followers.append(current)
        elif what == "leave" and followers:
            followers.pop(which % len(followers))
        elif what == "pin":
            pins = [*pins, current][-2:]
        counters = frozenset(committed) - {0}
        who = Holders(BASE, counters, at(*engines), at(*followers), at(*pins))
        gone = set(removable(store, who))
        left = [m for m in store if m.directory not in gone]
        target = version(current).root
        for held in [None, BASE, *(version(n).root for n in {*engines, *followers})]:
            assert way(left, target, held) >= way(store, target, held) or held == BASE
        joiner = way(store, target, None) or way(store, target, BASE)
        assert (way(left, target, None) or way(left, target, BASE)) == joiner
        for pin in pins:
            assert way(left, version(pin).root, BASE) >= way(store, version(pin).root, BASE), pin
        fulls = [n for n in sorted({m.version.counter for m in store if m.kind == FULL}) if n in counters]
        kept = {m.version.counter for m in left if m.kind == FULL}
        assert set(fulls[-FULL_KEPT:]) <= kept
        assert {n for n in fulls if n >= min(engines)} <= kept
        store = left
    assert len({m.directory for m in store}) == len(store)


def test_the_store_stays_small_when_all_keep_up() -> None:
    store: list[WeightManifest] = []
    for counter in range(1, 50):
        store.append(delta(counter))
        if counter % 10 == 0:
            store.append(full(counter, form=ANCHOR))
        who = holders(counter, engines=at(counter), followers=at(counter))
        gone = set(removable(store, who))
        store = [m for m in store if m.directory not in gone]
        assert len(store) <= 12


def test_a_silent_follower_holds_nothing_back() -> None:
    watch = FollowerWatch(10.0)
    rows: dict[str, dict[str, object]] = {"a": {"counter": 1}, "b": {"counter": 1}}
    assert watch.live(rows, 0.0) == ["a", "b"]
    rows["b"] = {"counter": 1, "time": 5}
    assert watch.live(rows, 6.0) == ["a", "b"]
    assert watch.live(rows, 11.0) == ["b"]
    rows["a"] = {"counter": 2}
    assert watch.live(rows, 17.0) == ["a"]
    assert watch.live({}, 18.0) == []
