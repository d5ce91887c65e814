"""Versions through a shared directory: a full checkpoint is published, every engine stages it, then serves it.

Promises: a version is written whole or not at all; a folder that an engine loads without looking is checked first;
what nobody needs any more is removed after a commit (turnout.weights.retention).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from turnout.core.errors import WeightError
from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation, EngineClient
from turnout.serving.weights_client import EngineWeights, OnUpdate, standing_still
from turnout.transfer.outcomes import outcomes
from turnout.transfer.transport import Export, Ready
from turnout.transfer.worker import Worker
from turnout.weights.loadable import check_loadable
from turnout.weights.manifest import DELTA, load_manifest
from turnout.weights.store import WeightStore


class DiskTransport:
    """A Transport (turnout.transfer.transport) over a WeightStore. `on_update`: what activation does to requests in
    flight."""

    on_update = OnUpdate.DRAIN

    def __init__(self, store: WeightStore, clock: Clock, keep_all: bool = False) -> None:
        self.store, self.clock = store, clock
        self._keep_all = keep_all
        self._worker = Worker(clock)
        self._prepared: dict[str, str] = {}  # by engine, the set that it staged
        self.load_format = "auto"  # of the version published last

    @property
    def detached(self) -> bool:
        return True

    async def publish(self, export: Export, train_step: int, deadline_s: float) -> Ready:
        def write() -> Ready:
            written = self.store.publish(export(), train_step)
            return Ready(written.version, written.bytes, written.folder)

        return await self._worker.run("the weights to be written", write, deadline_s)

    async def prepare(
        self,
        ready: Ready,
        export: Export,  # noqa: ARG002 - the folder has it all
        engines: Sequence[EngineClient],
        deadline_s: float,
    ) -> dict[str, Exception | None]:
        """Embedded engines stage the folder. A stock one loads whatever lies there: the folder is checked."""
        folder, label = _folder(ready), ready.version.label
        end = self.clock.now() + deadline_s
        if not all(engine.stages for engine in engines):
            await self._check(folder, deadline_s)
        left = max(0.001, end - self.clock.now())

        async def stage(engine: EngineClient) -> None:
            if engine.stages:
                weights = EngineWeights(engine)
                made = await weights.prepare(str(folder), label, left, self.load_format)
                self._prepared[engine.engine_id] = made

        self._prepared = {}
        return await outcomes(engines, stage)

    async def activate(
        self, ready: Ready, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Attestation | Exception]:
        folder, label = str(_folder(ready)), ready.version.label
        end = self.clock.now() + deadline_s

        async def put(engine: EngineClient) -> Attestation:
            async with standing_still([engine], self.on_update, deadline_s):
                if engine.stages:
                    prepared = self._prepared[engine.engine_id]
                    await EngineWeights(engine).activate(prepared, deadline_s, self.on_update)
                else:
                    flush = self.on_update is not OnUpdate.CONTINUE
                    await engine.load_from_disk(folder, label, deadline_s, flush=flush)
                return await engine.attest(max(0.001, end - self.clock.now()))

        return await outcomes(engines, put)

    async def committed(self, version: WeightVersion) -> None:
        if not self._keep_all:
            await asyncio.to_thread(self.store.retain, version, self.clock.now())

    async def aborted(self, version: WeightVersion) -> None:
        """Engines drop a prepared set by themselves, at the next one or after their own deadline."""

    async def close(self) -> None:
        """Nothing stands between updates."""

    async def catch_up(
        self, version: WeightVersion, engine: EngineClient, deadline_s: float
    ) -> Attestation | None:
        """Loads the version's folder; None for a version that has none here, as the base."""
        folder = (self.store.root / version.directory).resolve()
        if not folder.is_dir():
            return None
        end = self.clock.now() + deadline_s
        if not engine.stages:
            await self._check(folder, deadline_s)
        left = max(0.001, end - self.clock.now())
        kind = (await asyncio.to_thread(load_manifest, folder)).kind
        load_format = "delta" if kind == DELTA else "auto"  # the cheapest route from what the engine holds
        return await engine.update_from_disk(str(folder), version.label, left, load_format)

    async def _check(self, folder: Path, deadline_s: float) -> None:
        await self._worker.run(f"{folder} to be checked", lambda: check_loadable(folder), deadline_s)


def _folder(ready: Ready) -> Path:
    if ready.folder is None:
        raise WeightError(f"{ready.version.label} lies in no folder")
    return ready.folder.resolve()
