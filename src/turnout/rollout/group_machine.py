"""The life of one group of samples, as a table. Pure.

    WAITING -> INFLIGHT -> COMPLETED -> TAKEN -> TRAINED
                  |            |          |
                  +------------+----------+--> DROPPED(reason)

A group enters when its prompt leaves the source and ends exactly once: TRAINED or DROPPED.
"""

from __future__ import annotations

from enum import StrEnum

from turnout.core.machine import Table


class GroupState(StrEnum):
    WAITING = "waiting"
    INFLIGHT = "inflight"
    COMPLETED = "completed"
    TAKEN = "taken"
    TRAINED = "trained"
    DROPPED = "dropped"


class GroupEvent(StrEnum):
    START = "start"
    COMPLETE = "complete"
    TAKE = "take"
    TRAIN = "train"
    DROP = "drop"


TABLE: Table[GroupState, GroupEvent] = Table(
    "group",
    {
        (GroupState.WAITING, GroupEvent.START): GroupState.INFLIGHT,
        (GroupState.WAITING, GroupEvent.DROP): GroupState.DROPPED,
        (GroupState.INFLIGHT, GroupEvent.COMPLETE): GroupState.COMPLETED,
        (GroupState.INFLIGHT, GroupEvent.DROP): GroupState.DROPPED,
        (GroupState.COMPLETED, GroupEvent.TAKE): GroupState.TAKEN,
        (GroupState.COMPLETED, GroupEvent.DROP): GroupState.DROPPED,
        (GroupState.TAKEN, GroupEvent.TRAIN): GroupState.TRAINED,
        (GroupState.TAKEN, GroupEvent.DROP): GroupState.DROPPED,
    },
)
