"""Versions on their way to the engines, at most one at a time: published in line, put into place beside the loop.

Promises: the trainer's weights stay as they are until nobody reads them any more; a version frees slots only by its
commit; where the schedule drains, nothing is in flight when a version is put into place. An update that fails where
rollouts wait for it is tried again as often as `retries` says, when the engines have recovered, and then ends the
run; else the old version stays, the next step's update is the next try, and when the slots are used up before one
succeeds rollouts wait for it too (the pool asks for `failure`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from turnout.core.errors import DeadlineExceeded, EngineError, InvariantBroken, TurnoutError, WeightError
from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.core.waits import EVALUATE, UPDATE
from turnout.placement.tasks import first
from turnout.schedule.lag import LagGate
from turnout.schedule.phases import Phases
from turnout.schedule.schedule import Schedule

log = logging.getLogger(__name__)
FAULTS = (WeightError, EngineError, DeadlineExceeded)


class Made(Protocol):
    """What was published."""

    @property
    def version(self) -> WeightVersion: ...


class PendingUpdate(Protocol):
    """One update of turnout.transfer.updater."""

    async def publish(self) -> Made: ...

    async def prepare(self) -> None: ...

    async def commit(self) -> WeightVersion: ...

    def extend(self, seconds: float) -> None:
        """Moves the deadline: so long the update waited for something else."""
        ...

    async def unserved(self) -> None:
        """Returns when no engine may be asked for as long as the update goes on."""
        ...

    async def abandon(self, reason: str) -> None:
        """Ends it where it has not ended: the old version stays current."""
        ...


class Weights(Protocol):
    def begin(self, train_step: int) -> PendingUpdate: ...

    async def digest(self) -> str:
        """The root digest of the trainer's weights."""
        ...

    @property
    def follow(self) -> bool:
        """Whether engines come to a version by themselves as soon as it is published."""
        ...

    @property
    def detached(self) -> bool:
        """Whether what is published needs the trainer's weights no more."""
        ...

    @property
    def retries(self) -> int:
        """How often an update that failed is tried again at once."""
        ...

    async def recovered(self) -> None:
        """Waits until engines can take another update; raises DeadlineExceeded."""
        ...


class InFlight(Protocol):
    """What an update asks of the rollouts (turnout.rollout.pool)."""

    async def drain(self) -> None: ...

    def published(self, steps_done: int, root: str) -> None: ...

    def remade(self, steps_done: int, root: str) -> None: ...

    def committed(self, steps_done: int, root: str) -> None: ...

    def changed(self) -> None: ...


class Pinned(Protocol):
    """What an update asks of the evaluations: not to be in the middle of a version; they begin on a new one."""

    async def settled(self) -> None: ...

    def renewed(self) -> None: ...


@dataclass(frozen=True)
class Around:
    """What updates have to do with."""

    in_flight: InFlight
    pinned: Pinned
    gate: LagGate
    phases: Phases
    clock: Clock


class Updates:
    """The loop's versions. `current` is the newest committed one."""

    def __init__(self, weights: Weights, schedule: Schedule, around: Around) -> None:
        self._weights, self._schedule, self._around = weights, schedule, around
        self._task: asyncio.Task[None] | None = None
        self._published: int | None = None
        self._current: WeightVersion | None = None
        self.failure: TurnoutError | None = None

    @property
    def current(self) -> WeightVersion:
        if self._current is None:
            raise InvariantBroken("a base version is adopted before anything asks for the current one")
        return self._current

    @property
    def under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def adopt(self, version: WeightVersion, steps_done: int) -> None:
        """What every engine has attested at the start."""
        self._current, self._published = version, steps_done
        self._around.gate.committed(version, steps_done)

    async def restore(self, steps_done: int) -> None:
        """The weights that the trainer restored are made current in full before anything is sampled. Raises
        WeightError as any update."""
        update = await self._to_engines(steps_done)
        await self._prepare(update)
        self.adopt(await update.commit(), steps_done)

    async def publish(self, steps_done: int, last: bool) -> WeightVersion:
        """Publishes the weights after `steps_done` train steps where that is due. Returns the version that is
        current then. Raises where an update fails that the run can't go on without."""
        due = steps_done % self._schedule.interval == 0 or last
        if due and steps_done != self._published:
            await self.settled()
            await self._begin(steps_done, must=last or self._schedule.drain)
            if last:
                await self.settled()
        return self.current

    async def retry(self, steps_done: int) -> None:
        """Between train steps, when nothing goes on without the update that failed: tries it again, as often as one
        that must be is tried; raises what it failed with."""
        assert self.failure is not None, "an update failed before it is tried again"
        if not self._weights.retries:
            raise self.failure
        await self._weights.recovered()
        await self._begin(steps_done, must=True)

    async def settled(self) -> None:
        """Waits for the update under way to be committed or to fail; it has its own deadline."""
        if self._task is not None:
            task, self._task = self._task, None
            await task

    async def close(self) -> None:
        """Stops what is under way; the run is over."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _begin(self, steps_done: int, must: bool) -> None:
        for left in range(self._weights.retries, -1, -1):
            try:
                await self._tried(steps_done, must)
                return
            except FAULTS as fault:
                if not must and self._around.gate.awaits(steps_done):
                    await self._remade(steps_done)
                if not must or not left:
                    self._fail(fault, must)
                    return
                log.warning("after step %d: %s; it is tried again, at most %d times", steps_done, fault, left)
            await self._weights.recovered()

    async def _remade(self, steps_done: int) -> None:
        """Training goes on from weights that a resume may have made again, and nothing names them: what sampled
        from them before is told, else it would count as of a version that never became current."""
        root = await self._weights.digest()
        self._around.in_flight.remade(steps_done, root)
        self._around.gate.remade(steps_done, root)

    async def _tried(self, steps_done: int, must: bool) -> None:
        self._published = steps_done
        update = await self._to_engines(steps_done)
        if not must and self._weights.detached:
            self._task = asyncio.ensure_future(self._beside(update, steps_done))
            return
        await self._prepare(update)
        await self._rest_cleared(update)
        with self._around.phases("activate"):
            await self._commit(update, steps_done)

    async def _to_engines(self, steps_done: int) -> PendingUpdate:
        """The update, published."""
        if self._weights.follow:
            await self._around.pinned.settled()
        update = self._weights.begin(steps_done)
        with self._around.phases("publish"):
            version = (await update.publish()).version
        self._around.gate.published(version, steps_done)
        self._around.in_flight.published(steps_done, version.root)
        return update

    async def _prepare(self, update: PendingUpdate) -> None:
        with self._around.phases("prepare"):
            await update.prepare()

    async def _beside(self, update: PendingUpdate, steps_done: int) -> None:
        phases = self._around.phases
        try:
            with phases.beside("prepare"):
                await update.prepare()
            await self._rest_cleared(update)
            with phases.beside("activate"):
                await self._commit(update, steps_done)
        except FAULTS as fault:
            self._fail(fault, False)

    async def _rest_cleared(self, update: PendingUpdate) -> None:
        """Waits for what must not be under way when the weights change; the update's deadline waits as well."""
        around = self._around
        began = around.clock.now()
        try:
            with around.phases.waits(UPDATE, EVALUATE, "the end of its requests"):
                await around.pinned.settled()
            if self._schedule.drain:
                with around.phases.beside("drain"):
                    await self._drained(update)
        except FAULTS as fault:
            await update.abandon(str(fault))
            raise
        update.extend(around.clock.now() - began)

    async def _drained(self, update: PendingUpdate) -> None:
        """Nothing is in flight any more. Requests that no engine may be asked for end only after this update, which
        would wait for them: it gives up."""

        async def starves() -> None:
            await update.unserved()
            raise WeightError("requests are in flight, and no engine is left that may be asked for the rest")

        await first(self._around.in_flight.drain(), starves())

    async def _commit(self, update: PendingUpdate, steps_done: int) -> None:
        version = await update.commit()
        self._current, self.failure = version, None
        self._around.gate.committed(version, steps_done)
        self._around.in_flight.committed(steps_done, version.root)
        self._around.pinned.renewed()

    def _fail(self, fault: TurnoutError, must: bool) -> None:
        if must:
            raise fault
        self.failure = fault
        self._around.in_flight.changed()
