"""How audit rules look at a log of events, which may tell of several incarnations of one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from turnout.core.events import (
    EvalDone,
    Event,
    GroupCompleted,
    GroupDropped,
    GroupRequeued,
    GroupTaken,
    GroupTrained,
    RunEnded,
    RunStarted,
    StepTrained,
)

FAILED_ENDS = frozenset({"failed", "interrupted", "killed", "paused"})

E = TypeVar("E", bound=Event)


def of_kind(log: Sequence[Event], kind: type[E]) -> list[E]:
    """The events of one kind, in order."""
    return [event for event in log if isinstance(event, kind)]


def ended_well(log: Sequence[Event]) -> bool:
    """Whether the run came to its normal end: its last incarnation has a RunEnded whose status is none of
    FAILED_ENDS."""
    ends = of_kind(log[starts(log)[-1] :] if starts(log) else log, RunEnded)
    return any(event.status not in FAILED_ENDS for event in ends)


def starts(log: Sequence[Event]) -> list[int]:
    """Where the incarnations begin."""
    return [at for at, event in enumerate(log) if isinstance(event, RunStarted)]


def as_one(log: Sequence[Event]) -> list[Event]:
    """The run without what was undone: of each incarnation that another one followed, the train steps from the step
    on at which that one goes on. A group that was taken anew, since the ledger was lost with it, counts from there;
    one that was trained before that step stays, so that a second time shows."""
    told: list[Event] = []
    for begin, end in zip([0, *starts(log)[1:]], [*starts(log)[1:], len(log)]):
        part = log[begin:end]
        if begin and isinstance(first := log[begin], RunStarted):
            behind = 0 if first.resumed_at is None else first.resumed_at
            told = [event for event in told if not _undone(event, behind)]
            kept = {event.group for event in of_kind(told, GroupTrained)}
            anew = {event.group for event in of_kind(part, GroupTaken)} - kept
            told = [event for event in told if not (isinstance(event, GROUPS) and event.group in anew)]
        told += part
    return told


GROUPS = (GroupTaken, GroupCompleted, GroupDropped, GroupRequeued, GroupTrained)


def _undone(event: Event, step: int) -> bool:
    if isinstance(event, EvalDone):  # its step counts train steps done
        return event.step > step
    return isinstance(event, GroupTrained | StepTrained) and event.step >= step
