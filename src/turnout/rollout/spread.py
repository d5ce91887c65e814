"""Which engine a request goes to. Pure.

Owns what each engine was sent, and where groups and sessions are at home. Promises: after a try that failed another
engine is chosen, where there is one; the turns of a session go to the engine that had the turn before, which has
their prefix in its cache, while it may be asked; the requests of a group go to one engine, which has their prompt,
the less loaded of two; a decode engine keeps no prefix, and is the less loaded of two for each request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf

from turnout.serving.client import EngineClient
from turnout.serving.roster import WorkerType


def endless() -> float:
    """Room for every request."""
    return inf


class Spread:
    """`room`: how many requests all engines may have been sent; with room for every one a group's number alone
    chooses its engine. A request's `rank` is its group's ordinal, its `session` names its trajectory (empty: it has
    one turn)."""

    def __init__(self, room: Callable[[], float] = endless) -> None:
        self._room = room
        self._load = Counter[str]()  # by engine
        self._homes: dict[int, tuple[str, int]] = {}  # by rank: the engine and how many requests it was sent
        self._sessions: dict[str, str] = {}

    def choose(
        self, rank: int, engines: Sequence[EngineClient], last: EngineClient | None, session: str = ""
    ) -> EngineClient:
        """The engine of a request of this group; after `last`, which failed, another one where there is one. Which
        two of many are compared follows from the rank: that costs the same however many engines there are."""
        count = len(engines)
        if last in engines:
            return engines[(engines.index(last) + 1) % count]
        first = engines[rank % count]
        if count == 1 or self._room() == inf:
            return first
        before = self._sessions.get(session)
        if before is not None:
            for engine in engines:
                if engine.engine_id == before:
                    return engine
        second = engines[(rank + 1 + rank // count % (count - 1)) % count]
        home, _ = self._homes.get(rank, ("", 0))
        keeps = first.plan.worker_type is not WorkerType.DECODE
        if keeps and home in (first.engine_id, second.engine_id):
            return first if home == first.engine_id else second
        return second if self._fuller(first, second) else first

    def _fuller(self, one: EngineClient, other: EngineClient) -> bool:
        """Whether `one` has more to do than `other`, each for its size where both are known."""
        mine, its = self._load[one.engine_id], self._load[other.engine_id]
        size, other_size = one.plan.running, other.plan.running
        if size is None or other_size is None or inf in (size, other_size):
            return its < mine
        return its * size < mine * other_size

    def sent(self, rank: int, engine_id: str, session: str = "") -> _Sent:
        """The block is one request on its way."""
        return _Sent(self, rank, engine_id, session)

    def begin(self, rank: int, engine_id: str, session: str) -> None:
        home, count = self._homes.get(rank, (engine_id, 0))
        self._homes[rank] = home, count + 1
        self._load[engine_id] += 1
        if session:
            self._sessions[session] = engine_id

    def end(self, rank: int, engine_id: str) -> None:
        self._load[engine_id] -= 1
        home, count = self._homes.pop(rank)
        if count > 1:
            self._homes[rank] = home, count - 1

    def forget(self, session: str) -> None:
        """The session has ended."""
        self._sessions.pop(session, None)


class _Sent:
    """The `with` of one request."""

    __slots__ = ("_engine_id", "_rank", "_session", "_spread")

    def __init__(self, spread: Spread, rank: int, engine_id: str, session: str) -> None:
        self._spread, self._rank, self._engine_id, self._session = spread, rank, engine_id, session

    def __enter__(self) -> None:
        self._spread.begin(self._rank, self._engine_id, self._session)

    def __exit__(self, *_: object) -> None:
        self._spread.end(self._rank, self._engine_id)
