"""Which engine may serve which request. Pure.

An engine is routable for a request if the version that it attested was committed, is at most `max_engine_lag`
train steps behind the current one, and meets what the request asks for. An engine of unknown or tentative weights
is never routable.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from turnout.core.version import VersionConstraint, WeightVersion


class Standing(StrEnum):
    """What became of a version: TENTATIVE while its update is under way, VOID where it never will be committed.
    Tokens of the one are held back until the update ends, those of the other are never used."""

    COMMITTED = "committed"
    TENTATIVE = "tentative"
    VOID = "void"


@dataclass(frozen=True)
class Held:
    """A committed version and the train steps done when it was exported."""

    version: WeightVersion
    step: int


def routable(
    engine: Held | None, minimum: VersionConstraint | None, current: Held, max_engine_lag: int
) -> bool:
    """`engine` is what it attested of the versions that were committed (None: unknown or tentative), `minimum` what
    the request asks for (None: nothing). A version of another incarnation than the current one never counts as
    held: what its counter means is not known here."""
    if engine is None or engine.version.incarnation != current.version.incarnation:
        return False
    if not 0 <= current.step - engine.step <= max_engine_lag:
        return False
    return minimum is None or minimum.met_by(engine.version.label)
