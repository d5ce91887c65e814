"""One life of a controller: the production's parts on the ports of a virtual world, as turnout.schedule.incarnation
wires them for real processes.

Owns what dies with the process. Promises: nothing between the ports is the simulator's own: record, resume, ledger,
store, updater, control plane and checkpoints are the production's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from turnout.config.rundir import RunPaths
from turnout.core.errors import EngineDead, TrainError, TurnoutError
from turnout.core.events import (
    EngineLost,
    EngineReady,
    EvalDone,
    Event,
    RunEnded,
    RunStarted,
    StepTrained,
    VersionCommitted,
    VersionPublished,
)
from turnout.core.rng import SeedTree
from turnout.core.types import RolloutGroup, TrainBatch
from turnout.core.version import WeightVersion
from turnout.observe.audit_log import as_one, of_kind
from turnout.rollout.book import GroupBook
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_owner import Claim
from turnout.rollout.ledger_schema import Database
from turnout.rollout.prompts import Fingerprint
from turnout.rollout.rewards import RewardRunner
from turnout.rollout.sampler import Routes, Sampler
from turnout.rollout.source import PromptSource
from turnout.rollout.staleness import Fate
from turnout.rollout.untold import untold
from turnout.rollout.worker import Generator
from turnout.schedule import wiring
from turnout.schedule.checkpoint_contents import About, Written, contents_of
from turnout.schedule.checkpoints import RunCheckpoints
from turnout.schedule.control import ControlPlane
from turnout.schedule.control import World as Ports
from turnout.schedule.eval_sets import make_evaluations
from turnout.schedule.evaluations import EvalWorld
from turnout.schedule.loop import StepBatch
from turnout.schedule.parts import TrainerThread, WeightUpdates
from turnout.schedule.phases import Phases
from turnout.schedule.publications import Publications
from turnout.schedule.resume import Beginning, find_beginning, load_weights
from turnout.schedule.resume_ledger import open_ledger, returning_groups
from turnout.schedule.run_record import open_record
from turnout.serving.weights_client import OnUpdate
from turnout.sim.disk import VirtualDisk
from turnout.sim.engine import VirtualEngine
from turnout.sim.loop import LIFE, Killed, Life
from turnout.sim.network import VirtualClient, Wire
from turnout.sim.plan import PROMPTS
from turnout.sim.record import LedgerGroup
from turnout.sim.rewards import Decoder, make_reward
from turnout.sim.trainer import VirtualTrainer
from turnout.sim.transport import VirtualTransport
from turnout.transfer.updater import Updater
from turnout.weights.quorum import lacking
from turnout.weights.store import WeightStore

if TYPE_CHECKING:
    from turnout.sim.world import World

T = TypeVar("T")
ATTEST_S, JOIN_S = 60.0, 120.0
FINGERPRINT = Fingerprint(0, PROMPTS, "virtual", {})


class VirtualTrainerThread(TrainerThread):
    """The production's trainer thread without the thread: its work takes virtual time instead."""

    def __init__(self, world: World, trainer: VirtualTrainer) -> None:
        super().__init__(world.clock, world.plan.config.train_step_timeout_s)
        self._world, self.trainer = world, trainer
        self._backend = trainer

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        """One step; raises TrainError where the trainer dies under it."""
        low, high = self._world.plan.train_s
        seconds, dies = (
            self._world.faults.uniform(low, high),
            self._world.faults.hit("trainer_crash", 0.01, "trainer"),
        )
        await self._clock.within(self._deadline_s, "a train step", self._clock.sleep(seconds))
        if dies:
            raise TrainError("the trainer's process died")
        report = self.trainer.train(batch)
        self._world.note("trainer", f"step {batch.step} made {self.trainer.root[:16]}")
        return report.metrics()

    async def _run(self, what: str, work: Callable[[], T]) -> T:
        await self._clock.within(self._deadline_s, what, self._clock.sleep(0.05))
        return work()


class VirtualLedger(Ledger):
    """The production's ledger, whose process can be killed just before or just after a commit. A kill never comes
    within one: its log would be two fifths of what a transaction costs, and no resume would miss it."""

    threaded = False
    world: World | None = None
    life: Life | None = None

    def __init__(self, database: Database, claim: Claim) -> None:
        for unlogged in (
            "locking_mode = EXCLUSIVE",
            "journal_mode = MEMORY",
            "synchronous = OFF",
            "cache_spill = OFF",
        ):
            database.connection.execute(f"PRAGMA {unlogged}")
        super().__init__(replace(database, exclusive=True), claim)

    def _commit(self) -> None:
        self._may_die()
        super()._commit()
        self._may_die()

    def _may_die(self) -> None:
        if self.world is None or self.life is None:
            return
        if self.world.faults.hit("torn_write", 0.0001, "ledger"):
            self.life.kill()
            raise Killed("killed at a commit of the ledger")

    def disconnect(self) -> None:
        """As the end of a process does: the lease stays."""
        self._connection.close()

    def store(self, group: RolloutGroup) -> Any:
        if self.world is not None and self.life is not None and self.life.alive:
            self.world.record.stored[group.group_id].append(group)
        return super().store(group)


class Sink:
    """The event log of one life. A kill can come just before an event is written. `committed` are the versions that
    were told as committed: train steps done by root."""

    def __init__(self, world: World, life: Life, number: int) -> None:
        self._world, self._life, self._number = world, life, number
        self._published = {"": (world.record.base_root, 0)}
        self.committed: dict[str, int] = {}
        self.current_step = 0

    def sync(self) -> None:
        """Nothing that was written is lost by a kill."""

    def emit(self, event: Event) -> None:
        if not self._life.alive:
            return
        if self._world.faults.hit("torn_write", 0.0002, "events"):
            self._life.kill()
            raise Killed("killed at an event")
        self._world.told(event, self._number)
        if isinstance(event, VersionPublished):
            self._published[event.version] = event.root, event.step
        elif isinstance(event, VersionCommitted):
            root, step = self._published.get(event.version, self._published[""])
            self.committed[root], self.current_step = step, step


class Reporter:
    """The loop's reporter: it tells of each step, as the production's does."""

    def __init__(self, events: Sink) -> None:
        self._events = events

    def step(self, batch: StepBatch, metrics: dict[str, float], version: WeightVersion) -> None:
        del version
        counts = len(batch.groups), int(metrics["tokens"]), int(metrics["optimizer_steps"])
        lags = [[lag, tokens] for lag, tokens in sorted(batch.lags.items())]
        self._events.emit(StepTrained(batch.step, *counts, lags, batch.masked))


class Controller:
    """See the module. `run` returns when the run has finished."""

    def __init__(self, world: World, life: Life, number: int) -> None:
        self._world, self._life, self._number = world, life, number
        self._rng = random.Random(f"ids/{world.seed}/{number}")
        self._death: asyncio.Future[EngineDead] | None = None
        self._updater: Updater | None = None
        self._joins: dict[asyncio.Task[Any], None] = {}
        wire = Wire(world.faults, life, world.later, world.sent, world.kill_engine)
        self._clients = {e.name: VirtualClient(e, world.clock, wire) for e in world.engines}
        self._ledger: VirtualLedger | None = None
        self._plane: ControlPlane | None = None
        self._thread: VirtualTrainerThread | None = None
        self._events = Sink(world, life, number)
        self._phases = Phases(world.clock)

    # what the world asks

    @property
    def current_step(self) -> int:
        """Train steps done with the version that was committed last."""
        return self._events.current_step

    @property
    def trained_root(self) -> str:
        assert self._thread is not None, "the trainer has started"
        return self._thread.trainer.root

    def committed_step(self, root: str) -> int | None:
        """Train steps done of weights that this life has committed, None for others: by what it told."""
        return self._events.committed.get(root)

    def engine_died(self, engine: VirtualEngine) -> None:
        """Its watcher saw it."""
        client, config = self._clients[engine.name], self._world.plan.config
        if self._updater is None or self._death is None:
            return
        fault = EngineDead(engine.name, self._phases.current, client.version, "its process ended")
        alive = [one.name for one in self._world.engines if one.alive]
        fleet = self._updater.fleet
        if not config.use_fault_tolerance and lacking(alive, config.engines_needed, fleet.sides):
            if not self._death.done():
                self._death.set_result(fault)
            return
        self._events.emit(EngineLost(engine.name, fault.phase, fault.last_version, fault.reason))
        self._updater.lost(engine.name, fault.reason)

    def engine_started(self, engine: VirtualEngine) -> None:
        """It is taken in."""
        if self._updater is None or self._updater.current is None:
            return
        token = LIFE.set(self._life)
        try:
            join = asyncio.ensure_future(self._updater.join(self._clients[engine.name], JOIN_S))
        finally:
            LIFE.reset(token)
        self._joins[join] = None
        join.add_done_callback(self._joined)

    def _joined(self, join: asyncio.Task[bool]) -> None:
        self._joins.pop(join, None)
        if not join.cancelled() and isinstance(fault := join.exception(), TurnoutError):
            self._world.note(self._life.name, f"an engine could not join: {fault}")

    def close_ledger(self) -> list[LedgerGroup]:
        """The process has ended: all rows, as they stand."""
        if self._ledger is None:
            return []
        rows = [LedgerGroup(r.group_id, r.ordinal, r.attempt, r.state, r.cause) for r in self._ledger.rows()]
        self._ledger.disconnect()
        return rows

    # the run

    async def run(self) -> None:
        """As Session.run; raises what ended it early."""
        world, config = self._world, self._world.plan.config
        files = VirtualDisk(world.root, world.faults, world.loop.time, self._life.kill)
        resumed = (world.root / "run.json").exists()
        paths = RunPaths(world.root, world.root / "weights", world.root / "checkpoints", resumed)
        record = open_record(paths, config, (FINGERPRINT, None), files, self._id)
        begin = find_beginning(paths, record.run_id, files)
        claim = Claim(world.clock, "virtual", self._number, None, lambda _: False)
        self._ledger = ledger = open_ledger(paths, record.run_id, begin, claim, VirtualLedger)
        ledger.world, ledger.life = world, self._life
        book = GroupBook(self._events, ledger)
        names = record.run_id, begin.incarnation, config.seed, config.schedule
        lag, interval = config.lag_bound, config.update_weights_interval
        self._events.emit(RunStarted(*names, lag, config.trust_label, begin.resumed_at, interval))
        if paths.resumed:
            for event in untold(ledger, [one.event for one in world.record.told]):
                self._events.emit(event)
        status, reason = "failed", ""
        try:
            await self._train(paths, files, begin, record.run_id, book)
            status = "finished"
        except TurnoutError as fault:
            reason = str(fault)
            raise
        finally:
            with book.transaction():
                for group in list(book.open_groups) if status == "finished" else ():
                    book.drop(group, "the run ended")
            self._events.emit(RunEnded(status, reason, []))

    async def _train(
        self, paths: RunPaths, files: VirtualDisk, begin: Beginning, run_id: str, book: GroupBook
    ) -> None:
        world, config, clock = self._world, self._world.plan.config, self._world.clock
        thread = self._thread = VirtualTrainerThread(world, VirtualTrainer(world.record.history))
        self._death = asyncio.get_running_loop().create_future()
        alive = [engine for engine in world.engines if engine.alive]
        for engine in alive:
            self._events.emit(EngineReady(engine.name, "virtual", None, "none"))
        store = WeightStore(paths.weights, files, paths.root, 1 << 20, self._id)
        base = WeightVersion(begin.incarnation, 0, world.record.base_root)
        await asyncio.to_thread(store.open, run_id, begin.incarnation, base.root, begin.start)
        published = Publications(self._events, book.ledger)
        published.expect(base, 0)
        transport = VirtualTransport(store, clock, world.faults, OnUpdate(config.weight_update_policy))
        transport.detached = world.plan.detached
        clients = [self._clients[engine.name] for engine in alive]
        updater = self._updater = Updater(transport, clients, published, clock, wiring.update_policy(config))
        rewards = RewardRunner(make_reward(clock, world.faults), clock, config.reward_timeout_s)

        def samples(routes: Routes) -> Sampler:
            return Sampler(routes, Decoder(), clock, self._id)

        generator = Generator(samples(wiring.routes(config, updater.fleet)), rewards, self._phases.waits)
        around = EvalWorld(store, self._events, self._phases, clock, self._id)
        evals = make_evaluations(world.plan.evals, updater, rewards, samples, around)
        log = as_one([one.event for one in world.record.told])  # as the production reads its event log
        evals.restore(of_kind(log, EvalDone))
        source = PromptSource(list(world.record.prompts), SeedTree(config.seed), config.rollout_shuffle, None)
        told: Any = self._events
        reporter: Any = Reporter(told)
        about = About(run_id, begin.incarnation, "virtual", source)
        contents = contents_of(about, Written(told, told, book, reporter, ()), store, updater)
        plan = wiring.save_plan(config, paths.checkpoints, paths.root)
        checkpoints = RunCheckpoints(plan, files, thread, contents)
        weights = WeightUpdates(
            updater,
            thread,
            wiring.update_patience(config, lambda: [e.name for e in world.engines if e.alive]),
        )
        ports = Ports(
            clock, told, source, generator, thread, weights, evals, checkpoints, reporter, self._phases
        )
        plane = self._plane = ControlPlane(config, ports, book, config.num_rollout)

        async def loop() -> None:
            await updater.adopt(base, ATTEST_S)
            await load_weights(begin, thread)
            if paths.resumed:
                checkpoints.saved = begin.step
                policy = Fate(config.on_resume)
                interval = config.update_weights_interval
                plane.restore(returning_groups(book, source.prompt, begin.step, interval, policy), begin.step)
            await plane.run(base, begin.step, begin.checkpoint is not None)

        await self._supervised(loop())

    def stop(self) -> bool:
        """As on SIGTERM; whether it was running."""
        if self._plane is not None:
            self._plane.stop()
        return self._plane is not None

    async def _supervised(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until it ends, or until an engine dies that the run cannot do without."""
        assert self._death is not None
        main = asyncio.ensure_future(work)
        try:
            await asyncio.wait({main, self._death}, return_when=asyncio.FIRST_COMPLETED)
            if not main.done():
                raise self._death.result()
            main.result()
        finally:
            tasks = [main, *self._joins]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _id(self) -> str:
        return f"{self._rng.getrandbits(128):032x}"
