"""The bound of docs/staleness.md, in every history of small worlds; the production buffer against a dumb one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rollout.lag_model import World, largest_lag
from turnout.core.slots import lead_bound, slots_for
from turnout.rollout.buffer import WindowBuffer

WORLDS = [
    World(slots, window, groups, engine_lag, interval)
    for groups, interval, window, engine_lag in itertools.product((1, 2, 3), (1, 2), (1, 2, 3), (0, 1))
    for slots in range(interval * groups, min(5, interval * groups + 2) + 1)
]


def bound(world: World) -> int:
    return lead_bound(world.slots, world.window, world.groups, world.engine_lag)


@pytest.mark.parametrize("drops", [False, True])
def test_no_history_goes_over_the_bound_and_some_reach_it(drops: bool) -> None:
    for plain in WORLDS:
        world = World(**{**vars(plain), "drops": drops})
        tight = world.slots > world.interval * world.groups or world.window == 1
        expected = bound(world) if tight else world.interval - 1 + world.engine_lag
        assert largest_lag(world, bound(world) + 1) == expected, world


@pytest.mark.parametrize(
    ("broken", "lag"),
    [
        (World(1, 1, 1, freed_at_publish=True), 1),
        (World(3, 2, 1, freed_at_publish=True), 4),
        (World(2, 1, 1, interval=2, freed_at_publish=True), 3),
        (World(2, 1, 2, short=True), 1),
        (World(4, 1, 2, short=True), 3),
    ],
    ids=str,
)
def test_a_broken_rule_breaks_the_bound(broken: World, lag: int) -> None:
    assert largest_lag(broken, 99) == lag > bound(broken)


@pytest.mark.parametrize(("cuts", "interval"), [("take", 1), ("take", 2), ("update", 1), ("update", 2)])
def test_over_sampling_that_drops_the_surplus_adds_nothing_to_the_lag(cuts: str, interval: int) -> None:
    lead = interval - (cuts == "take")
    for groups, surplus in ((1, 1), (1, 2), (2, 1))[: 4 - interval]:
        slots, window = (lead + 1) * groups + surplus, max(1, lead) * groups + 1
        world = World(slots, window, groups, 0, interval, drops=True, cuts=cuts)
        assert largest_lag(world, 99) == lead
        assert largest_lag(replace(world, cuts=""), lead + 1) > lead


def test_a_group_that_keeps_its_tokens_but_not_its_place_has_no_bound() -> None:
    assert largest_lag(World(2, 1, 1, loses_place=True), 50) >= 50


@given(st.integers(0, 5), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_the_slots_of_a_lead_are_the_most_that_keep_it(lead: int, window: int, groups: int, lag: int) -> None:
    slots = slots_for(lead, window, groups, lag)
    if slots >= 1:
        assert lead_bound(slots, window, groups, lag) <= lead
    if slots >= 0:
        assert lead_bound(slots + 1, window, groups, lag) > lead


class DumbBuffer:
    """Every group knows how many younger ones were taken before it."""

    def __init__(self, window: int) -> None:
        self.window, self.complete = window, set[str]()
        self.overtaken: dict[str, int] = {}  # not taken, in order of admission

    def take(self, count: int) -> list[str]:
        taken: list[str] = []
        for key in list(self.overtaken):
            older = list(itertools.takewhile(lambda other, key=key: other != key, self.overtaken))
            fits = all(self.overtaken[other] < self.window - 1 for other in older)
            if len(taken) < count and key in self.complete and fits:
                taken.append(key)
                del self.overtaken[key]
                for other in older:
                    self.overtaken[other] += 1
        return taken


NAMES = ["admit", "admit", "complete", "complete", "complete", "take", "remove"]
OPERATIONS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 6)), min_size=20, max_size=60)


@given(st.integers(1, 5), OPERATIONS)
def test_the_buffer_does_what_a_dumb_one_does(window: int, operations: list[tuple[str, int]]) -> None:
    buffer, dumb = WindowBuffer(window), DumbBuffer(window)
    for number, (operation, index) in enumerate(operations):
        open_keys = list(dumb.overtaken)
        key = open_keys[index % len(open_keys)] if open_keys else ""
        if operation == "admit":
            buffer.admit(f"g{number}", number)
            dumb.overtaken[f"g{number}"] = 0
        elif operation == "take":
            assert len(buffer.ready(99)) == buffer.ready_count
            assert buffer.take(index) == dumb.take(index)
        elif operation == "remove" and key:
            buffer.remove(key)
            del dumb.overtaken[key]
            dumb.complete.discard(key)
        elif operation == "complete" and key and key not in dumb.complete:
            buffer.complete(key)
            dumb.complete.add(key)
        assert len(buffer) == len(dumb.overtaken)
        assert buffer.complete_count == len(dumb.complete & dumb.overtaken.keys())


AGAIN = st.lists(
    st.tuples(st.sampled_from(["admit", "admit", "complete", "take", "back"]), st.integers(0, 9))
)


@given(st.integers(1, 4), AGAIN)
def test_no_attempt_is_overtaken_more_often_than_the_window_says(
    window: int, operations: list[tuple[str, int]]
) -> None:
    """Groups that were taken come back at their place as new attempts, and have overtaken nobody then; at the end
    all that is complete is ready."""
    buffer, waiting, taken = WindowBuffer(window), dict[str, int](), list[int]()
    overtaken, places = dict[str, set[int]](), dict[str, int]()
    for number, (operation, index) in enumerate(operations):
        key = f"g{number}"
        if operation in ("admit", "back"):
            if operation == "back" and not taken:
                continue
            places[key] = number if operation == "admit" else taken.pop(index % len(taken))
            for others in overtaken.values():
                others.discard(places[key])
            waiting[key], overtaken[key] = places[key], set()
            buffer.admit(key, places[key])
        elif operation == "complete" and waiting:
            done = list(waiting)[index % len(waiting)]
            del waiting[done]
            buffer.complete(done)
        elif operation == "take":
            for one in buffer.take(index):
                taken.append(places[one])
                for other, place in waiting.items():
                    if place < places[one]:
                        overtaken[other].add(places[one])
        assert all(len(others) <= window - 1 for others in overtaken.values())
    for key in list(waiting):
        buffer.complete(key)
    assert buffer.ready_count == len(buffer)
