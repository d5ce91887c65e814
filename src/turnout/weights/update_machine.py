"""The life of one weight update, as a table. Pure: it knows neither clock, disk nor HTTP.

    IDLE -> PUBLISHING -> PREPARING -> ACTIVATING -> COMMITTED
      |          |            |             |
      +----------+------------+-------------+------> ABORTED

The required engines are fixed when the update begins; each has a state of its own (turnout.weights.engine_machine).
The version is committed when every required engine that is not fenced has attested the very root digest that was
published, and these are at least `at_least`, one of each of `sides` among them; by nothing else. Where the engines
follow by themselves it is committed as soon as these are enough: the others keep what they serve. A run without
engines has versions as well: `at_least` is 0 where none is required. An engine that
fails is fenced; where those that are left are too few the update is aborted. Then every engine that was told to
activate is fenced too, since what it holds is unknown or tentative; one that was not still serves what it served.
Nothing changes an update that ended.
`step` returns the next state and what to do, in order; the driver does the first thing before the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from turnout.core.errors import IllegalTransition
from turnout.core.machine import Table
from turnout.weights.engine_machine import ENGINE_TABLE, Engine, Fact
from turnout.weights.quorum import Sides, lacking


class Phase(StrEnum):
    IDLE = "idle"
    PUBLISHING = "publishing"
    PREPARING = "preparing"
    ACTIVATING = "activating"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Begin:
    """`required` takes part; the version is committed with no fewer than `at_least` of them, one of each of `sides`
    among them (turnout.weights.quorum). `follow`: each engine has a follower that brings the version there."""

    required: tuple[str, ...]
    at_least: int
    sides: Sides = ()
    follow: bool = False


@dataclass(frozen=True)
class Published:
    root: str


@dataclass(frozen=True)
class Prepared:
    """The engine can put the version into place at once."""

    engine: str


@dataclass(frozen=True)
class Go:
    """Time to activate. `in_flight` are engines that still run requests: with one of them the update is aborted."""

    in_flight: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attested:
    engine: str
    root: str


@dataclass(frozen=True)
class Failed:
    """`engine` is None when the trainer's side failed: publishing, or the way to all engines."""

    engine: str | None
    reason: str


@dataclass(frozen=True)
class Joined:
    """An engine started, or started again, while the update ran: it holds nothing of it."""

    engine: str


Event = Begin | Published | Prepared | Go | Attested | Failed | Joined


@dataclass(frozen=True)
class Publish:
    """Fix the version."""


@dataclass(frozen=True)
class Prepare:
    """Bring the version to this engine while it serves."""

    engine: str


@dataclass(frozen=True)
class Activate:
    """Have this engine put the version into place and attest it."""

    engine: str


@dataclass(frozen=True)
class Close:
    """This engine has put the version into place by itself: it takes no request until that is committed."""

    engine: str


@dataclass(frozen=True)
class Fence:
    """This engine takes no request until it has attested a committed version."""

    engine: str
    reason: str


@dataclass(frozen=True)
class Commit:
    """The version is now current, and these engines serve it."""

    engines: tuple[str, ...]


@dataclass(frozen=True)
class Abort:
    """The old version stays current."""

    reason: str


Effect = Publish | Prepare | Activate | Close | Fence | Commit | Abort
Effects = tuple[Effect, ...]
P = Phase

TABLE: Table[Phase, type[Event]] = Table(
    "weight update",
    {
        (P.IDLE, Begin): P.PUBLISHING,  # ABORTED with too few engines
        (P.PUBLISHING, Published): P.PREPARING,
        (P.PREPARING, Prepared): P.PREPARING,
        (P.PREPARING, Attested): P.PREPARING,  # by an engine that follows
        (P.PREPARING, Go): P.ACTIVATING,  # ABORTED with a request in flight, COMMITTED without engines
        (P.ACTIVATING, Prepared): P.ACTIVATING,
        (P.ACTIVATING, Attested): P.ACTIVATING,  # COMMITTED with the last one, or with enough that follow
        **{(at, Failed): at for at in (P.PUBLISHING, P.PREPARING, P.ACTIVATING)},  # may end it
        **{(at, Joined): at for at in (P.PUBLISHING, P.PREPARING, P.ACTIVATING)},
        **{(P.COMMITTED, late): P.COMMITTED for late in (Prepared, Attested, Failed, Joined)},
        **{(P.ABORTED, late): P.ABORTED for late in (Published, Prepared, Go, Attested, Failed, Joined)},
    },
)


_GONE = (Engine.FENCED, Engine.ABSENT)
_SETTLED = (Engine.TENTATIVE, *_GONE)


@dataclass(frozen=True)
class UpdateState:
    phase: Phase = Phase.IDLE
    at_least: int = 0
    sides: Sides = ()
    follow: bool = False
    engines: Mapping[str, Engine] = field(default_factory=dict[str, Engine])
    root: str = ""
    reason: str = ""

    def those(self, *states: Engine) -> tuple[str, ...]:
        """The engines in one of these states, in the order in which they were named."""
        return tuple(name for name, state in self.engines.items() if state in states)

    @property
    def live(self) -> tuple[str, ...]:
        """Engines that the update still counts on."""
        return tuple(n for n, state in self.engines.items() if state not in _GONE)

    @property
    def lacks(self) -> str:
        """What the engines that are left lack to be enough; empty where they are."""
        return lacking(self.live, self.at_least, self.sides)

    @property
    def settled(self) -> bool:
        """Whether no engine that counts is still waited for. Asked at every event: the first that is ends it."""
        if self.follow:
            return not lacking(self.those(Engine.TENTATIVE), self.at_least, self.sides)
        return all(state in _SETTLED for state in self.engines.values())


def step(state: UpdateState, event: Event) -> tuple[UpdateState, Effects]:
    """The next state and its effects; raises IllegalTransition, changing nothing, for an event that one of the two
    tables does not allow, for engines named twice or not at all, and for one that has no part in the update."""
    phase = TABLE.after(state.phase, type(event))
    if state.phase in (Phase.COMMITTED, Phase.ABORTED):
        return state, ()
    if isinstance(event, Begin):
        return _begun(state, event)
    if isinstance(event, Published):
        fact = Fact.FOLLOW if state.follow else Fact.PREPARE
        moved = _moved(replace(state, phase=phase, root=event.root), fact, state.live)
        return moved, () if state.follow else tuple(Prepare(engine) for engine in state.live)
    if isinstance(event, Go):
        return _going(state, event)
    if isinstance(event, Joined):
        return _joined(state, event.engine)
    if event.engine is None:
        return _aborted(state, event.reason)
    early = isinstance(event, Attested) and phase is Phase.PREPARING and not state.follow
    if early or event.engine not in state.engines:
        raise IllegalTransition(TABLE.name, state.phase, event)
    if isinstance(event, Prepared):
        return _moved(state, Fact.PREPARED, (event.engine,)), ()
    if isinstance(event, Attested):
        moved = _moved(state, Fact.ATTESTED, (event.engine,))  # raises where it may attest nothing
        if event.root == state.root:
            return _attested(state, moved, event.engine)
        return _failed(state, event.engine, f"attested {event.root}, published was {state.root}")
    return _failed(state, event.engine, event.reason)


def _begun(state: UpdateState, event: Begin) -> tuple[UpdateState, Effects]:
    if len(set(event.required)) < len(event.required) or event.at_least < bool(event.required):
        raise IllegalTransition(TABLE.name, state.phase, event)
    engines = dict.fromkeys(event.required, Engine.BEHIND)
    begun = UpdateState(Phase.PUBLISHING, event.at_least, event.sides, event.follow, engines)
    if begun.lacks:
        return _aborted(begun, begun.lacks)
    return begun, (Publish(),)


def _going(state: UpdateState, event: Go) -> tuple[UpdateState, Effects]:
    if event.in_flight:
        names = ", ".join(event.in_flight)
        return _aborted(state, f"requests are in flight on {names}; the update needs every engine idle")
    going = replace(state, phase=Phase.ACTIVATING)
    if state.follow or not state.live:
        return _settled(going)
    return _moved(going, Fact.ACTIVATE, state.live), tuple(Activate(engine) for engine in state.live)


def _attested(before: UpdateState, moved: UpdateState, engine: str) -> tuple[UpdateState, Effects]:
    ended, effects = _settled(moved)
    by_itself = before.engines[engine] is Engine.FOLLOWING
    return ended, (Close(engine), *effects) if by_itself else effects


def _joined(state: UpdateState, engine: str) -> tuple[UpdateState, Effects]:
    before = state.engines.get(engine)
    if before is None:
        return replace(state, engines={**state.engines, engine: Engine.ABSENT}), ()
    if before in (Engine.BEHIND, Engine.FOLLOWING):  # it was asked for nothing yet, or ever
        return state, ()
    return _failed(state, engine, "it started again")


def _failed(state: UpdateState, engine: str, reason: str) -> tuple[UpdateState, Effects]:
    moved = _moved(state, Fact.FAILED, (engine,))
    if moved.engines[engine] is state.engines[engine]:
        return state, ()
    fence = Fence(engine, reason)
    if moved.lacks:
        why = reason if engine in reason else f"engine {engine}: {reason}"
        several = state.at_least < len(state.engines)
        ended, effects = _aborted(moved, f"{moved.lacks}: {why}" if several else why)
        return ended, (fence, *effects)
    ended, effects = _settled(moved)
    return ended, (fence, *effects)


def _settled(state: UpdateState) -> tuple[UpdateState, Effects]:
    """Committed where no engine that counts is still waited for."""
    if state.phase is not Phase.ACTIVATING or not state.settled:
        return state, ()
    attested = state.those(Engine.TENTATIVE)
    served = _moved(replace(state, phase=Phase.COMMITTED), Fact.COMMITTED, tuple(state.engines))
    return served, (Commit(attested),)


def _aborted(state: UpdateState, reason: str) -> tuple[UpdateState, Effects]:
    touched = state.those(Engine.ACTIVATING, Engine.TENTATIVE)
    ended = _moved(replace(state, phase=Phase.ABORTED, reason=reason), Fact.ABORTED, tuple(state.engines))
    fences = (Fence(engine, f"the update was aborted: {reason}") for engine in touched)
    return ended, (Abort(reason), *fences)


def _moved(state: UpdateState, fact: Fact, engines: tuple[str, ...]) -> UpdateState:
    moved = {engine: ENGINE_TABLE.after(state.engines[engine], fact) for engine in engines}
    return replace(state, engines={**state.engines, **moved})
