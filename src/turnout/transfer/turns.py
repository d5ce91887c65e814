"""Versions to engines that gave their memory back (--offload-rollout): a Transport around another one.

Promises: an engine has memory for weights before anything is sent to it, and takes that of its KV after it attested
them and before the version is committed, so that whoever may ask it then finds it whole. An engine that can't take
its memory has failed in the update, as in any other part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation, EngineClient
from turnout.transfer.transport import Export, Ready, Transport


class Memory(Protocol):
    """Who knows what engines gave back. Both return the faults by engine id; the others have what they need."""

    async def room(self, engines: Sequence[EngineClient], deadline_s: float) -> dict[str, Exception]:
        """Has them take memory for weights."""
        ...

    async def serving(self, engines: Sequence[EngineClient], deadline_s: float) -> dict[str, Exception]:
        """They attested their weights: has them take the memory of their KV."""
        ...


class TakingTurns:
    """See the module."""

    def __init__(self, inner: Transport, memory: Memory, clock: Clock) -> None:
        self.inner, self._memory, self._clock = inner, memory, clock

    @property
    def detached(self) -> bool:
        return False  # no train step goes on beside an update

    async def publish(self, export: Export, train_step: int, deadline_s: float) -> Ready:
        return await self.inner.publish(export, train_step, deadline_s)

    async def prepare(
        self, ready: Ready, export: Export, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Exception | None]:
        end = self._clock.now() + deadline_s
        if faults := await self._memory.room(engines, deadline_s):
            return dict(faults)  # the others are asked for again
        return await self.inner.prepare(ready, export, engines, max(0.001, end - self._clock.now()))

    async def activate(
        self, ready: Ready, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Attestation | Exception]:
        end = self._clock.now() + deadline_s
        found = await self.inner.activate(ready, engines, deadline_s)
        attested = [engine for engine in engines if isinstance(found[engine.engine_id], Attestation)]
        if not attested:
            return found
        return {**found, **await self._memory.serving(attested, max(0.001, end - self._clock.now()))}

    async def committed(self, version: WeightVersion) -> None:
        await self.inner.committed(version)

    async def aborted(self, version: WeightVersion) -> None:
        await self.inner.aborted(version)

    async def catch_up(
        self, version: WeightVersion, engine: EngineClient, deadline_s: float
    ) -> Attestation | None:
        return await self.inner.catch_up(version, engine, deadline_s)

    async def close(self) -> None:
        await self.inner.close()
