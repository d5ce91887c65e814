"""The events of a stretch of time, read from a log by where its times lie: for lanes, which don't need the groups.

Owns an index of the log in bounded memory: (wall time, place) every STRIDE bytes; and when engines began and ended.
Promises: `between` reads at most MAX_BYTES; what began before the stretch is there as far as an engine's life.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import deque
from pathlib import Path
from typing import Any

from turnout.core.events import (
    KINDS,
    EngineLost,
    EngineReady,
    EngineRemoved,
    Event,
    RouterLost,
    RouterReady,
    RunStarted,
    from_json,
)
from turnout.observe.tail import BLOCK, Tail

STRIDE, PLACES, LIVES = 1 << 16, 20_000, 4_000
MAX_BYTES = 32 << 20
GROUPS = b'{"event": "Group'
Timed = tuple[float, Event]


class EventWindows:
    """`first` and `last` are the times of the events so far."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self._stride = STRIDE
        self._at: list[float] = []
        self._places: list[int] = []
        self._lives: deque[Timed] = deque(maxlen=LIVES)

    def note(self, place: int, at: float, event: Event) -> None:
        """One event, as it is read."""
        self.first = at if self.first is None else self.first
        self.last = at if self.last is None else max(self.last, at)
        if not self._places or place - self._places[-1] >= self._stride:
            self._at.append(self.last)
            self._places.append(place)
            if len(self._places) > PLACES:
                self._at, self._places = self._at[::2], self._places[::2]
                self._stride *= 2
        if isinstance(
            event, RunStarted | EngineReady | EngineLost | EngineRemoved | RouterReady | RouterLost
        ):
            self._lives.append((at, event))

    def between(self, path: Path, start: float, end: float) -> tuple[list[Timed], bool]:
        """Events from `start` to `end` but those of groups, after the starts and ends of engines of the same
        incarnation before them; and whether that is all of it."""
        found: list[Timed] = []
        tail = Tail(path)
        tail.look()
        tail.offset = self._places[max(0, bisect_left(self._at, start) - 1)] if self._places else 0
        left = MAX_BYTES
        while left > 0 and (lines := tail.read(min(BLOCK, left))):
            for _, line in lines:
                left -= len(line) + 1
                timed = None if line.startswith(GROUPS) else _parsed(line)
                if timed is None or timed[0] < start:
                    continue
                if timed[0] > end:
                    return self._before(start) + found, True
                found.append(timed)
        return self._before(start) + found, left > 0

    def _before(self, start: float) -> list[Timed]:
        """Of the incarnation in which a moment lies."""
        lives = [timed for timed in self._lives if timed[0] < start]
        begun = max((n for n, (_, event) in enumerate(lives) if isinstance(event, RunStarted)), default=0)
        return lives[begun:]


def _parsed(line: bytes) -> Timed | None:
    try:
        row: dict[str, Any] = json.loads(line)
        return (float(row["at"]), from_json(row)) if row["event"] in KINDS else None
    except (ValueError, KeyError, TypeError):
        return None  # counted by whoever reads all of the log
