"""How audit rules look at a log of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from turnout.core.events import Event, RunEnded

FAILED_ENDS = frozenset({"failed", "interrupted", "killed"})

E = TypeVar("E", bound=Event)


def of_kind(log: Sequence[Event], kind: type[E]) -> list[E]:
    """The events of one kind, in order."""
    return [event for event in log if isinstance(event, kind)]


def ended_well(log: Sequence[Event]) -> bool:
    """Whether the run came to its normal end: a RunEnded whose status is none of FAILED_ENDS."""
    return any(event.status not in FAILED_ENDS for event in of_kind(log, RunEnded))
