"""Every history of a small world of slots, for docs/staleness.md: admission, completion in any order, a windowed
FIFO, commits that come late.

`largest_lag` visits all states that can be reached. Lags are counted from now, so the states are finite. It knows
nothing of the production code, and has switches that break one rule each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations


@dataclass(frozen=True)
class World:
    """B slots, window W, P groups a step, engines up to E train steps behind the committed version, a version every
    n train steps. `drops`: open groups may be dropped. `cuts` (over-sampling without --partial-rollout): with
    each "take" of a batch all others are dropped, and nothing is admitted before the next version; or with each
    "update", which waits for the next batch, all beside that. A batch is the oldest that are complete then. The
    switches break a rule: `freed_at_publish`; `short`: a batch may lack one group and doesn't hold the slot of it;
    `loses_place`: a group may be cut and go to the end of the queue with its tokens."""

    slots: int
    window: int
    groups: int
    engine_lag: int = 0
    interval: int = 1
    drops: bool = False
    cuts: str = ""
    freed_at_publish: bool = False
    short: bool = False
    loses_place: bool = False


@dataclass(frozen=True)
class Group:
    """An open group: train steps done since its first version was exported, its place counted from the head."""

    lag: int
    place: int
    complete: bool = False


@dataclass(frozen=True)
class State:
    """`behind`: train steps done since the committed version was exported. `held`: slots of each step that was
    trained and not freed, oldest first. `published`: a version is on its way (only where that frees slots)."""

    behind: int = 0
    published: bool = False
    held: tuple[int, ...] = ()
    open: tuple[Group, ...] = ()
    next_place: int = 0


def largest_lag(world: World, enough: int) -> int:
    """The largest lag of a trained group over all histories; the search ends early once it is `enough`."""
    first = State()
    seen, todo, largest = {first}, [first], 0
    while todo and largest < enough:
        for state, lag in _after(world, todo.pop()):
            largest = max(largest, lag)
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return largest


def _after(world: World, state: State) -> Iterator[tuple[State, int]]:
    """Each state that may come next, with the lag of what was trained on the way."""
    rests = world.cuts == "take" and state.behind >= world.interval
    if sum(state.held) + len(state.open) < world.slots and not rests:
        fresh = Group(state.behind + world.engine_lag, state.next_place)  # made by the oldest weights allowed
        yield replace(state, open=(*state.open, fresh), next_place=state.next_place + 1), 0
    for at, group in enumerate(state.open):
        others = (*state.open[:at], *state.open[at + 1 :])
        if not group.complete:
            yield (
                replace(state, open=(*state.open[:at], replace(group, complete=True), *state.open[at + 1 :])),
                0,
            )
        if world.drops:
            closer = tuple(replace(g, place=g.place - (g.place > group.place)) for g in others)
            yield _counted_from_head(replace(state, open=closer, next_place=state.next_place - 1)), 0
        if world.loses_place and group.place < state.next_place - 1:
            moved = replace(group, place=state.next_place)
            again = replace(state, open=(*others, moved), next_place=state.next_place + 1)
            yield _counted_from_head(again), 0
    if world.cuts and state.behind >= world.interval:  # the loop waits for the update
        yield from _updated(world, state)
        return
    for size in {world.groups, max(1, world.groups - world.short)}:
        yield from _trained(world, state, size)
    yield from _updated(world, state)


def _trained(world: World, state: State, size: int) -> Iterator[tuple[State, int]]:
    complete = [group for group in state.open if group.complete]
    for batch in combinations(complete[:size] if world.cuts else complete, size):
        if _in_window(world, state, batch):
            rest = () if world.cuts == "take" else [group for group in state.open if group not in batch]
            left = tuple(replace(group, lag=group.lag + 1) for group in rest)
            after = replace(state, behind=state.behind + 1, held=(*state.held, size), open=left)
            yield _counted_from_head(after), max(group.lag for group in batch)


def _in_window(world: World, state: State, batch: tuple[Group, ...]) -> bool:
    """Whether each of the batch, oldest first, is among the W places from the head that is left."""
    left = list(state.open)
    for group in batch:
        if group.place >= left[0].place + world.window:
            return False
        left.remove(group)
    return True


def _updated(world: World, state: State) -> Iterator[tuple[State, int]]:
    made = state.behind >= world.interval
    freed = state.held[world.interval :]
    if world.cuts == "update" and made:
        kept = [group for group in state.open if group.complete][: world.groups]
        if len(kept) < world.groups:
            return
        state = _counted_from_head(replace(state, open=tuple(kept)))
    if not world.freed_at_publish:
        if made:
            yield replace(state, behind=state.behind - world.interval, held=freed), 0
    elif state.published:
        yield replace(state, behind=state.behind - world.interval, published=False), 0
    elif made:
        yield replace(state, published=True, held=freed), 0


def _counted_from_head(state: State) -> State:
    head = state.open[0].place if state.open else state.next_place
    moved = tuple(replace(group, place=group.place - head) for group in state.open)
    return replace(state, open=moved, next_place=state.next_place - head)
