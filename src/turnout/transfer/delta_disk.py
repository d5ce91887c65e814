"""Deltas through a shared directory: what changed since the last committed version is published, engines apply it.

Promises: a delta is relative to the last committed version, never to one that was aborted; turnout.weights.anchors
says, from what the store holds and what changed, whether a version is a delta, gets an anchor beside it once it is
committed, or is full; it is full where the base cannot be compared.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from turnout.core.errors import WeightError
from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation, EngineClient
from turnout.transfer.delta_base import DeltaBase
from turnout.transfer.disk import DiskTransport
from turnout.transfer.snapshot import Snapshot, Survey
from turnout.transfer.transport import Export, Ready
from turnout.weights.anchors import DeltaSize, NextForm, next_form
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.delta_io import read_delta
from turnout.weights.digest import Line
from turnout.weights.manifest import DELTA, load_manifest
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
        self._published: Path | None = None  # the folder of the last version
        self._bytes_per_change: float | None = None  # of the last delta
        self._anchor_of: tuple[Export, int] | None = None  # export and train step, where one is due

    @property
    def detached(self) -> bool:
        return self._anchor_of is None

    async def publish(self, export: Export, train_step: int, deadline_s: float) -> Ready:
        return await self._worker.run(
            "the weights to be written", lambda: self._publish(export, train_step), deadline_s
        )

    async def committed(self, version: WeightVersion) -> None:
        await asyncio.to_thread(self.base.committed, version, self._move)
        if self._anchor_of is not None:
            (export, step), self._anchor_of = self._anchor_of, None
            try:
                await asyncio.to_thread(self.store.publish_anchor, export(), version, step)
            except WeightError as fault:  # nobody needs it now; the next delta is due for one again
                log.warning("%s has no anchor: %s", version.label, fault)
        await super().committed(version)

    def _move(self, snapshot: Snapshot, lines: dict[str, Line]) -> None:
        """By the files: train steps may have gone on from the export meanwhile."""
        assert self._published is not None, "a version is published before it is committed"
        manifest = load_manifest(self._published)
        if manifest.kind == DELTA:
            snapshot.commit_changes(partial(read_delta, self._published, manifest), lines)
        else:
            snapshot.commit(read_checkpoint(self._published), lines)

    async def aborted(self, version: WeightVersion) -> None:
        await super().aborted(version)
        self.base.aborted(version)

    async def catch_up(
        self, version: WeightVersion, engine: EngineClient, deadline_s: float
    ) -> Attestation | None:
        """By the cheapest route, through deltas or an anchor; None for a version that has no folder here."""
        folders = [m.directory for m in self.store.versions() if m.version == version]
        if not folders:
            return None
        folder = str((self.store.root / folders[-1]).resolve())
        return await engine.update_from_disk(folder, version.label, deadline_s, "delta")

    def _publish(self, export: Export, train_step: int) -> Ready:
        found = self.base.survey(export)
        form = self._form(found)
        self._anchor_of = (export, train_step) if form is NextForm.ANCHORED else None
        full = form is NextForm.FULL
        made = (
            self.store.publish(export(), train_step)
            if full
            else self._publish_delta(export, found, train_step)
        )
        if made.version.root != found.root:
            raise WeightError(f"{made.version.label} is not what was looked at: was it trained meanwhile?")
        self._published = made.folder
        self.load_format = "auto" if full else "delta"
        log.info(
            "%s is %s: %d of %d elements changed", made.version.label, form, found.changed, found.elements
        )
        density = 1.0 if full else found.density
        return Ready(made.version, made.bytes, made.folder, "" if full else self._encoding, density)

    def _publish_delta(self, export: Export, found: Survey, train_step: int) -> Published:
        changes = self.base.snapshot.changes(export())
        made = self.store.publish_delta(changes, self.base.version, self._encoding, train_step)
        if found.changed:
            self._bytes_per_change = made.bytes / found.changed
        return made

    def _form(self, found: Survey) -> NextForm:
        if self.base.first_in_full or not self.base.snapshot.comparable:
            return NextForm.FULL
        roots = self.base.version.root, self.base.start.root
        size = DeltaSize(self._delta_bytes(found), found.changed)
        return next_form(self.store.versions(), roots, found.nbytes, size)

    def _delta_bytes(self, found: Survey) -> int:
        if self._bytes_per_change is not None:
            return int(self._bytes_per_change * found.changed)
        return POSITION_BYTES.get(self._encoding, 0) * found.changed + found.changed_bytes
