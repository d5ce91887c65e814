"""Versions through a shared directory: a full checkpoint is published, every engine stages it, then serves it.

Promises: a version is written whole or not at all; what nobody needs any more is removed after a commit
(turnout.weights.retention).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from turnout.core.errors import DeadlineExceeded, EngineError, WeightError
from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation, EngineClient
from turnout.serving.weights_client import EngineWeights
from turnout.transfer.updater import Export, Ready
from turnout.weights.loadable import check_loadable
from turnout.weights.store import WeightStore

T = TypeVar("T")


class DiskTransport:
    """A Transport (turnout.transfer.updater) over a WeightStore."""

    def __init__(self, store: WeightStore, clock: Clock, keep_all: bool = False) -> None:
        self.store, self.clock = store, clock
        self._keep_all = keep_all
        self._prepared: dict[str, str] = {}  # by engine, the set that it staged
        self.load_format = "auto"  # of the version published last

    async def publish(self, export: Export, train_step: int, deadline_s: float) -> Ready:
        work = asyncio.to_thread(self.store.publish, export(), train_step)
        written = await self.clock.within(deadline_s, "the weights to be written", work)
        return Ready(written.version, written.bytes, written.folder)

    async def prepare(
        self,
        ready: Ready,
        export: Export,  # noqa: ARG002 - the folder has it all
        engines: Sequence[EngineClient],
        deadline_s: float,
    ) -> dict[str, Exception | None]:
        """Embedded engines stage the folder. A stock one loads whatever lies there: the folder is checked."""
        folder = _folder(ready)
        self._prepared = {}

        async def stage(engine: EngineClient) -> None:
            if engine.stages:
                weights, label = EngineWeights(engine), ready.version.label
                made = await weights.prepare(str(folder), label, deadline_s, self.load_format)
                self._prepared[engine.engine_id] = made
                return
            work = asyncio.to_thread(check_loadable, folder)
            await self.clock.within(deadline_s, f"{folder} to be checked", work)

        return await _each(engines, stage)

    async def activate(
        self, ready: Ready, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Attestation | Exception]:
        folder, label = str(_folder(ready)), ready.version.label
        end = self.clock.now() + deadline_s

        async def put(engine: EngineClient) -> Attestation:
            if not engine.stages:
                return await engine.update_from_disk(folder, label, deadline_s)
            await EngineWeights(engine).activate(self._prepared[engine.engine_id], deadline_s)
            return await engine.attest(max(0.001, end - self.clock.now()))

        return await _each(engines, put)

    async def committed(self, version: WeightVersion) -> None:
        if not self._keep_all:
            await asyncio.to_thread(self.store.retain, version, self.clock.now())

    async def aborted(self, version: WeightVersion) -> None:
        """Engines drop a prepared set by themselves, at the next one or after their own deadline."""


def _folder(ready: Ready) -> Path:
    assert ready.folder is not None, "this transport publishes folders"
    return ready.folder.resolve()


async def _each(
    engines: Sequence[EngineClient], work: Callable[[EngineClient], Awaitable[T]]
) -> dict[str, T | Exception]:
    """The outcome of every engine, by its id; the fault of one leaves the others alone."""

    async def one(engine: EngineClient) -> T | Exception:
        try:
            return await work(engine)
        except (EngineError, WeightError, DeadlineExceeded) as fault:
            return fault

    found = await asyncio.gather(*map(one, engines))
    return {engine.engine_id: outcome for engine, outcome in zip(engines, found)}
