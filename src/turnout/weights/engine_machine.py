"""What one weight update knows of one engine, as a table. Pure.

                                    +--------------------- FENCED <----------------+ any failure
                                    |                        ^                     |
    BEHIND -> PREPARING -> PREPARED -> ACTIVATING -> TENTATIVE -> SERVING          |
     ^  |         |           |            |          ^  |                         |
     +--|---------+-----------+            +----------|--+--- the update aborts ---+
     |  +--------------> FOLLOWING -------------------+
     +--- the end of the update ---+

Up to PREPARED an engine serves what it served. From ACTIVATING on what it holds is unknown until it attests the
published root, and tentative until the update is committed. FOLLOWING: its own follower brings it there, in its own
time; until it attests the root it serves what it served, also after the end of the update. FENCED: it holds unknown
or tentative weights and takes no request until it has attested a committed version. ABSENT: it joined while the
update ran and has no part in it.
"""

from __future__ import annotations

from enum import StrEnum

from turnout.core.machine import Table


class Engine(StrEnum):
    """The states of an engine within one update."""

    ABSENT = "absent"
    BEHIND = "behind"
    PREPARING = "preparing"
    PREPARED = "prepared"
    ACTIVATING = "activating"
    FOLLOWING = "following"
    TENTATIVE = "tentative"
    SERVING = "serving"
    FENCED = "fenced"


class Fact(StrEnum):
    """What can happen to it. ATTESTED is the root that was published; any other root is FAILED."""

    PREPARE = "prepare"
    FOLLOW = "follow"
    PREPARED = "prepared"
    ACTIVATE = "activate"
    ATTESTED = "attested"
    FAILED = "failed"
    COMMITTED = "committed"
    ABORTED = "aborted"


E, F = Engine, Fact

ENGINE_TABLE: Table[Engine, Fact] = Table(
    "engine in a weight update",
    {
        (E.BEHIND, F.PREPARE): E.PREPARING,
        (E.BEHIND, F.FOLLOW): E.FOLLOWING,
        (E.BEHIND, F.FAILED): E.FENCED,
        (E.BEHIND, F.ABORTED): E.BEHIND,
        (E.PREPARING, F.PREPARED): E.PREPARED,
        (E.PREPARING, F.FAILED): E.FENCED,
        (E.PREPARING, F.ABORTED): E.BEHIND,
        (E.PREPARED, F.PREPARED): E.PREPARED,  # answered twice
        (E.PREPARED, F.ACTIVATE): E.ACTIVATING,
        (E.PREPARED, F.FAILED): E.FENCED,
        (E.PREPARED, F.ABORTED): E.BEHIND,
        (E.ACTIVATING, F.PREPARED): E.ACTIVATING,  # answered twice, late
        (E.ACTIVATING, F.ATTESTED): E.TENTATIVE,
        (E.ACTIVATING, F.FAILED): E.FENCED,
        (E.ACTIVATING, F.ABORTED): E.FENCED,
        (E.FOLLOWING, F.ATTESTED): E.TENTATIVE,
        (E.FOLLOWING, F.FAILED): E.FENCED,
        (E.FOLLOWING, F.COMMITTED): E.BEHIND,  # the others were enough
        (E.FOLLOWING, F.ABORTED): E.BEHIND,
        (E.TENTATIVE, F.PREPARED): E.TENTATIVE,
        (E.TENTATIVE, F.ATTESTED): E.TENTATIVE,  # answered twice
        (E.TENTATIVE, F.FAILED): E.FENCED,  # died, or restarted with other weights, before the commit
        (E.TENTATIVE, F.COMMITTED): E.SERVING,
        (E.TENTATIVE, F.ABORTED): E.FENCED,
        (E.FENCED, F.PREPARED): E.FENCED,  # what comes late from an engine that failed says nothing
        (E.FENCED, F.ATTESTED): E.FENCED,
        (E.FENCED, F.FAILED): E.FENCED,
        (E.FENCED, F.COMMITTED): E.FENCED,
        (E.FENCED, F.ABORTED): E.FENCED,
        (E.ABSENT, F.FAILED): E.ABSENT,
        (E.ABSENT, F.COMMITTED): E.ABSENT,
        (E.ABSENT, F.ABORTED): E.ABSENT,
    },
)
