"""The life of a local checkpoint on an engine's host, as a table. Pure: it knows neither disk, clock nor engines.

    UNOPENED -> UNKNOWN | SETTLED | OVERWRITING | SWITCHING          by what is found there
    SETTLED -> JOURNALING -> OVERWRITING -> SETTLED                  a delta, in place
    SETTLED | UNKNOWN -> FETCHING -> SWITCHING -> SETTLED            a full version, beside

The driver performs the effects in their order, so that what they promise is persisted before it is acted on: the
redo log is whole before the first weight is overwritten, the new state is written before the log goes, and a switch
is announced before the first file moves. A kill at any instant therefore leaves what `Opened` describes, and the
effects that follow from it finish what had begun.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from turnout.core.errors import IllegalTransition
from turnout.core.machine import Table


class Phase(StrEnum):
    UNOPENED = "unopened"
    UNKNOWN = "unknown"
    SETTLED = "settled"
    JOURNALING = "journaling"
    OVERWRITING = "overwriting"
    FETCHING = "fetching"
    SWITCHING = "switching"


@dataclass(frozen=True)
class Opened:
    """What lies on disk: the root that the state file names (None: no state), whether it announces a switch to it,
    and base and target of a whole redo log (None: no log, or none that is whole)."""

    held: str | None
    switching: bool = False
    log: tuple[str, str] | None = None


@dataclass(frozen=True)
class Delta:
    """A delta from the root `base` to `target` is to be applied."""

    base: str
    target: str


@dataclass(frozen=True)
class Logged:
    """The redo log is whole and on stable storage."""


@dataclass(frozen=True)
class Overwritten:
    """Every change is in the files, on stable storage, and every digest is the target's."""


@dataclass(frozen=True)
class Anchor:
    """A full version is to take the place of what is held."""

    target: str


@dataclass(frozen=True)
class Fetched:
    """The full version lies beside, verified and on stable storage."""


@dataclass(frozen=True)
class Switched:
    """Every file of the full version is in its place."""


@dataclass(frozen=True)
class Adopted:
    """What lies there is a version of the store: files without a state, or held ones under another name."""

    root: str


@dataclass(frozen=True)
class Failed:
    """What was being done could not be, or what is held is not what its digests say."""


Event = Opened | Delta | Logged | Overwritten | Anchor | Fetched | Switched | Adopted | Failed


class Effect(StrEnum):
    """What to do; `target` of the state says for which root."""

    WRITE_LOG = "write and sync the redo log"
    OVERWRITE = "bring the log's values into the files, compare digests, sync"
    SETTLE = "write the state file: the target is held"
    DROP_LOG = "remove the redo log"
    FETCH = "bring the full version's files beside, verify, sync"
    ANNOUNCE = "write the state file: a switch to the target has begun"
    MOVE_FILES = "move what lies beside into its place"


TABLE: Table[Phase, type[Event]] = Table(
    "local checkpoint",
    {
        (Phase.UNOPENED, Opened): Phase.SETTLED,  # or UNKNOWN, OVERWRITING, SWITCHING: by what is found
        (Phase.UNKNOWN, Adopted): Phase.SETTLED,
        (Phase.SETTLED, Adopted): Phase.SETTLED,
        (Phase.SETTLED, Failed): Phase.UNKNOWN,
        (Phase.SETTLED, Delta): Phase.JOURNALING,
        (Phase.JOURNALING, Logged): Phase.OVERWRITING,
        (Phase.JOURNALING, Failed): Phase.SETTLED,
        (Phase.OVERWRITING, Overwritten): Phase.SETTLED,
        (Phase.OVERWRITING, Failed): Phase.UNKNOWN,
        (Phase.SETTLED, Anchor): Phase.FETCHING,
        (Phase.UNKNOWN, Anchor): Phase.FETCHING,
        (Phase.FETCHING, Fetched): Phase.SWITCHING,
        (Phase.FETCHING, Failed): Phase.SETTLED,  # UNKNOWN where nothing was held
        (Phase.SWITCHING, Switched): Phase.SETTLED,
        (Phase.SWITCHING, Failed): Phase.UNKNOWN,
    },
)


@dataclass(frozen=True)
class HostState:
    """`held` is the root that the files have; None while that is unknown or being changed."""

    phase: Phase = Phase.UNOPENED
    held: str | None = None
    target: str = ""


def step(state: HostState, event: Event) -> tuple[HostState, tuple[Effect, ...]]:
    """The next state and its effects; raises IllegalTransition, changing nothing, for an event that the table does
    not allow, and for a delta on another base than what is held."""
    phase = TABLE.after(state.phase, type(event))
    if isinstance(event, Opened):
        return _opened(event)
    if isinstance(event, Delta):
        if event.base != state.held:
            raise IllegalTransition(TABLE.name, state.phase, event)
        return replace(state, phase=phase, target=event.target), (Effect.WRITE_LOG,)
    if isinstance(event, Anchor):
        return replace(state, phase=phase, target=event.target), (Effect.FETCH,)
    if isinstance(event, Logged):
        return replace(state, phase=phase, held=None), (Effect.OVERWRITE,)
    if isinstance(event, Fetched):
        effects = (Effect.ANNOUNCE, Effect.DROP_LOG, Effect.MOVE_FILES)
        return replace(state, phase=phase, held=None), effects
    if isinstance(event, Adopted):
        return HostState(phase, event.root), (Effect.SETTLE,)
    if isinstance(event, Overwritten | Switched):
        return HostState(phase, state.target), (Effect.SETTLE, Effect.DROP_LOG)
    if state.phase is Phase.FETCHING and state.held is None:
        phase = Phase.UNKNOWN
    effects = (Effect.DROP_LOG,) if state.phase is Phase.JOURNALING else ()
    return HostState(phase, state.held if phase is Phase.SETTLED else None), effects


def _opened(found: Opened) -> tuple[HostState, tuple[Effect, ...]]:
    if found.held is None:
        return HostState(Phase.UNKNOWN), (Effect.DROP_LOG,)
    if found.switching:
        return HostState(Phase.SWITCHING, None, found.held), (Effect.DROP_LOG, Effect.MOVE_FILES)
    if found.log is not None and found.log[0] == found.held:
        return HostState(Phase.OVERWRITING, None, found.log[1]), (Effect.OVERWRITE,)
    return HostState(Phase.SETTLED, found.held), (Effect.DROP_LOG,)
