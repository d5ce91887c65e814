"""--check-weight-update-equal: after every update, what engines hold is compared with what the trainer holds.

A Transport around another one. Promises: an engine counts as updated only where the digest that it computes anew
from its live tensors, of all of them and not of what it was sent, is that of the trainer's weights, read anew as
well; an attestation moved along by changes is not enough. A stock engine's attestation is computed anew each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from turnout.core.errors import DeadlineExceeded, EngineError, WeightError
from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation, EngineClient
from turnout.serving.weights_client import EngineWeights
from turnout.transfer.transport import Export, Ready, Transport
from turnout.weights.digest import root_of


class EqualityChecked:
    """See the module."""

    def __init__(self, inner: Transport, clock: Clock) -> None:
        self.inner, self._clock = inner, clock
        self._export: Export = tuple

    @property
    def detached(self) -> bool:
        return False  # what the engines hold is compared with the export

    async def publish(self, export: Export, train_step: int, deadline_s: float) -> Ready:
        self._export = export
        return await self.inner.publish(export, train_step, deadline_s)

    async def prepare(
        self, ready: Ready, export: Export, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Exception | None]:
        return await self.inner.prepare(ready, export, engines, deadline_s)

    async def activate(
        self, ready: Ready, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Attestation | Exception]:
        end = self._clock.now() + deadline_s
        found = await self.inner.activate(ready, engines, deadline_s)
        if not any(engine.stages and isinstance(found[engine.engine_id], Attestation) for engine in engines):
            return found

        def left() -> float:
            return max(0.001, end - self._clock.now())

        work = asyncio.to_thread(lambda: root_of(self._export()))
        try:
            root = await self._clock.within(left(), "the trainer's weights to be digested", work)
        except DeadlineExceeded as fault:
            return {engine.engine_id: fault for engine in engines}

        async def checked(engine: EngineClient) -> Attestation | Exception:
            outcome = found[engine.engine_id]
            if isinstance(outcome, Exception) or not engine.stages:
                return outcome
            try:
                live = await EngineWeights(engine).live_root(left())
            except (EngineError, DeadlineExceeded) as fault:
                return fault
            if live != root:
                what = f"engine {engine.engine_id} holds {live} after the update, the trainer {root}"
                return WeightError(f"{what} (--check-weight-update-equal)")
            return outcome

        outcomes = await asyncio.gather(*map(checked, engines))
        return {engine.engine_id: outcome for engine, outcome in zip(engines, outcomes)}

    async def catch_up(
        self, version: WeightVersion, engine: EngineClient, deadline_s: float
    ) -> Attestation | None:
        return await self.inner.catch_up(version, engine, deadline_s)

    async def committed(self, version: WeightVersion) -> None:
        await self.inner.committed(version)

    async def aborted(self, version: WeightVersion) -> None:
        await self.inner.aborted(version)

    async def close(self) -> None:
        await self.inner.close()
