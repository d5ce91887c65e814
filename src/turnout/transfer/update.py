"""One weight update from the trainer's export to attested engines, whatever way the bytes take.

Drives turnout.weights.update_machine over a Transport: performs its effects in order, feeds back what happened.
Promises: a version becomes current only after every required engine that was not fenced on the way attested its
root digest from its live tensors, and these were enough; where the policy says drained, no request is in flight at
activation; an update that is aborted raises WeightError with the cause and leaves the old version current.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnout.core.errors import DeadlineExceeded, EngineError, InvariantBroken, WeightError
from turnout.core.events import (
    VersionAborted,
    VersionAttested,
    VersionCommitted,
    VersionPrepared,
    VersionPublished,
)
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation, EngineClient
from turnout.transfer.attest import Expected
from turnout.transfer.transport import Export, Ready
from turnout.weights import update_machine as machine
from turnout.weights.engine_machine import Engine
from turnout.weights.routing import Held
from turnout.weights.update_machine import Attested, Begin, Failed, Go, Joined, Phase, Prepared, Published

if TYPE_CHECKING:
    from turnout.transfer.updater import Updater

IDLE_S, IDLE_POLL_S = 1.0, 0.05
UNSERVED_S, UNSERVED_LOOKS = 5.0, 10
PREPARE_SHARE = (
    0.75  # of the time left: an engine that never answers leaves the others time to go on without it
)
FAULTS = (EngineError, WeightError, DeadlineExceeded)


@dataclass(frozen=True)
class Job:
    """What is updated: the weights of `export`, after `train_step` train steps, within `deadline_s`."""

    export: Export
    train_step: int
    deadline_s: float


class Update:
    """One pass through the machine: `publish`, `prepare`, `commit`; each raises where it is aborted."""

    def __init__(self, owner: Updater, job: Job) -> None:
        self._owner, self._job = owner, job
        self._fleet, self._transport, self._clock = owner.fleet, owner.transport, owner.clock
        self._end = self._clock.now() + job.deadline_s
        self._state = machine.UpdateState()
        self._ready: Ready | None = None
        self.expected: Expected = {}
        self.ended = asyncio.Event()

    def extend(self, seconds: float) -> None:
        """Moves the deadline: so long the update waited for something that is not its own."""
        self._end += seconds

    async def unserved(self) -> None:
        """Returns when no engine could be asked for UNSERVED_S: those that join wait for the end of the update."""
        looks = 0
        while looks < UNSERVED_LOOKS:
            looks = 0 if self._fleet.any_routable() else looks + 1
            await self._clock.sleep(UNSERVED_S / UNSERVED_LOOKS)

    async def abandon(self, reason: str) -> None:
        """Aborts it where it has not ended."""
        if not self.ended.is_set():
            self._feed(Failed(None, reason))
            if self._ready is not None:
                await self._transport.aborted(self._ready.version)

    async def publish(self) -> Ready:
        """Fixes the version. Nothing has changed for any engine when this returns."""
        fleet, follow = self._fleet, self._owner.policy.follow
        self._feed(Begin(fleet.required(), fleet.min_engines, fleet.sides, follow))
        if self._state.phase is Phase.PUBLISHING:
            self._feed(await self._published())
        await self._check()
        assert self._ready is not None
        return self._ready

    async def prepare(self) -> None:
        """Brings the version to every required engine, each of which serves on what it served."""
        ready = self._given()
        while names := self._state.those(Engine.PREPARING):
            for event in await self._prepared(ready, self._clients(names)):
                if isinstance(event, Prepared):
                    self._owner.events.emit(VersionPrepared(event.engine, ready.version.label))
                self._feed(event)
            await self._check()

    async def commit(self) -> WeightVersion:
        """Has every required engine put the version into place and attest it; only then is it current. Of engines
        that follow, waits for the proof of enough."""
        ready = self._given()
        self._feed(await self._go())
        await self._check()
        if self._owner.policy.follow:
            await self._followed()
        else:
            engines = self._clients(self._state.those(Engine.ACTIVATING))
            found = await self._transport.activate(ready, engines, self._left())
            for engine in engines:
                self._feed(self._outcome(engine, found[engine.engine_id], ready.version))
        await self._check()
        await self._transport.committed(ready.version)
        return ready.version

    def lost(self, engine_id: str, reason: str) -> None:
        """An engine that takes part ended."""
        if engine_id in self._state.engines:
            self._feed(Failed(engine_id, reason))

    def joined(self, engine_id: str) -> None:
        """An engine started, or started again: it has no part in this update, or none any more."""
        if self._state.phase is not Phase.IDLE:
            self._feed(Joined(engine_id))

    @property
    def publishing(self) -> bool:
        return self._state.phase is Phase.PUBLISHING

    def awaits(self, engine_id: str, label: str) -> bool:
        """Whether the engine follows, and has yet to prove this version."""
        mine = self._ready is not None and self._ready.version.label == label and not self.ended.is_set()
        return mine and self._state.engines.get(engine_id) is Engine.FOLLOWING

    def attested(self, engine_id: str, root: str) -> None:
        """An engine that follows has proved what it holds."""
        if self._state.engines.get(engine_id) is Engine.FOLLOWING:
            self._feed(Attested(engine_id, root))

    async def _followed(self) -> None:
        try:
            await self._clock.within(self._left(), "enough engines to prove the version", self.ended.wait())
        except DeadlineExceeded as fault:
            behind = ", ".join(self._state.those(Engine.FOLLOWING))
            self._feed(Failed(None, f"{fault}; not there yet: {behind or 'none'}"))

    def _given(self) -> Ready:
        if self._ready is None:
            raise InvariantBroken("an update is published before anything else")
        return self._ready

    def _feed(self, event: machine.Event) -> None:
        self._state, effects = machine.step(self._state, event)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: machine.Effect) -> None:
        label = self._ready.version.label if self._ready else ""
        if isinstance(effect, machine.Commit):
            held = Held(self._given().version, self._job.train_step)
            self._owner.events.emit(VersionCommitted(label))
            self._owner.committed(held, effect.engines, self.expected)
            self.ended.set()
        elif isinstance(effect, machine.Abort):
            self._owner.events.emit(VersionAborted(label, effect.reason))
            if self._ready is not None:
                self._owner.aborted(self._ready.version)
            self.ended.set()
        elif isinstance(effect, machine.Activate | machine.Close):
            self._fleet.activate(effect.engine)
        elif isinstance(effect, machine.Fence):
            self._fleet.fence(effect.engine, label, effect.reason)

    async def _check(self) -> None:
        """Raises where the update was aborted."""
        if self._state.phase is Phase.ABORTED:
            if self._ready is not None:
                await self._transport.aborted(self._ready.version)
            raise WeightError(f"weight update aborted: {self._state.reason}")

    async def _published(self) -> machine.Event:
        try:
            self._ready = await self._transport.publish(self._job.export, self._job.train_step, self._left())
            self.expected = await self._owner.checksums(self._job.export, self._left())
        except (WeightError, DeadlineExceeded) as fault:
            return Failed(None, str(fault))
        version = self._ready.version
        self._owner.events.emit(
            VersionPublished(
                version=version.label,
                incarnation=version.incarnation,
                counter=version.counter,
                root=version.root,
                step=self._job.train_step,
                bytes=self._ready.bytes,
                required=list(self._state.live),
                at_least=self._state.at_least,
                encoding=self._ready.encoding,
                density=self._ready.density,
                follow=self._state.follow,
            )
        )
        self._owner.published(Held(version, self._job.train_step), self.expected)
        return Published(version.root)

    async def _prepared(self, ready: Ready, engines: list[EngineClient]) -> list[machine.Event]:
        try:
            left = PREPARE_SHARE * self._left()
            found = await self._transport.prepare(ready, self._job.export, engines, left)
        except (WeightError, DeadlineExceeded) as fault:
            return [Failed(None, str(fault))]
        if not found:
            raise InvariantBroken(f"{ready.version.label} was prepared by nobody and failed nowhere")
        return [
            Prepared(name) if fault is None else Failed(name, str(fault)) for name, fault in found.items()
        ]

    async def _go(self) -> machine.Event:
        """Which engines still run requests, where they may not; one that does not say has failed. A request that
        was just cut ends at its engine a moment later, once that has seen the connection close."""
        if not self._owner.policy.drained:
            return Go()
        end = self._clock.now() + IDLE_S

        async def load(engine: EngineClient) -> int:
            return await self._clock.within(self._left(), f"the load of {engine.engine_id}", engine.load())

        async def running(engine: EngineClient) -> int:
            try:
                while (count := await load(engine)) and self._clock.now() < end:
                    await self._clock.sleep(IDLE_POLL_S)
                return count
            except FAULTS as fault:
                self._feed(Failed(engine.engine_id, str(fault)))
                return 0

        engines = self._clients(self._state.those(Engine.PREPARED))
        counts = await asyncio.gather(*map(running, engines))
        return Go(tuple(engine.engine_id for engine, count in zip(engines, counts) if count))

    def _outcome(
        self, engine: EngineClient, found: Attestation | Exception, version: WeightVersion
    ) -> machine.Event:
        if isinstance(found, Exception):
            return Failed(engine.engine_id, str(found))
        try:
            found = self._owner.proved(engine, found, version, self.expected)
        except WeightError as fault:
            return Failed(engine.engine_id, str(fault))
        engine.version = found.label
        if self._state.engines[engine.engine_id] is not Engine.ACTIVATING:  # fenced meanwhile
            return Attested(engine.engine_id, found.root)
        self._owner.events.emit(VersionAttested(engine.engine_id, found.label, found.root, found.level))
        return Attested(engine.engine_id, found.root)

    def _clients(self, names: tuple[str, ...]) -> list[EngineClient]:
        return [self._fleet.engines[name] for name in names]

    def _left(self) -> float:
        return max(0.001, self._end - self._clock.now())
