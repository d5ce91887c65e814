"""The health of one engine process and what its restarts may cost, as a table and two pure functions.

    STARTING --serves--> UP <--answered-- SUSPECT
        |                 \\---silent------^ |
        | ended            \\                | ended, or silent `failures` times in a row
        v                   v               v
      DOWN <------------- ended ------------+
        |  \\--again--> STARTING
        +-----given up--> GONE

Which weights the engine holds, and whether it may be asked, is not told here: turnout.transfer.fleet knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from turnout.core.machine import Table

WINDOW_S = 600.0
PAUSE_S = 1.0
PAUSE_MAX_S = 60.0


class Life(StrEnum):
    STARTING = "starting"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    GONE = "gone"


class Sign(StrEnum):
    """What is seen of an engine. SILENT is a probe without a good answer in time; an engine that refuses, or says
    that it is busy, has answered."""

    SERVES = "serves"
    ANSWERED = "answered"
    SILENT = "silent"
    ENDED = "ended"
    AGAIN = "again"
    GIVEN_UP = "given up"


HEALTH_TABLE: Table[Life, Sign] = Table(
    "engine health",
    {
        (Life.STARTING, Sign.SERVES): Life.UP,
        (Life.STARTING, Sign.ENDED): Life.DOWN,
        (Life.UP, Sign.ANSWERED): Life.UP,
        (Life.UP, Sign.SILENT): Life.SUSPECT,
        (Life.UP, Sign.ENDED): Life.DOWN,
        (Life.SUSPECT, Sign.ANSWERED): Life.UP,
        (Life.SUSPECT, Sign.SILENT): Life.SUSPECT,
        (Life.SUSPECT, Sign.ENDED): Life.DOWN,
        (Life.DOWN, Sign.AGAIN): Life.STARTING,
        (Life.DOWN, Sign.GIVEN_UP): Life.GONE,
    },
)


@dataclass(frozen=True)
class Health:
    """`silent` counts probes in a row without an answer; `begun_s` are the times of its restarts."""

    state: Life = Life.STARTING
    silent: int = 0
    begun_s: tuple[float, ...] = ()

    def after(self, sign: Sign, failures: int = 1) -> Health:
        """Its health after a sign; raises IllegalTransition. `failures` probes in a row without an answer are an
        end."""
        silent = self.silent + 1 if sign is Sign.SILENT else 0
        state = HEALTH_TABLE.after(self.state, sign)
        if silent >= failures:
            state = HEALTH_TABLE.after(state, Sign.ENDED)
        return replace(self, state=state, silent=silent)

    def again(self, restarts: int, now: float) -> tuple[Health, float | None]:
        """DOWN: STARTING and after how many seconds, or GONE and None where the budget is spent: `restarts` in any
        WINDOW_S seconds. The pause is PAUSE_S after the first end and twice as long after each further one, at most
        PAUSE_MAX_S."""
        recent = tuple(at for at in self.begun_s if now - at < WINDOW_S)
        if len(recent) >= restarts:
            return replace(self, state=HEALTH_TABLE.after(self.state, Sign.GIVEN_UP)), None
        pause = min(PAUSE_MAX_S, PAUSE_S * 2 ** len(recent))
        state = HEALTH_TABLE.after(self.state, Sign.AGAIN)
        return Health(state, 0, (*recent, now + pause)), pause
