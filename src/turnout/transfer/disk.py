"""Versions through a shared directory: a full checkpoint is published, every engine loads it.

Promises: a version is written whole or not at all; retention keeps the two newest committed versions, which all
live engines have passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from turnout.core.errors import DeadlineExceeded, EngineError
from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation, EngineClient
from turnout.transfer.updater import Export, Ready
from turnout.weights.store import WeightStore

VERSIONS_KEPT = 2


class DiskTransport:
    """A Transport (turnout.transfer.updater) over a WeightStore."""

    def __init__(self, store: WeightStore, clock: Clock, keep_all: bool = False) -> None:
        self.store, self.clock = store, clock
        self._keep_all = keep_all
        self._kept: list[int] = []

    async def publish(self, export: Export, train_step: int, deadline_s: float) -> Ready:
        work = asyncio.to_thread(self.store.publish, export(), train_step)
        written = await self.clock.within(deadline_s, "the weights to be written", work)
        return Ready(written.version, written.bytes, written.folder)

    async def deliver(
        self,
        ready: Ready,
        export: Export,  # noqa: ARG002 - the folder has it all
        engines: Sequence[EngineClient],
        deadline_s: float,
    ) -> dict[str, Attestation | Exception]:
        assert ready.folder is not None, "this transport publishes folders"
        folder, label = str(ready.folder.resolve()), ready.version.label
        end = self.clock.now() + deadline_s

        async def one(engine: EngineClient) -> Attestation | Exception:
            try:
                return await engine.update_from_disk(folder, label, max(0.001, end - self.clock.now()))
            except (EngineError, DeadlineExceeded) as fault:
                return fault

        found = await asyncio.gather(*map(one, engines))
        return {engine.engine_id: outcome for engine, outcome in zip(engines, found)}

    async def committed(self, version: WeightVersion) -> None:
        self._kept.append(version.counter)
        if not self._keep_all:
            self._kept = self._kept[-VERSIONS_KEPT:]
            await asyncio.to_thread(self.store.prune, set(self._kept))
