"""The control plane of a run: all that lies between its processes and THE loop, made from ports only.

Owns book, pool, lag gate and updates. A session gives it real engines, a real trainer and the real clock, a
simulated world its own: nothing here knows which of the two runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from turnout.config.run_config import RunConfig
from turnout.core.errors import RunStopped, TurnoutError
from turnout.core.ports import Clock, EventSink
from turnout.core.rng import SeedTree
from turnout.core.version import WeightVersion
from turnout.rollout.book import GroupBook
from turnout.rollout.pool import RolloutPool
from turnout.rollout.pool_plan import Ports
from turnout.rollout.pressure import PressureWatch
from turnout.rollout.returning import Returning
from turnout.rollout.source import PromptSource
from turnout.rollout.worker import Generator
from turnout.schedule import wiring
from turnout.schedule.lag import LagGate
from turnout.schedule.loop import Parts, Reporter, StepBatch, Trainer, run_loop
from turnout.schedule.parts import BatchMaker, Freshness, WeightUpdates
from turnout.schedule.phases import Phases
from turnout.schedule.rollout_only import SampledBatches, StandingVersion
from turnout.schedule.schedule import schedule_of
from turnout.schedule.train_wiring import advantage_settings
from turnout.schedule.updates import Around, Updates


class Evaluations(Protocol):
    """Evaluations of the loop that an update waits for."""

    async def run_if_due(self, steps_done: int, last: bool) -> None: ...

    async def settled(self) -> None: ...

    async def caught_up(self, steps_done: int) -> None: ...

    def renewed(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class World:
    """What a control plane works with: the parts that touch the outside."""

    clock: Clock
    events: EventSink
    source: PromptSource
    generator: Generator
    trainer: Trainer
    weights: WeightUpdates
    evaluations: Evaluations
    checkpoints: Any
    reporter: Reporter
    phases: Phases
    made: Callable[[StepBatch], None] = lambda _: None  # told of each batch before it is trained


class ControlPlane:
    """One run's; `run` may be called once. `steps` None: until the data ends."""

    def __init__(self, config: RunConfig, world: World, book: GroupBook, steps: int | None) -> None:
        self._config, self._world, self._steps = config, world, steps
        schedule = schedule_of(config)
        lead = None if config.partial_rollout else schedule.lead
        self._gate = gate = LagGate(wiring.staleness_policy(config), lead)
        admission = wiring.admission(config)
        ports = Ports(
            world.source,
            book,
            world.generator,
            SeedTree(config.seed),
            world.clock,
            self._failure,
            self._updating,
            admission,
        )
        self.book = book
        self.pool = RolloutPool(ports, wiring.pool_plan(config, steps))
        self._watch: PressureWatch | None = None
        if admission is not None and config.kv_high_watermark is not None:
            fleet = world.weights.updater.fleet
            self._watch = PressureWatch(admission, fleet.engines.values, self.pool, world.clock)
        around = Around(self.pool, world.evaluations, gate, world.phases, world.clock)
        only = config.debug_rollout_only
        self.updates = (StandingVersion if only else Updates)(world.weights, schedule, around)
        freshness = Freshness(gate, self.updates.settled, self._failure, self.updates.retry)
        made = SampledBatches if only else BatchMaker
        batches = made(self.pool, book, freshness, advantage_settings(config), world.made)
        self._parts = Parts(
            batches,
            world.trainer,
            self.updates,
            world.checkpoints,
            world.evaluations,
            world.reporter,
            gate,
            world.phases,
        )

    def restore(self, returning: Returning, first: int) -> None:
        """Before `run`, in a run that goes on from a checkpoint with `first` train steps."""
        self.pool.restore(returning, first)
        self._gate.restore(returning.versions.values())
        self._world.source.seek(self.book.ledger.next_ordinal())

    async def run(self, base: WeightVersion, first: int = 0, restored: bool = False) -> int:
        """The loop from step `first`, whose weights every engine has attested as `base`, or those that the trainer
        restored. Returns the steps done; nothing of it is under way after that, however it ended. Raises RunStopped
        where `stop` was called, after a checkpoint of the steps done."""
        if restored:
            await self.updates.restore(first)
        else:
            self.updates.adopt(base, first)
        self.pool.release(first, self.updates.current.root)
        watch = None if self._watch is None else asyncio.ensure_future(self._watch.run())
        try:
            return await run_loop(self._parts, first, self._steps)
        except RunStopped:
            await self.updates.settled()
            await self._world.evaluations.caught_up(self.pool.step)
            await self.pool.close()
            await self._world.checkpoints.save(self.pool.step)
            raise
        finally:
            if watch is not None:
                await _stopped(watch)
            await self.updates.close()
            await self._world.evaluations.close()
            await self.pool.close()

    def stop(self) -> None:
        """No prompt is admitted any more; `run` ends when the step under way is done."""
        self.pool.stop()

    def _failure(self) -> TurnoutError | None:
        return self.updates.failure

    def _updating(self) -> bool:
        return self.updates.under_way


async def _stopped(task: asyncio.Task[None]) -> None:
    """Ends what goes on beside the loop; raises what had ended it before."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
