"""The sender's base together with the version that it is, and the update that waits to become it.

Promises: `version` is the last version that every required engine attested, whatever was published since; a version
that is aborted, or whose outcome nobody knows, leaves it where it was and says so, so that the next delta holds the
same changes again; every `audit_interval` versions the base's digests are computed anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from turnout.core.errors import InvariantBroken
from turnout.core.version import WeightVersion
from turnout.transfer.snapshot import Snapshot, Survey
from turnout.transfer.transport import Export
from turnout.weights.digest import Line

Move = Callable[[Snapshot, dict[str, Line]], None]
log = logging.getLogger(__name__)


class DeltaBase:
    """See the module. `version` begins as the version that the engines loaded; `first_in_full`: the next one is an
    anchor, since a resumed run's weights are not what its engines started with. Its methods block."""

    def __init__(
        self, snapshot: Snapshot, version: WeightVersion, audit_interval: int, *, first_in_full: bool = False
    ) -> None:
        self.snapshot, self.version = snapshot, version
        self.start = version
        self.first_in_full = first_in_full
        self._audit_interval = audit_interval
        self._committed = 0
        self._waiting: tuple[Export, Survey] | None = None

    def survey(self, export: Export) -> Survey:
        """What the next version would change; raises WeightError for weights that must not be published."""
        self._waiting = None
        found = self.snapshot.survey(export())
        self._waiting = export, found
        return found

    def committed(self, version: WeightVersion, move: Move | None = None) -> None:
        """Every required engine attested the version that was surveyed last. `move` moves the snapshot there by
        what was published; None: the export is still the same."""
        if self._waiting is None or self._waiting[1].root != version.root:
            raise InvariantBroken(f"{version.label} was committed, but is not what was surveyed")
        export, found = self._waiting
        if move is None:
            self.snapshot.commit(export(), found.lines)
        else:
            move(self.snapshot, found.lines)
        self._waiting, self.version, self.first_in_full = None, version, False
        self._committed += 1
        if self._committed % self._audit_interval == 0:
            self.snapshot.audit()
            log.info("the base of deltas is %s, all its digests computed anew", version.label)

    def aborted(self, version: WeightVersion) -> None:
        """The version did not become current."""
        self._waiting = None
        log.warning("%s was aborted: deltas go on from %s", version.label, self.version.label)
