"""Whose turn it is where trainer and engines share memory (--offload), as a table. Pure.

    ROLLOUT -> IDLE -> RELEASED -> TRAIN -> AWAY -> STALE -> LOADED -> ROLLOUT
       |                                              ^ |       |
       +---- an update that no step came before ------+ +-------+ one that is tried again

No request is in flight, which engines say and nobody remembers; engines give KV and weights back; the trainer
takes its memory, trains, gives it back; engines take memory for weights, which are nothing to serve yet; these come
and are attested; engines take the memory of their KV. Each event is told after it was measured or answered, never
when it was asked for.
"""

from __future__ import annotations

from enum import StrEnum

from turnout.core.errors import InvariantBroken
from turnout.core.machine import Table


class Turn(StrEnum):
    """ROLLOUT: engines serve. IDLE: they have no request. RELEASED: they hold neither KV nor weights. TRAIN: the
    trainer has its memory. AWAY: nobody has. STALE: engines have memory for weights, and hold none that count.
    LOADED: they attested theirs, and have no KV."""

    ROLLOUT = "rollout"
    IDLE = "idle"
    RELEASED = "released"
    TRAIN = "train"
    AWAY = "away"
    STALE = "stale"
    LOADED = "loaded"


class Moved(StrEnum):
    """What has happened, to all engines or to the trainer."""

    QUIET = "quiet"
    RELEASED = "released"
    ONLOADED = "onloaded"
    OFFLOADED = "offloaded"
    ROOM = "room"
    ATTESTED = "attested"
    SERVING = "serving"


TURNS: Table[Turn, Moved] = Table(
    "turns of trainer and engines",
    {
        (Turn.ROLLOUT, Moved.QUIET): Turn.IDLE,
        (Turn.IDLE, Moved.RELEASED): Turn.RELEASED,
        (Turn.RELEASED, Moved.ONLOADED): Turn.TRAIN,
        (Turn.TRAIN, Moved.OFFLOADED): Turn.AWAY,
        (Turn.AWAY, Moved.ROOM): Turn.STALE,
        (Turn.STALE, Moved.ATTESTED): Turn.LOADED,
        (Turn.LOADED, Moved.SERVING): Turn.ROLLOUT,
        (Turn.STALE, Moved.ROOM): Turn.STALE,  # the update is tried again
        (Turn.LOADED, Moved.ROOM): Turn.STALE,
        (Turn.ROLLOUT, Moved.ROOM): Turn.STALE,  # at the start of a resumed run, or tried again
    },
)
TRAINERS = frozenset({Turn.RELEASED, Turn.TRAIN})  # memory that an engine takes now is the trainer's
_EXPORTS = frozenset({Turn.ROLLOUT, Turn.AWAY, Turn.STALE, Turn.LOADED})  # from what the trainer keeps
# What the phases of a run (turnout.schedule.phases) need; others need nothing.
NEEDS: dict[str, frozenset[Turn]] = {
    "rollout": frozenset({Turn.ROLLOUT}),
    "evaluate": frozenset({Turn.ROLLOUT}),
    "train": frozenset({Turn.ROLLOUT}),  # it begins there
    "publish": _EXPORTS,
    "prepare": _EXPORTS,
    "activate": frozenset({Turn.STALE}),
    "checkpoint": _EXPORTS,
}


def check(phase: str, turn: Turn) -> None:
    """Raises InvariantBroken where a phase of the run begins when it is not its turn."""
    needed = NEEDS.get(phase)
    if needed is not None and turn not in needed:
        raise InvariantBroken(
            f"{phase} begins in the turn {turn.value}, and needs {', '.join(sorted(needed))}"
        )
