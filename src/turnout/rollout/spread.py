"""Which engine a request goes to. Pure.

Owns what each engine was sent, and where groups and sessions are at home. Promises: after a try that failed another
engine is chosen, where there is one; the turns of a session go to the engine that had the turn before, which has
their prefix in its cache, while it may be asked; the requests of a group go to one engine, which has their prompt,
the less loaded of two; a decode engine keeps no prefix, and is the less loaded of two for each request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from turnout.serving.client import EngineClient
from turnout.serving.roster import WorkerType


@dataclass(slots=True)
class _Home:
    """The engine that a group was sent to first, and how many of its requests are on their way."""

    engine_id: str
    sent: int = 1


def endless() -> float:
    """Room for every request."""
    return inf


class Spread:
    """`room`: how many requests all engines may have been sent; with room for every one a group's number alone
    chooses its engine. A request's `rank` is its group's ordinal, its `session` names its trajectory (empty: it has
    one turn)."""

    def __init__(self, room: Callable[[], float] = endless) -> None:
        self._room = room
        self._load = defaultdict[str, int](int)  # by engine
        self._homes: dict[int, _Home] = {}  # by rank
        self._sessions: dict[str, str] = {}

    def choose(
        self, rank: int, engines: Sequence[EngineClient], last: EngineClient | None, session: str = ""
    ) -> EngineClient:
        """The engine of a request of this group; after `last`, which failed, another one where there is one. Which
        two of many are compared follows from the rank: that costs the same however many engines there are."""
        count = len(engines)
        if last is not None and last in engines:
            return engines[(engines.index(last) + 1) % count]
        first = engines[rank % count]
        if count == 1 or self._room() == inf:
            return first
        before = self._sessions.get(session) if session else None
        if before is not None:
            for engine in engines:
                if engine.engine_id == before:
                    return engine
        second = engines[(rank + 1 + rank // count % (count - 1)) % count]
        home = self._homes.get(rank)
        if home is not None and first.plan.worker_type is not WorkerType.DECODE:
            for engine in (first, second):
                if engine.engine_id == home.engine_id:
                    return engine
        return second if self._fuller(first, second) else first

    def _fuller(self, one: EngineClient, other: EngineClient) -> bool:
        """Whether `one` has more to do than `other`, each for its size where both are known."""
        mine, its = self._load[one.engine_id], self._load[other.engine_id]
        size, other_size = one.plan.running, other.plan.running
        if size is None or other_size is None or inf in (size, other_size):
            return its < mine
        return its * size < mine * other_size

    def begin(self, rank: int, engine_id: str, session: str = "") -> None:
        """A request is on its way, until `end`."""
        home = self._homes.get(rank)
        if home is None:
            self._homes[rank] = _Home(engine_id)
        else:
            home.sent += 1
        self._load[engine_id] += 1
        if session:
            self._sessions[session] = engine_id

    def end(self, rank: int, engine_id: str) -> None:
        self._load[engine_id] -= 1
        home = self._homes[rank]
        home.sent -= 1
        if not home.sent:
            del self._homes[rank]

    def forget(self, session: str) -> None:
        """The session has ended."""
        self._sessions.pop(session, None)
