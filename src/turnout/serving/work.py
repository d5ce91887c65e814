"""When an engine had requests of the run, told as events: from its first request on to its last, not each.

Owns one engine's count. Promises: told whenever the engine has no request left, and where it always has some, at
the first end of one after `PART_S`; what is told never overlaps.
"""

from __future__ import annotations

from turnout.core.events import EngineWorked
from turnout.core.ports import Clock, EventSink

PART_S = 5.0


class Work:
    """Entered by each request, in any number at once."""

    def __init__(self, engine: str, events: EventSink, clock: Clock) -> None:
        self._engine, self._events, self._clock = engine, events, clock
        self._open, self._ended, self._since = 0, 0, 0.0

    def __enter__(self) -> None:
        if not self._open:
            self._since = self._clock.now()
        self._open += 1

    def __exit__(self, *_: object) -> None:
        self._open, self._ended = self._open - 1, self._ended + 1
        now = self._clock.now()
        if not self._open or now - self._since >= PART_S:
            ended, self._ended = self._ended, 0
            seconds, self._since = now - self._since, now
            self._events.emit(EngineWorked(self._engine, round(seconds, 6), ended))
