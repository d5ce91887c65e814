"""Versions that touch no disk: what tensor and group transports share.

Promises: the version is fixed by the digest of the trainer's export and recorded before anything is sent; tensors
go out in buckets of a bounded size while engines serve; they activate at the end call and attest from their live
tensors, so what was sent wrongly is never current; after a failure every engine is told to drop what it staged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

from turnout.core.errors import DeadlineExceeded, EngineError, WeightError
from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.placement.tasks import together
from turnout.serving.client import Attestation, EngineClient
from turnout.serving.weights_client import BucketFlags, EngineWeights
from turnout.transfer.updater import Export, Ready
from turnout.weights.buckets import buckets
from turnout.weights.digest import root_digest, tensor_digest
from turnout.weights.store import WeightStore

DROP_DEADLINE_S = 10.0
Bucket = Sequence[Any]  # tensors, or changes


class StreamTransport:
    """The frame of a Transport; subclasses send one bucket. `bucket_bytes` bounds a bucket."""

    def __init__(self, store: WeightStore, clock: Clock, bucket_bytes: int) -> None:
        self.store, self.clock = store, clock
        self._bucket_bytes = bucket_bytes
        self._receivers: list[EngineWeights] = []  # of the update under way
        self._unsent: Export | None = None
        self.base_root: str | None = None  # what the update under way is relative to; None: to nothing

    def cut(self, export: Export) -> Iterator[Bucket]:
        """The buckets of the update under way."""
        return buckets(export(), self._bucket_bytes)

    async def send(self, bucket: Bucket, engines: Sequence[EngineWeights], flags: BucketFlags) -> None:
        """Brings one bucket to all engines; `flags.deadline_s` bounds it. Raises EngineError or WeightError."""
        raise NotImplementedError

    async def open(self, engines: Sequence[EngineWeights], deadline_s: float) -> None:
        """Makes ready what all buckets of an update need."""

    async def end(
        self,
        engine: EngineWeights,
        ready: Ready,  # noqa: ARG002 - all that was sent is what was published
        deadline_s: float,
    ) -> None:
        """Has an engine put into place what it was sent."""
        await engine.end(deadline_s)

    async def close(self, engines: Sequence[EngineWeights], failed: bool) -> None:
        """Takes down what no longer serves; never raises for an engine that does not answer."""

    async def publish(
        self,
        export: Export,
        train_step: int,  # noqa: ARG002 - no manifest says it
        deadline_s: float,
    ) -> Ready:
        work = asyncio.to_thread(self._fix, export)
        return await self.clock.within(deadline_s, "the weights to be digested", work)

    async def prepare(
        self, ready: Ready, export: Export, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Exception | None]:
        """A stock engine serves what it is sent at once: where there is one, sending waits for `activate`."""
        self._receivers = [EngineWeights(engine) for engine in engines]
        if not all(engine.stages for engine in engines):
            self._unsent = export
            return {engine.engine_id: None for engine in engines}
        fault = await self._guarded(ready, self._send(ready, export, deadline_s), deadline_s)
        return {engine.engine_id: fault for engine in engines}

    async def activate(
        self, ready: Ready, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Attestation | Exception]:
        found: list[Attestation] = []
        fault = await self._guarded(ready, self._put(ready, found, deadline_s), deadline_s)
        if fault is not None:
            return {engine.engine_id: fault for engine in engines}
        self._receivers = []
        return {engine.engine_id: attested for engine, attested in zip(engines, found)}

    async def committed(self, version: WeightVersion) -> None:
        """Nothing is kept of a version."""

    async def aborted(self, version: WeightVersion) -> None:  # noqa: ARG002 - one at a time
        await self._drop()

    def _fix(self, export: Export) -> Ready:
        lines: dict[str, tuple[str, tuple[int, ...], str]] = {}
        size = 0
        for tensor in export():
            if tensor.name in lines:
                raise WeightError(f"{tensor.name} is exported twice")
            lines[tensor.name] = (tensor.dtype, tensor.shape, tensor_digest(tensor))
            size += tensor.nbytes
        return Ready(self.store.record(root_digest(lines)), size)

    async def _guarded(
        self, ready: Ready, work: Coroutine[Any, Any, None], deadline_s: float
    ) -> Exception | None:
        """Why the work failed; what engines have staged is dropped then."""
        what = f"version {ready.version.label} to reach {len(self._receivers)} engines"
        try:
            await self.clock.within(deadline_s, what, work)
        except (EngineError, WeightError, DeadlineExceeded) as fault:
            await self._drop()
            return fault
        return None

    async def _drop(self) -> None:
        receivers, self._receivers, self._unsent = self._receivers, [], None
        if receivers:
            await asyncio.gather(*(each.drop(DROP_DEADLINE_S) for each in receivers))
            await self.close(receivers, failed=True)

    async def _send(self, ready: Ready, export: Export, deadline_s: float) -> None:
        end = self.clock.now() + deadline_s

        def left() -> float:
            return max(0.001, end - self.clock.now())

        engines = self._receivers
        await self.open(engines, left())
        await together(engine.begin(left(), self.base_root) for engine in engines)
        async for bucket, last in ahead(self.cut(export)):
            # the label goes with the last bucket, since a stock SGLang shows it at once
            await self.send(bucket, engines, BucketFlags(ready.version.label if last else None, last, left()))

    async def _put(self, ready: Ready, found: list[Attestation], deadline_s: float) -> None:
        """Fills `found` with what the receivers attest, in their order."""
        end = self.clock.now() + deadline_s
        if self._unsent is not None:
            await self._send(ready, self._unsent, deadline_s)
            self._unsent = None
        left = max(0.001, end - self.clock.now())
        await together(self.end(engine, ready, left) for engine in self._receivers)
        left = max(0.001, end - self.clock.now())
        found += await together(engine.client.attest(left) for engine in self._receivers)
        await self.close(self._receivers, failed=False)


async def ahead(items: Iterator[Bucket]) -> AsyncIterator[tuple[Bucket, bool]]:
    """Buckets, each with whether it is the last; the next one is made on a thread before one is handed out."""
    advance: Callable[[], Bucket | None] = lambda: next(items, None)  # noqa: E731 - a thread needs a callable
    held = await asyncio.to_thread(advance)
    while held is not None:
        following = await asyncio.to_thread(advance)
        yield held, following is None
        held = following
