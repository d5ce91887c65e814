"""Trainer and engines take turns on the same memory, in the order of turnout.schedule.colocated_machine.

Owns whose turn it is, and what each engine gave back. Promises: nothing is taken before what the other side gave
back was measured as gone, within a deadline, and was enough (turnout.placement.footprint), else the run ends with
who kept what; an engine that gave its memory back is not asked until a version was committed that it attested, one
of a frozen model until it has read its weights again and attested that they are the same; one that comes again in
the trainer's turn waits for its end, or gives back at once what it has taken. Each switch alone leaves the other
side resident; the order is the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from turnout.config.run_config import RunConfig
from turnout.core.errors import DeadlineExceeded, EngineDead, EngineError, InvariantBroken, TrainError
from turnout.core.events import MemoryReleased
from turnout.core.ports import Clock, EventSink
from turnout.core.types import TrainBatch
from turnout.placement.footprint import enough, tree_bytes
from turnout.placement.tasks import together
from turnout.schedule.colocated_machine import TRAINERS, TURNS, Moved, Turn, check
from turnout.schedule.frozen import FrozenModels
from turnout.schedule.parts import TrainerThread
from turnout.schedule.run_engines import RunEngines
from turnout.serving.client import EngineClient
from turnout.serving.weights_client import CACHE_TAGS, WEIGHT_TAGS, EngineWeights
from turnout.train.backend import GivenBack, Offloading, TrainBackend
from turnout.transfer.fleet import Fleet

POLL_S = 0.05
T = TypeVar("T")
FAULTS = (EngineError, DeadlineExceeded)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Switches:
    """Who gives memory back; `deadline_s` bounds every wait for that."""

    trainer: bool
    engines: bool
    deadline_s: float

    @staticmethod
    def of(config: RunConfig) -> Switches:
        return Switches(config.offloads_train, config.offloads_rollout, config.update_weight_timeout_s)


@dataclass(frozen=True)
class Sharing:
    """The engines that share memory with the trainer, of those of the run; `fleet` and `frozen` are there once a
    version is."""

    engines: RunEngines
    fleet: Callable[[], Fleet]
    frozen: Callable[[], FrozenModels]

    def running(self) -> list[EngineClient]:
        up = self.engines.up()
        updated = [client for client in self.engines.updated if client.engine_id in up]
        return [*updated, *self.frozen().up]

    def rest(self, engine: EngineClient) -> None:
        """Nothing asks it until it serves again."""
        (self.fleet().rest if engine.plan.updated else self.frozen().lost)(engine.engine_id)

    async def returns(self, engine: EngineClient) -> None:
        """As FrozenModels.returns."""
        await self.frozen().returns(engine)

    def held(self, engine_id: str) -> int:
        """Bytes that the processes of an engine hold, as measured."""
        pid = self.engines.pid(engine_id)
        return 0 if pid is None else tree_bytes(pid)


class Colocated:
    """The loop's trainer, and the memory of turnout.transfer.turns. `turn` is whose turn it is."""

    def __init__(
        self, switches: Switches, trainer: TrainerThread, engines: Sharing, events: EventSink, clock: Clock
    ) -> None:
        self._switches, self._trainer, self._engines = switches, trainer, engines
        self._events, self._clock = events, clock
        self._given: dict[EngineClient, set[str]] = {}  # tags that an engine has yet to take again
        self._door = asyncio.Lock()  # none of a frozen model joins while others give back
        self.turn = Turn.ROLLOUT

    async def begin(self) -> None:
        """The trainer is loaded, and no engine is started yet."""
        if self._switches.trainer:
            await self._trainer_gives()

    def check(self, phase: str) -> None:
        """As turnout.schedule.colocated_machine.check, now."""
        check(phase, self.turn)

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        """The trainer's turn: one train step, from engines that serve to memory that nobody has."""
        began = self._clock.now()
        async with self._door:
            released = await self._engines_give()
        if self._switches.trainer:
            await self._trainer.call("the trainer to take its memory", lambda t: _offloading(t).onload())
        self._move(Moved.ONLOADED)
        ready = self._clock.now()
        metrics = await self._trainer.train(batch)
        trained = self._clock.now()
        offloaded = await self._trainer_gives() if self._switches.trainer else 0
        self._move(Moved.OFFLOADED)
        seconds = {"seconds_release": ready - began, "seconds_offload": self._clock.now() - trained}
        return {**metrics, "released_bytes": released, "offloaded_bytes": offloaded, **seconds}

    async def _engines_give(self) -> int:
        """Has all give back; bytes by which what they hold fell."""
        engines = self._engines.running() if self._switches.engines else ()
        for engine in engines:
            if not engine.plan.updated:
                self._engines.rest(engine)  # whoever asks a frozen model waits from here on
        await self._of_each(engines, self._quiet)
        self._move(Moved.QUIET)
        released = sum(await self._of_each(engines, self._engine_gives))
        self._move(Moved.RELEASED)
        late = [
            engine for engine in self._engines.running() if self._switches.engines and engine not in engines
        ]
        return released + sum(
            await self._of_each(late, self._engine_gives)
        )  # came while the others gave back

    async def call(self, what: str, work: Callable[[TrainBackend], T]) -> T:
        """As TrainerThread.call: for what needs no memory of the trainer's but what it keeps."""
        return await self._trainer.call(what, work)

    async def room(self, engines: Sequence[EngineClient], deadline_s: float) -> dict[str, Exception]:
        faults = await self._take(engines, WEIGHT_TAGS, deadline_s)
        self._move(Moved.ROOM)
        return faults

    async def serving(self, engines: Sequence[EngineClient], deadline_s: float) -> dict[str, Exception]:
        self._move(Moved.ATTESTED)
        faults = await self._take(engines, CACHE_TAGS, deadline_s)
        await together(self._returns(engine, deadline_s) for engine in self._resting())
        self._move(Moved.SERVING)
        return faults

    async def engines_turn(self) -> None:
        """Returns when an engine may take memory; the train step under way has its own deadline."""
        while self._switches.engines and self.turn in TRAINERS:
            await self._clock.sleep(POLL_S)

    async def joins(self, engine: EngineClient) -> None:
        """An engine that came again: in the trainer's turn it gives back what it has taken meanwhile."""
        if self._switches.engines and self.turn in TRAINERS:
            await self._engine_gives(engine)

    async def takes_in(self, engine: EngineClient, joins: Callable[[], Awaitable[str]]) -> str:
        """An engine of a frozen model that came again joins, in the trainer's turn after it; what `joins` says."""
        async with self._door:
            if not (self._switches.engines and self.turn in TRAINERS):
                return await joins()
            await self._engine_gives(engine)
        while engine in self._given:
            await self._clock.sleep(POLL_S)
        return await joins()

    def _resting(self) -> list[EngineClient]:
        """Those of frozen models that gave back."""
        return [engine for engine in self._given if not engine.plan.updated]

    async def _returns(self, engine: EngineClient, deadline_s: float) -> None:
        try:
            await EngineWeights(engine).resume_memory((*WEIGHT_TAGS, *CACHE_TAGS), deadline_s)
            await self._engines.returns(engine)
        except EngineDead as fault:
            log.warning("its next life will serve the model: %s", fault)
        del self._given[engine]

    def _move(self, moved: Moved) -> None:
        self.turn = TURNS.after(self.turn, moved)

    async def _quiet(self, engine: EngineClient) -> int:
        """Returns when the engine says that it has no request. One that was just cut ends there a moment later."""

        async def idle() -> int:
            while await engine.load():
                await self._clock.sleep(POLL_S)
            return 0

        what = f"the requests of engine {engine.engine_id} to end, for it to give its memory back"
        return await self._clock.within(self._switches.deadline_s, what, idle())

    async def _engine_gives(self, engine: EngineClient) -> int:
        """Bytes by which what the engine holds fell; raises EngineError where that is too little in time."""
        name, deadline_s = engine.engine_id, self._switches.deadline_s
        before, end = self._engines.held(name), self._clock.now() + deadline_s
        self._engines.rest(engine)
        every = {*WEIGHT_TAGS, *CACHE_TAGS}
        fresh, self._given[engine] = every - self._given.get(engine, set()), every
        asked = await EngineWeights(engine).release_memory(fresh, deadline_s) if fresh else 0
        while not enough(asked, fell := before - self._engines.held(name)):
            if self._clock.now() >= end:
                why = f"it gave back {fell} of {asked} bytes within {deadline_s:g} s (--offload-rollout)"
                raise engine.fault(EngineError, "release", why)
            await self._clock.sleep(POLL_S)
        self._events.emit(MemoryReleased(name, asked, fell))
        return fell

    async def _trainer_gives(self) -> int:
        """Bytes by which what the trainer holds fell; raises TrainError where that is too little."""
        what = "the trainer to give its memory back"
        given: GivenBack = await self._trainer.call(what, lambda t: _offloading(t).offload())
        if not enough(given.asked, given.fell):
            raise TrainError(f"the trainer gave back {given.fell} of {given.asked} bytes (--offload-train)")
        self._events.emit(MemoryReleased("trainer", given.asked, given.fell))
        return given.fell

    async def _take(
        self, engines: Sequence[EngineClient], tags: Sequence[str], deadline_s: float
    ) -> dict[str, Exception]:
        """Has each take the memory of these tags, of what it gave back."""
        faults: dict[str, Exception] = {}

        async def take(engine: EngineClient) -> None:
            given = self._given.get(engine, set())
            if wanted := [tag for tag in tags if tag in given]:
                try:
                    await EngineWeights(engine).resume_memory(wanted, deadline_s)
                except FAULTS as fault:
                    faults[engine.engine_id] = fault
                else:
                    given -= set(wanted)

        await together(map(take, engines))
        return faults

    async def _of_each(
        self, engines: Sequence[EngineClient], work: Callable[[EngineClient], Awaitable[int]]
    ) -> list[int]:
        """What each comes to, without those that end meanwhile: who watches engines tells of that."""

        async def one(engine: EngineClient) -> int:
            try:
                return await work(engine)
            except EngineDead as fault:
                log.warning("its memory is back with its end: %s", fault)
                return 0

        return await together(map(one, engines))


def _offloading(trainer: TrainBackend) -> Offloading:
    if not isinstance(trainer, Offloading):
        raise InvariantBroken(f"{type(trainer).__name__} can't give its memory back")
    return trainer
