"""The life of one weight update, as a table. Pure: it knows neither clock, disk nor HTTP.

    IDLE -> PUBLISHING -> ACTIVATING -> COMMITTED
                 \\             \\
                  +-------------+--> ABORTED

The required engines are fixed when the update begins. The version is committed when every one of them has
attested the very root digest that was published, and by nothing else; the first engine that fails or attests
another root aborts the update, and every engine that was asked to activate is then fenced, since what it
holds is unknown or tentative. `step` returns the next state and what to do, in order; the driver does the
first thing before the second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from turnout.core.errors import IllegalTransition
from turnout.core.machine import Table


class Phase(StrEnum):
    IDLE = "idle"
    PUBLISHING = "publishing"
    ACTIVATING = "activating"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Begin:
    required: tuple[str, ...]


@dataclass(frozen=True)
class Published:
    root: str


@dataclass(frozen=True)
class Attested:
    engine: str
    root: str


@dataclass(frozen=True)
class Failed:
    """`engine` is None when publishing itself failed."""

    engine: str | None
    reason: str


Event = Begin | Published | Attested | Failed


@dataclass(frozen=True)
class Publish:
    """Write the version."""


@dataclass(frozen=True)
class Activate:
    """Ask this engine to load the published version and attest it."""

    engine: str


@dataclass(frozen=True)
class Commit:
    """The version is now current."""


@dataclass(frozen=True)
class Fence:
    """This engine holds unknown weights: unroutable until it attests a committed version."""

    engine: str


@dataclass(frozen=True)
class Abort:
    """The old version stays current."""

    reason: str


Effect = Publish | Activate | Commit | Fence | Abort

TABLE: Table[Phase, type[Event]] = Table(
    "weight update",
    {
        (Phase.IDLE, Begin): Phase.PUBLISHING,
        (Phase.PUBLISHING, Published): Phase.ACTIVATING,
        (Phase.PUBLISHING, Failed): Phase.ABORTED,
        (Phase.ACTIVATING, Attested): Phase.ACTIVATING,  # COMMITTED with the last required one
        (Phase.ACTIVATING, Failed): Phase.ABORTED,
        (Phase.ABORTED, Attested): Phase.ABORTED,  # late answers change nothing
        (Phase.ABORTED, Failed): Phase.ABORTED,
    },
)


@dataclass(frozen=True)
class UpdateState:
    phase: Phase = Phase.IDLE
    required: tuple[str, ...] = ()
    root: str = ""
    attested: tuple[str, ...] = ()
    reason: str = ""


def step(state: UpdateState, event: Event) -> tuple[UpdateState, tuple[Effect, ...]]:
    """The next state and its effects; raises IllegalTransition, changing nothing, for an event that the
    table does not allow, no required engine or one named twice, an engine that is not required, or one that
    attests twice."""
    phase = TABLE.after(state.phase, type(event))
    if isinstance(event, Begin):
        if not event.required or len(set(event.required)) < len(event.required):
            raise IllegalTransition(TABLE.name, state.phase, event)
        return replace(state, phase=phase, required=event.required), (Publish(),)
    if isinstance(event, Published):
        effects = tuple(Activate(engine) for engine in state.required)
        return replace(state, phase=phase, root=event.root), effects
    if state.phase is Phase.ABORTED:
        return state, ()
    if event.engine is not None and event.engine not in state.required:
        raise IllegalTransition(TABLE.name, state.phase, event)
    if isinstance(event, Failed):
        return _aborted(state, event.reason)
    if event.engine in state.attested:
        raise IllegalTransition(TABLE.name, state.phase, event)
    if event.root != state.root:
        return _aborted(state, f"engine {event.engine} attested {event.root}, published was {state.root}")
    attested = (*state.attested, event.engine)
    if len(attested) < len(state.required):
        return replace(state, attested=attested), ()
    return replace(state, phase=Phase.COMMITTED, attested=attested), (Commit(),)


def _aborted(state: UpdateState, reason: str) -> tuple[UpdateState, tuple[Effect, ...]]:
    touched = state.required if state.phase is Phase.ACTIVATING else ()
    effects = (Abort(reason), *(Fence(engine) for engine in touched))
    return replace(state, phase=Phase.ABORTED, reason=reason), effects
