"""Who waits for whom, and the way from there to the root: a register of open waits, and pure functions over them.

    run -> rollout -> group g00000012a00 -> engine engine-1: a token, for 31 s of at most 600 s

A wait is an edge between two names; who waits for several waits for all of them, but for the names in ANY, which
the first of several frees. `since` is when what is waited for moved last: a request with new tokens moves, one
that is sent again and again does not. Promises: an entry costs a dictionary's, and nothing per token; a
chain ends where nothing that is waited for waits itself, or goes round in a circle, which it says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Self

RUN, ENGINES, PLACES, UPDATE, EVALUATE = "run", "engines", "places on the engines", "update", "evaluate"
STARTS = (RUN, UPDATE, EVALUATE)  # where a chain begins: the first of these that waits
ANY = frozenset({ENGINES, PLACES})


class Wait:
    """`who` waits for `on` to bring `what`, since it last moved and at most until (seconds of the run's clock).
    Registered for a `with` block; who holds it may change all but `who` as it goes on."""

    __slots__ = ("on", "register", "since", "until", "what", "who")

    def __init__(self, who: str, on: str, what: str, since: float, until: float = inf) -> None:
        self.who, self.on, self.what, self.since, self.until = who, on, what, since, until
        self.register: dict[int, Wait] | None = None

    def __enter__(self) -> Self:
        if self.register is not None:
            self.register[id(self)] = self
        return self

    def __exit__(self, *_: object) -> None:
        if self.register is not None:
            del self.register[id(self)]


Waiting = Callable[[str, str, float], Wait]


class Waits:
    """The open waits of one run; `now` is its clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._open: dict[int, Wait] = {}

    def __call__(self, who: str, on: str, what: str, seconds: float = inf) -> Wait:
        """A wait of at most so many seconds, registered while its block runs."""
        now = self.now()
        wait = Wait(who, on, what, now, now + seconds)
        wait.register = self._open
        return wait

    def of(self, who: str) -> Waiting:
        return partial(self, who)

    @property
    def open(self) -> list[Wait]:
        return list(self._open.values())


def unregistered(on: str, what: str, seconds: float) -> Wait:
    """Of who is asked by nobody what it waits for."""
    return Wait("", on, what, 0.0, seconds)


@dataclass(frozen=True)
class Chain:
    """The way from a start to its root, outermost first; `circle`: the last waits for one before it."""

    waits: tuple[Wait, ...] = ()
    circle: bool = False

    @property
    def since(self) -> float:
        """When the root moved last; inf where nothing is waited for."""
        return self.waits[-1].since if self.waits else inf

    @property
    def key(self) -> tuple[str, ...]:
        """The names on the way."""
        return tuple(wait.on for wait in self.waits)

    def line(self, now: float, facts: Mapping[str, str] | None = None) -> str:
        """One line; `facts` says more of a root by its name."""
        if not self.waits:
            return "nothing is waited for"
        root = self.waits[-1]
        names = " -> ".join((self.waits[0].who, *self.key))
        most = "" if root.until == inf else f" of at most {max(0.0, root.until - root.since):.0f} s"
        more = (facts or {}).get(root.on, "")
        circle = ", which waits for this: a circle" if self.circle else ""
        return (
            f"{names}: {root.what}, for {now - root.since:.0f} s{most}{circle}{f' ({more})' if more else ''}"
        )

    def to_json(self, now: float) -> list[dict[str, Any]]:
        """One row per wait; `limit_s` counts from where it moved last, None where it has none."""
        return [
            {
                "who": wait.who,
                "on": wait.on,
                "what": wait.what,
                "seconds": round(now - wait.since, 3),
                "limit_s": None if wait.until == inf else round(wait.until - wait.since, 3),
            }
            for wait in self.waits
        ]


def root_cause(waits: Iterable[Wait], starts: Iterable[str] = STARTS) -> Chain:
    """The chain from the first start that waits. Of several ways on it takes the one whose root has not moved for
    longest; where the first of several frees who waits, the one whose root moved last."""
    edges: dict[str, list[Wait]] = defaultdict(list)
    for wait in waits:
        edges[wait.who].append(wait)
    known: dict[str, Chain] = {}

    def beyond(name: str, passed: frozenset[str]) -> Chain:
        """From `name` on, which names in `passed` wait for."""
        if name in known:
            return known[name]
        ways = [way(wait, passed | {name}) for wait in edges.get(name, ())]
        choose = max if name in ANY else min
        found = choose(ways, key=lambda chain: chain.since, default=Chain())
        if not found.circle:  # a circle depends on where one came from
            known[name] = found
        return found

    def way(wait: Wait, passed: frozenset[str]) -> Chain:
        if wait.on in passed:
            return Chain((wait,), circle=True)
        rest = beyond(wait.on, passed)
        return Chain((wait, *rest.waits), rest.circle)

    for start in starts:
        if start in edges:
            return beyond(start, frozenset())
    return Chain()
