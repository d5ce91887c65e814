"""A way of versions to virtual engines (turnout.transfer.transport.Transport), over the production's weight store.

The store's records are real files of the virtual disk: counters, incarnations and write ids are the production's.
The bytes are not: a root digest stands for them, in the place of a folder's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from turnout.core.errors import InvariantBroken
from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation, EngineClient
from turnout.serving.weights_client import EngineWeights, OnUpdate
from turnout.sim.faults import Faults
from turnout.transfer.outcomes import outcomes
from turnout.transfer.transport import Export, Ready
from turnout.weights.digest import root_of
from turnout.weights.store import WeightStore


class VirtualTransport:
    """See the module."""

    detached = True  # as a way through files, which has all of a version when it is published

    def __init__(self, store: WeightStore, clock: Clock, faults: Faults, on_update: OnUpdate) -> None:
        """`on_update`: what activation does to requests in flight."""
        self.store, self._clock, self._faults, self._on_update = store, clock, faults, on_update
        self._prepared: dict[str, str] = {}

    async def publish(self, export: Export, train_step: int, deadline_s: float) -> Ready:
        del train_step
        root = root_of(export())
        writing = self._clock.sleep(self._faults.uniform(0.05, 1.0))
        await self._clock.within(deadline_s, "the weights to be written", writing)
        version = await asyncio.to_thread(self.store.record, root)
        return Ready(version, 16)

    async def prepare(
        self, ready: Ready, export: Export, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Exception | None]:
        if not self.detached and root_of(export()) != ready.version.root:
            raise InvariantBroken(f"the trainer went on while {ready.version.label} was on its way")
        self._prepared = {}

        async def stage(engine: EngineClient) -> None:
            version = ready.version
            made = await EngineWeights(engine).prepare(version.root, version.label, deadline_s)
            self._prepared[engine.engine_id] = made

        return await outcomes(engines, stage)

    async def activate(
        self, ready: Ready, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Attestation | Exception]:
        del ready
        end = self._clock.now() + deadline_s

        async def put(engine: EngineClient) -> Attestation:
            prepared = self._prepared[engine.engine_id]
            await EngineWeights(engine).activate(prepared, deadline_s, self._on_update)
            return await engine.attest(max(0.001, end - self._clock.now()))

        return await outcomes(engines, put)

    async def committed(self, version: WeightVersion) -> None: ...

    async def aborted(self, version: WeightVersion) -> None: ...

    async def close(self) -> None: ...

    async def catch_up(
        self, version: WeightVersion, engine: EngineClient, deadline_s: float
    ) -> Attestation | None:
        return await engine.update_from_disk(version.root, version.label, deadline_s)
