"""Which phase the run is in, and how long each took. Errors name the phase; metrics get the seconds.

What goes on beside the loop has its seconds too, and no part in `current`. Who goes through a phase waits for it
(turnout.core.waits): the run, or the update beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from turnout.core.events import PhaseEnded
from turnout.core.ports import Clock, EventSink
from turnout.core.waits import RUN, UPDATE, Waits


@dataclass
class Span:
    """One passage through a phase; `seconds` is set at its end."""

    seconds: float = 0.0


class Phases:
    """Phases do not nest. `current` keeps the name of the last one between phases; `waits` are those of the run."""

    def __init__(self, clock: Clock, events: EventSink | None = None) -> None:
        """`events`: where passages are told."""
        self._clock, self._events = clock, events
        self.current = "start"
        self.waits = Waits(clock.now)
        self.seconds: dict[str, float] = {}
        self.guard: Callable[[str], None] = lambda _: None  # raises where a phase may not begin now

    @contextmanager
    def __call__(self, name: str) -> Iterator[Span]:
        self.current = name
        with self._passed(RUN, name) as span:
            yield span

    @contextmanager
    def beside(self, name: str) -> Iterator[Span]:
        """A phase of the update, which goes on beside the loop."""
        with self._passed(UPDATE, name) as span:
            yield span

    @contextmanager
    def _passed(self, who: str, name: str) -> Iterator[Span]:
        self.guard(name)
        span, started = Span(), self._clock.now()
        try:
            with self.waits(who, name, "its end"):
                yield span
        finally:
            span.seconds = self._clock.now() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + span.seconds
            if self._events is not None:
                self._events.emit(PhaseEnded(who, name, round(span.seconds, 6)))

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken
