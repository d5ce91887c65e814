"""Deltas through a process group: positions and new values, in buckets, while engines serve what they had.

Promises: changes go only to engines that attest the very base that they are relative to; where one does not, where
the base cannot be compared, and where changes would take more than half of the weights' size, the whole weights are
sent to all of them, and it is said why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation, EngineClient
from turnout.serving.weights_client import BucketFlags, EngineWeights
from turnout.transfer.delta_base import DeltaBase
from turnout.transfer.group import GroupTransport
from turnout.transfer.outcomes import outcomes
from turnout.transfer.snapshot import Survey
from turnout.transfer.stream import Bucket, marked
from turnout.transfer.transport import Export, Ready
from turnout.weights.delta_bucket import DELTA_BUCKET, Part, cut, nbytes, pack
from turnout.weights.store import WeightStore

log = logging.getLogger(__name__)
POSITION_BYTES = 4


class DeltaGroupTransport(GroupTransport):
    """A Transport (turnout.transfer.updater)."""

    by_rank = False  # positions and values go to each engine's rank 0, which deals them out

    def __init__(self, store: WeightStore, clock: Clock, bucket_bytes: int, base: DeltaBase) -> None:
        super().__init__(store, clock, bucket_bytes)
        self.base = base
        self._whole = ""  # why the update under way is sent whole
        self._sent = False

    async def publish(self, export: Export, train_step: int, deadline_s: float) -> Ready:  # noqa: ARG002
        return await self._worker.run("the weights to be compared", lambda: self._look(export), deadline_s)

    async def prepare(
        self, ready: Ready, export: Export, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Exception | None]:
        held = await outcomes(engines, lambda engine: engine.attest(deadline_s))
        silent = {name: found for name, found in held.items() if isinstance(found, Exception)}
        if silent:
            return dict(silent)
        whole, root = self._whole, self.base.version.root
        for engine in engines:
            if engine.holds is None:
                whole = f"engine {engine.engine_id} holds unknown weights"
        for name, found in held.items():
            if isinstance(found, Attestation) and found.root != root:
                whole = f"engine {name} holds {found.root}, changes would be relative to {root}"
        if whole:
            log.info("%s is sent whole: %s", ready.version.label, whole)
        self.base_root, self._sent = None if whole else root, False
        return await super().prepare(ready, export, engines, deadline_s)

    def cut(self, export: Export) -> Iterator[tuple[Bucket, bool]]:
        if self.base_root is None:
            return super().cut(export)
        changes = (delta.change for delta in self.base.snapshot.changes(export()))
        return marked(cut(changes, self._bucket_bytes))

    async def send(self, bucket: Bucket, engines: Sequence[EngineWeights], flags: BucketFlags) -> None:
        self._sent = True
        if self.base_root is None:
            await super().send(bucket, engines, flags)
            return
        data = torch.empty(nbytes(bucket), dtype=torch.uint8)
        parts: list[Part] = await asyncio.to_thread(pack, bucket, np.asarray(data))
        await self.broadcast(
            data, flags, lambda each, name: each.changes_through_group(name, parts, flags), engines
        )

    async def end(self, engine: EngineWeights, ready: Ready, deadline_s: float) -> None:
        await engine.end(deadline_s, None if self.base_root is None else ready.version.root)
        if not self._sent:  # nothing changed, so no bucket brought the name of the version
            await engine.client.set_version_label(ready.version.label)

    async def committed(self, version: WeightVersion) -> None:
        await asyncio.to_thread(self.base.committed, version)

    async def aborted(self, version: WeightVersion) -> None:
        await super().aborted(version)
        self.base.aborted(version)

    def _look(self, export: Export) -> Ready:
        found = self.base.survey(export)
        size = POSITION_BYTES * found.changed + found.changed_bytes
        self._whole = self._why_whole(found, size)
        version = self.store.record(found.root)
        if self._whole:
            return Ready(version, found.nbytes)
        return Ready(version, size, None, DELTA_BUCKET, found.density)

    def _why_whole(self, found: Survey, size: int) -> str:
        if not self.base.snapshot.comparable:
            return "engines loaded it in other dtypes than it is trained in"
        if 2 * size > found.nbytes:
            return f"changes would take {size} of {found.nbytes} bytes"
        return ""
