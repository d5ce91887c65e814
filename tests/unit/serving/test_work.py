"""An engine's work is told at its breaks, and in parts where it has none."""

from __future__ import annotations

from turnout.core.events import EngineWorked, Event
from turnout.placement.real import RealClock
from turnout.serving.work import PART_S, Work


class Watch(RealClock):
    time = 0.0

    def now(self) -> float:
        return self.time


class Told:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def test_requests_that_overlap_are_one_piece_of_work() -> None:
    watch, told = Watch(), Told()
    work = Work("engine-0", told, watch)
    watch.time = 1.0
    with work:
        watch.time = 2.0
        with work:
            watch.time = 3.0
        assert told.events == []
        watch.time = 3.5
    assert told.events == [EngineWorked("engine-0", 2.5, 2)]
    watch.time = 9.0
    with work:
        watch.time = 9.25
    assert told.events[1:] == [EngineWorked("engine-0", 0.25, 1)]


def test_work_without_a_break_is_told_in_parts_that_meet() -> None:
    watch, told = Watch(), Told()
    work = Work("engine-0", told, watch)
    with work:
        for _ in range(4):
            with work:
                watch.time += PART_S / 2
    seconds = [event.seconds for event in told.events if isinstance(event, EngineWorked)]
    assert seconds == [PART_S, PART_S, 0.0]
    requests = [event.requests for event in told.events if isinstance(event, EngineWorked)]
    assert requests == [2, 2, 1]
