"""Phases: the name for errors, the seconds for metrics."""

from __future__ import annotations

from typing import ClassVar

import pytest

from turnout.core.events import Event, PhaseEnded
from turnout.core.waits import RUN, UPDATE
from turnout.placement.real import RealClock
from turnout.schedule.phases import Phases


class Watch(RealClock):
    time = 0.0

    def now(self) -> float:
        return self.time


def test_seconds_are_summed_by_phase_and_taken_once() -> None:
    watch = Watch()
    phases = Phases(watch)
    assert phases.current == "start"
    for name, seconds in (("rollout", 2.0), ("train", 3.0), ("rollout", 0.5)):
        with phases(name) as span:
            assert phases.current == name
            watch.time += seconds
        assert span.seconds == seconds
    assert phases.current == "rollout", "between phases the last one still names an error"
    assert phases.take() == {"rollout": 2.5, "train": 3.0}
    assert phases.take() == {}


def test_passages_are_told_with_who_went_through_them() -> None:
    class Told:
        events: ClassVar[list[Event]] = []

        def emit(self, event: Event) -> None:
            self.events.append(event)

    watch = Watch()
    phases = Phases(watch, Told())
    with phases("train"):
        watch.time += 3.0
    with pytest.raises(RuntimeError), phases.beside("prepare"):
        watch.time += 0.25
        raise RuntimeError
    assert Told.events == [PhaseEnded(RUN, "train", 3.0), PhaseEnded(UPDATE, "prepare", 0.25)]


def test_a_phase_that_fails_is_counted_and_stays_current() -> None:
    watch = Watch()
    phases = Phases(watch)
    with pytest.raises(RuntimeError), phases("update"):
        watch.time += 4.0
        raise RuntimeError
    assert phases.current == "update"
    assert phases.take() == {"update": 4.0}
