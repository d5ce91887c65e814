"""Deltas through a shared directory: what changed since the last committed version is published, engines apply it.

Promises: a delta is relative to the last committed version, never to one that was aborted; a version is written in
full where the base cannot be compared, and where its delta would take more than half of a full version.
"""

from __future__ import annotations

import asyncio
import logging

from turnout.core.errors import WeightError
from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.transfer.delta_base import DeltaBase
from turnout.transfer.disk import VERSIONS_KEPT, DiskTransport
from turnout.transfer.snapshot import Survey
from turnout.transfer.updater import Export, Ready
from turnout.weights.store import Published, WeightStore

log = logging.getLogger(__name__)
POSITION_BYTES = {"indices": 4, "deltas": 2}  # of one change, before any delta was measured


class DeltaDiskTransport(DiskTransport):
    """A Transport (turnout.transfer.updater). `encoding` is that of all deltas."""

    def __init__(
        self, store: WeightStore, clock: Clock, base: DeltaBase, encoding: str, keep_all: bool = False
    ) -> None:
        super().__init__(store, clock, keep_all)
        self.base, self._encoding = base, encoding
        self._bytes_per_change: float | None = None  # of the last delta
        self._anchors: list[int] = []  # committed full versions

    async def publish(self, export: Export, train_step: int, deadline_s: float) -> Ready:
        work = asyncio.to_thread(self._publish, export, train_step)
        return await self.clock.within(deadline_s, "the weights to be written", work)

    async def committed(self, version: WeightVersion) -> None:
        """Deltas stay that lead on from the older of the two newest full versions, all where there are not two."""
        await asyncio.to_thread(self.base.committed, version)
        if self.load_format == "auto":
            self._anchors = [*self._anchors, version.counter][-VERSIONS_KEPT:]
        if len(self._anchors) == VERSIONS_KEPT and not self._keep_all:
            await asyncio.to_thread(self.store.prune, set(range(self._anchors[0], version.counter + 1)))

    async def aborted(self, version: WeightVersion) -> None:
        await super().aborted(version)
        self.base.aborted(version)

    def _publish(self, export: Export, train_step: int) -> Ready:
        found = self.base.survey(export)
        expected = self._delta_bytes(found)
        full = not self.base.snapshot.comparable or 2 * expected > found.nbytes
        if full:
            log.info(
                "the next version is full: a delta would take about %d of %d bytes", expected, found.nbytes
            )
            made = self.store.publish(export(), train_step)
        else:
            made = self._publish_delta(export, found, train_step)
        if made.version.root != found.root:
            raise WeightError(f"{made.version.label} is not what was looked at: was it trained meanwhile?")
        self.load_format = "auto" if full else "delta"
        density = 1.0 if full else found.density
        return Ready(made.version, made.bytes, made.folder, "" if full else self._encoding, density)

    def _publish_delta(self, export: Export, found: Survey, train_step: int) -> Published:
        changes = self.base.snapshot.changes(export())
        made = self.store.publish_delta(changes, self.base.version, self._encoding, train_step)
        if found.changed:
            self._bytes_per_change = made.bytes / found.changed
        return made

    def _delta_bytes(self, found: Survey) -> int:
        if self._bytes_per_change is not None:
            return int(self._bytes_per_change * found.changed)
        return POSITION_BYTES.get(self._encoding, 0) * found.changed + found.changed_bytes
