"""The versions of a run as they are told: written into the ledger before they go to the event log."""

from __future__ import annotations

from turnout.core.events import Event, VersionAborted, VersionCommitted, VersionPublished
from turnout.core.ports import EventSink
from turnout.core.version import WeightVersion
from turnout.rollout.ledger import Ledger
from turnout.rollout.returning import ABORTED, COMMITTED


class Publications:
    """A sink of events that passes them on; `last` is the last publication, for the reporter. Raises LedgerError
    where a version cannot be written, OwnerLost where another incarnation has taken over: nothing is told then."""

    def __init__(self, events: EventSink, ledger: Ledger) -> None:
        self._events, self._ledger = events, ledger
        self._known: dict[str, tuple[WeightVersion, int]] = {}
        self.last: VersionPublished | None = None

    def expect(self, base: WeightVersion, train_step: int) -> None:
        """This version becomes current without being published: the engines loaded it at their start."""
        self._known[base.label] = base, train_step

    def emit(self, event: Event) -> None:
        if isinstance(event, VersionPublished):
            version = WeightVersion(event.incarnation, event.counter, event.root)
            self._known[event.version] = version, event.step
            self._ledger.put_version(version, event.step, "published")
            self.last = event
        elif isinstance(event, VersionCommitted):
            self._ledger.put_version(*self._known.pop(event.version), COMMITTED)
        elif isinstance(event, VersionAborted) and event.version in self._known:
            self._ledger.put_version(*self._known.pop(event.version), ABORTED)
        self._events.emit(event)
