"""The life of one attempt at a group of samples, as a table. Pure.

    WAITING -> INFLIGHT -> COMPLETED -> TAKEN -> TRAINED
                 |  ^          ^          |        |
                 v  |          +- RETURN -+        |
               PARTIAL         +------- RESTORE ---+

An attempt begins when its prompt leaves the source and ends exactly once: TRAINED, DROPPED(reason), or REQUEUED,
upon which the same prompt begins its next attempt. From every state but those three an attempt can be dropped or
requeued. TRAINED is final except for a resume that goes back behind the step: then the group is COMPLETED again.
"""

from __future__ import annotations

from enum import StrEnum

from turnout.core.machine import Table


class GroupState(StrEnum):
    WAITING = "waiting"
    INFLIGHT = "inflight"
    PARTIAL = "partial"
    COMPLETED = "completed"
    TAKEN = "taken"
    TRAINED = "trained"
    DROPPED = "dropped"
    REQUEUED = "requeued"


class GroupEvent(StrEnum):
    START = "start"
    CUT = "cut"
    RESUME = "resume"
    COMPLETE = "complete"
    TAKE = "take"
    RETURN = "return"
    TRAIN = "train"
    RESTORE = "restore"
    DROP = "drop"
    REQUEUE = "requeue"


OPEN = (
    GroupState.WAITING,
    GroupState.INFLIGHT,
    GroupState.PARTIAL,
    GroupState.COMPLETED,
    GroupState.TAKEN,
)
ENDED = (GroupState.TRAINED, GroupState.DROPPED, GroupState.REQUEUED)
TABLE: Table[GroupState, GroupEvent] = Table(
    "group",
    {
        (GroupState.WAITING, GroupEvent.START): GroupState.INFLIGHT,
        (GroupState.INFLIGHT, GroupEvent.CUT): GroupState.PARTIAL,
        (GroupState.PARTIAL, GroupEvent.RESUME): GroupState.INFLIGHT,
        (GroupState.INFLIGHT, GroupEvent.COMPLETE): GroupState.COMPLETED,
        (GroupState.COMPLETED, GroupEvent.TAKE): GroupState.TAKEN,
        (GroupState.TAKEN, GroupEvent.RETURN): GroupState.COMPLETED,
        (GroupState.TAKEN, GroupEvent.TRAIN): GroupState.TRAINED,
        (GroupState.TRAINED, GroupEvent.RESTORE): GroupState.COMPLETED,
        **{(state, GroupEvent.DROP): GroupState.DROPPED for state in OPEN},
        **{(state, GroupEvent.REQUEUE): GroupState.REQUEUED for state in OPEN},
    },
)
