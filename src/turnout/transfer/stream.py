"""Versions that touch no disk: what tensor and group transports share.

Promises: the version is fixed by the digest of the trainer's export and recorded before anything is sent; tensors
go out in buckets of a bounded size while engines serve; they activate at the end call and attest from their live
tensors, so what was sent wrongly is never current; after a failure every engine is told to drop what it staged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeVar

from turnout.core.errors import DeadlineExceeded, EngineError, WeightError
from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.placement.tasks import together
from turnout.serving.client import Attestation, EngineClient
from turnout.serving.weights_client import BucketFlags, EngineWeights, OnUpdate, standing_still
from turnout.transfer.outcomes import outcomes
from turnout.transfer.transport import Export, Ready
from turnout.transfer.worker import Worker
from turnout.weights.buckets import buckets
from turnout.weights.digest import Line, root_digest, tensor_digest
from turnout.weights.store import WeightStore

DROP_DEADLINE_S = 10.0
T = TypeVar("T")
Bucket = Any  # tensors or changes, or where they lie already


class StreamTransport:
    """The frame of a Transport; subclasses send one bucket. `bucket_bytes` bounds a bucket; `on_update`: what
    activation does to requests in flight."""

    on_update = OnUpdate.DRAIN

    def __init__(self, store: WeightStore, clock: Clock, bucket_bytes: int) -> None:
        self.store, self.clock = store, clock
        self._bucket_bytes = bucket_bytes
        self._worker = Worker(clock)
        self._receivers: list[EngineWeights] = []  # of the update under way
        self._unsent: Export | None = None
        self.base_root: str | None = None  # what the update under way is relative to; None: to nothing

    def cut(self, export: Export) -> Iterator[tuple[Bucket, bool]]:
        """The buckets of the update under way, each with whether it is the last. The next one is asked for when one
        was sent."""
        return marked(buckets(export(), self._bucket_bytes))

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

    async def close(self) -> None:
        """Nothing stands between updates."""

    @property
    def detached(self) -> bool:
        return False  # the bytes are sent from the export

    async def publish(
        self,
        export: Export,
        train_step: int,  # noqa: ARG002 - no manifest says it
        deadline_s: float,
    ) -> Ready:
        return await self._worker.run("the weights to be digested", lambda: self._fix(export), deadline_s)

    async def prepare(
        self, ready: Ready, export: Export, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Exception | None]:
        """A stock engine serves what it is sent at once: where there is one, sending waits for `activate`.

        A bucket reaches all receivers or counts for none: where one fails the others are not in the answer."""
        self._receivers = [EngineWeights(engine) for engine in engines]
        if not all(engine.stages for engine in engines):
            self._unsent = export
            return {engine.engine_id: None for engine in engines}
        fault = await self._fault_of_sending(ready, export, deadline_s)
        if fault is None:
            return {engine.engine_id: None for engine in engines}
        return await _culprits(engines, fault)

    async def activate(
        self, ready: Ready, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Attestation | Exception]:
        try:
            async with standing_still(engines, self.on_update, deadline_s):
                return await self._activated(ready, engines, deadline_s)
        except EngineError as fault:  # one that can't be paused
            await self._drop()
            return {engine.engine_id: fault for engine in engines}

    async def _activated(
        self, ready: Ready, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Attestation | Exception]:
        end = self.clock.now() + deadline_s
        if self._unsent is not None:
            fault = await self._fault_of_sending(ready, self._unsent, deadline_s)
            if fault is not None:  # whatever a stock engine got of it, it serves
                return {engine.engine_id: fault for engine in engines}
        left = max(0.001, end - self.clock.now())

        async def put(engine: EngineClient) -> Attestation:
            try:
                await self.end(EngineWeights(engine), ready, left)
                return await engine.attest(max(0.001, end - self.clock.now()))
            except EngineError:
                await EngineWeights(engine).drop(DROP_DEADLINE_S)
                raise

        found = await outcomes(engines, put)
        self._receivers, self._unsent = [], None
        return found

    async def committed(self, version: WeightVersion) -> None:
        """Nothing is kept of a version."""

    async def aborted(self, version: WeightVersion) -> None:  # noqa: ARG002 - one at a time
        await self._drop()

    async def catch_up(self, version: WeightVersion, engine: EngineClient, deadline_s: float) -> None:
        """Nothing is kept of a version: the engine waits for the next update."""

    def _fix(self, export: Export) -> Ready:
        lines: dict[str, Line] = {}
        size = 0
        for tensor in export():
            if tensor.name in lines:
                raise WeightError(f"{tensor.name} is exported twice")
            lines[tensor.name] = (tensor.dtype, tensor.shape, tensor_digest(tensor))
            size += tensor.nbytes
        return Ready(self.store.record(root_digest(lines)), size)

    async def _fault_of_sending(self, ready: Ready, export: Export, deadline_s: float) -> Exception | None:
        """Why the buckets did not reach all receivers; what these have staged is dropped then."""
        what = f"version {ready.version.label} to reach {len(self._receivers)} engines"
        try:
            await self.clock.within(deadline_s, what, self._send(ready, export, deadline_s))
        except (EngineError, WeightError, DeadlineExceeded) as fault:
            await self._drop()
            return fault
        return None

    async def _drop(self) -> None:
        receivers, self._receivers, self._unsent = self._receivers, [], None
        if receivers:
            await asyncio.gather(*(each.drop(DROP_DEADLINE_S) for each in receivers))
            await self.close()

    async def _send(self, ready: Ready, export: Export, deadline_s: float) -> None:
        end = self.clock.now() + deadline_s

        def left() -> float:
            return max(0.001, end - self.clock.now())

        engines = self._receivers
        stale = [engine for engine in engines if engine.client.holds is None]
        await asyncio.gather(*(engine.drop(DROP_DEADLINE_S) for engine in stale))  # what a failure left begun
        await self.open(engines, left())
        await together(engine.begin(left(), self.base_root) for engine in engines)
        async for bucket, last in on_thread(self.cut(export)):
            # the label goes with the last bucket, since a stock SGLang shows it at once
            label, requests = (ready.version.label, self.on_update) if last else (None, None)
            await self.send(bucket, engines, BucketFlags(label, requests, left()))


async def _culprits(engines: Sequence[EngineClient], fault: Exception) -> dict[str, Exception | None]:
    """Which engines a failed sending is put down to: those that do not answer now; else the one that the fault
    names; else all."""
    answers = await outcomes(engines, lambda engine: engine.attest(DROP_DEADLINE_S))
    silent = {name: answer for name, answer in answers.items() if isinstance(answer, Exception)}
    if silent:
        return dict(silent)
    if isinstance(fault, EngineError) and fault.engine_id in answers:
        return {fault.engine_id: fault}
    return {engine.engine_id: fault for engine in engines}


def marked(items: Iterator[T]) -> Iterator[tuple[T, bool]]:
    """Each with whether it is the last: the next one is made before one is handed out."""
    held = next(items, None)
    while held is not None:
        following = next(items, None)
        yield held, following is None
        held = following


async def on_thread(items: Iterator[T]) -> AsyncIterator[T]:
    """Each made on a thread when it is asked for."""
    advance: Callable[[], T | None] = lambda: next(items, None)  # noqa: E731 - a thread needs a callable
    while (made := await asyncio.to_thread(advance)) is not None:
        yield made
