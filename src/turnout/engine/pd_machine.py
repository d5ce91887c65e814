"""One side of a request that is split over a prefill and a decode engine. Pure: time comes in, effects go out.

QUEUED -> PREFILL -> KV_TRANSFER -> DECODE -> DONE | ABORTED

| state | on the prefill side | on the decode side |
|---|---|---|
| QUEUED | the scheduler has not taken the request | the prefill side has not said that it has the request |
| PREFILL | the prompt waits or is computed | the same, over there |
| KV_TRANSFER | the first token exists; pages are held until they were read | waits for pages, then for the KV |
| DECODE | never | a request like any other |

Promises: every state but the two last has a deadline; every failure leads to ABORTED, with the pages returned and
the other side told; a side in DONE or ABORTED holds no page. What happens to the other side no longer matters once
the KV was taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from turnout.core.machine import Table


class Side(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class State(StrEnum):
    QUEUED = "queued"
    PREFILL = "prefill"
    KV_TRANSFER = "kv_transfer"
    DECODE = "decode"
    DONE = "done"
    ABORTED = "aborted"


class Event(StrEnum):
    JOINED = "joined"
    COMPUTED = "computed"
    TAKEN = "taken"
    FINISHED = "finished"
    PEER_LOST = "peer_lost"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


class Effect(StrEnum):
    """What the shell does, in this order. RETURN: end the request here, which returns its pages. TELL: say TAKEN or
    ABORT to the other side. CLOSE: the link and what was kept for the transfer."""

    RETURN = "return"
    TELL = "tell"
    CLOSE = "close"


LIVE = (State.QUEUED, State.PREFILL, State.KV_TRANSFER, State.DECODE)
FAILURES = (Event.PEER_LOST, Event.REFUSED, Event.CANCELLED, Event.DEADLINE)


def _table(side: Side) -> Table[State, Event]:
    live = LIVE if side is Side.DECODE else LIVE[:3]
    rows: dict[tuple[State, Event], State] = {
        (state, event): State.ABORTED for state in live for event in FAILURES
    }
    rows |= {
        (State.QUEUED, Event.JOINED): State.PREFILL,
        (State.PREFILL, Event.COMPUTED): State.KV_TRANSFER,
        (State.KV_TRANSFER, Event.TAKEN): State.DECODE if side is Side.DECODE else State.DONE,
    }
    if side is Side.DECODE:
        rows |= {(State.DECODE, Event.FINISHED): State.DONE, (State.DECODE, Event.PEER_LOST): State.DECODE}
    return Table(f"pd {side}", rows)


TABLES: Mapping[Side, Table[State, Event]] = {side: _table(side) for side in Side}


@dataclass(frozen=True)
class Deadlines:
    """Seconds. `pair_s` bounds each wait for the other side, `request_s` what an engine works alone."""

    pair_s: float
    request_s: float

    def of(self, state: State) -> float:
        return self.pair_s if state in (State.QUEUED, State.KV_TRANSFER) else self.request_s


class SplitRequest:
    """See the module. `since`: when the state was entered, on the clock of whoever calls."""

    def __init__(self, side: Side, deadlines: Deadlines, now: float) -> None:
        self.side, self.state, self.since = side, State.QUEUED, now
        self._deadlines = deadlines

    @property
    def over(self) -> bool:
        return self.state in (State.DONE, State.ABORTED)

    @property
    def expires(self) -> float:
        """When DEADLINE must come at the latest."""
        return self.since + self._deadlines.of(self.state)

    def on(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Moves on; raises IllegalTransition, with nothing changed, for what the side's table does not have."""
        before = self.state
        self.state = TABLES[self.side].after(before, event)
        if self.state is not before:
            self.since = now
        if self.state is State.ABORTED:
            told = () if event is Event.PEER_LOST or before is State.DECODE else (Effect.TELL,)
            return (Effect.RETURN, *told, Effect.CLOSE)
        if event is Event.TAKEN:
            return (Effect.RETURN, Effect.CLOSE) if self.side is Side.PREFILL else (Effect.TELL, Effect.CLOSE)
        return ()
