"""Wires one run: folder, data, engines, trainer, weights, loop; and takes it all down again.

Order: everything that can be refused is checked before anything is started; engines and trainer start side by
side; the version that the engines loaded is attested before the first prompt is taken. Promises: an engine that
dies ends the run with its id, the phase and its last version; after the run, however it ended, no process of it
is left, and events.jsonl, metrics.jsonl and summary.json tell what happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from turnout.config.run_config import RunConfig
from turnout.config.rundir import RunPaths
from turnout.core.errors import EngineDead, LedgerError, OwnerLost, RunStopped, TurnoutError
from turnout.core.events import EngineLost, RunEnded, RunStarted
from turnout.core.ports import Clock, Store
from turnout.core.version import WeightVersion
from turnout.observe.eventlog import EventLog
from turnout.observe.metrics import MetricsLog, read_metrics
from turnout.observe.panel import Panel
from turnout.rollout.book import GroupBook
from turnout.rollout.draft import Pace
from turnout.rollout.ledger_owner import Claim
from turnout.rollout.sampler import Routes, Sampler
from turnout.rollout.staleness import Fate
from turnout.rollout.untold import untold
from turnout.rollout.worker import Generator
from turnout.schedule import wiring
from turnout.schedule.checkpoint_contents import About, Written, contents_of
from turnout.schedule.checkpoints import RunCheckpoints
from turnout.schedule.control import ControlPlane, World
from turnout.schedule.eval_sets import make_evaluations
from turnout.schedule.evaluations import EvalRuns, EvalWorld
from turnout.schedule.inputs import RunInputs
from turnout.schedule.limits import RunLimits
from turnout.schedule.parts import TrainerThread, WeightUpdates
from turnout.schedule.phases import Phases
from turnout.schedule.publications import Publications
from turnout.schedule.reporter import Curves, RunReporter, Sources
from turnout.schedule.resume import (
    earlier_events,
    earlier_points,
    find_beginning,
    load_weights,
    standing_versions,
)
from turnout.schedule.resume_ledger import open_ledger, returning_groups
from turnout.schedule.run_engines import RunEngines, Watch
from turnout.schedule.run_record import RunRecord
from turnout.schedule.score import ATTEST_DEADLINE_S, score_kept
from turnout.schedule.weight_plane import (
    Origin,
    check_engines,
    final_checkpoint,
    make_store,
    open_plane,
)
from turnout.serving.launcher import Engine, HealthProbe, launch
from turnout.serving.sglang_launcher import launch_sglang
from turnout.transfer.updater import Updater
from turnout.weights.stock_checksums import stock_checksums

log = logging.getLogger(__name__)
TICK_S = 0.5
SUPERSEDED = "superseded"  # by a later incarnation: nothing more is written


@dataclass
class RunOutcome:
    """What a run came to, for the summary; filled as it goes."""

    status: str = "failed"
    reason: str = ""
    seconds_total: float = 0.0
    seconds_training: float = 0.0
    steps_done: int = 0
    curves: Curves = field(default_factory=Curves)
    evals: EvalRuns | None = None
    final_folder: Path | None = None


class Session:
    """One incarnation of a run from start to end. `run` may be called once."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, record: RunRecord, clock: Clock, files: Store
    ) -> None:
        """Raises ConfigError where the run should go on, but none of its checkpoints is complete."""
        self.config, self.paths, self._clock, self._files = config, paths, clock, files
        self._record = record
        self._beginning = find_beginning(paths, record.run_id, files)
        self.outcome = RunOutcome()
        self._phases = Phases(clock)
        self.limits = RunLimits(config, paths.root, clock, self._ends)

    def _ends(self, status: str, reason: str) -> None:
        self.outcome.status, self.outcome.reason = status, reason

    async def run(self, inputs: RunInputs, panel: Panel) -> RunOutcome:
        """Runs to the end; raises the TurnoutError that ended it early, after everything was taken down: RunStopped
        where `limits` cut it off."""
        started, paths, begin = self._clock.now(), self.paths, self._beginning
        async with AsyncExitStack() as stack:
            claim = Claim.of_this_process(self._clock, begin.incarnation)
            ledger = stack.enter_context(open_ledger(paths, self._record.run_id, begin, claim))
            opening = self._opening()
            told = earlier_events(paths.events)
            points = earlier_points(told, opening)
            events = stack.enter_context(EventLog(paths.events, self._clock, take_over=True))
            self._engines = RunEngines(partial(self._launch, inputs.model), events, self._clock)
            board = paths.tensorboard if self.config.tensorboard else None
            metrics = stack.enter_context(MetricsLog(paths.metrics, board, begin.resumed_at))
            stack.enter_context(panel)
            for event in (opening, *untold(ledger, told)):
                events.emit(event)
            reporter = RunReporter(events, metrics, panel, self._phases, self._clock)
            self.outcome.curves = reporter.curves
            written = Written(events, metrics, GroupBook(events, ledger), reporter, points)
            try:
                await self.limits.within(self._train(inputs, written), ledger)
                self.outcome.status, self.outcome.reason = "finished", ""
            except RunStopped:
                raise
            except TurnoutError as fault:
                self.outcome.status, self.outcome.reason = "failed", str(fault)
                if isinstance(fault, EngineDead):
                    events.emit(EngineLost(fault.engine_id, fault.phase, fault.last_version, fault.reason))
                raise
            except asyncio.CancelledError:
                self.outcome.status, self.outcome.reason = "interrupted", "interrupted"
                raise
            finally:
                await asyncio.shield(self._take_down(events, written.book))
                self.outcome.seconds_total = self._clock.now() - started
        return self.outcome

    def _opening(self) -> RunStarted:
        config, begin = self.config, self._beginning
        return RunStarted(
            self._record.run_id,
            begin.incarnation,
            config.seed,
            config.schedule,
            config.lag_bound,
            config.trust_label,
            begin.resumed_at,
            config.update_weights_interval,
        )

    async def _train(self, inputs: RunInputs, written: Written) -> None:
        config, events, book, reporter = self.config, written.events, written.book, written.reporter
        trainer = TrainerThread(self._clock, config.train_step_timeout_s)
        try:
            await self._start(inputs, trainer)
            clients = self._engines.clients
            store = make_store(config, self.paths.weights, self._files, self._clock, inputs.model)
            await check_engines(config, clients)
            incarnation, data = self._beginning.incarnation, inputs.fingerprints[0]
            origin = Origin(trainer, inputs.model, incarnation, self._beginning.start)
            transport, base = await open_plane(config, store, self._clock, origin, self._record.run_id)
            published = Publications(events, book.ledger)
            published.expect(base, 0)
            updater = Updater(transport, clients, published, self._clock, wiring.update_policy(config))
            weights = WeightUpdates(updater, trainer.export, config.update_weight_timeout_s)
            rewards = wiring.reward_runner(config, self._clock)
            generator = Generator(self._sampler(updater, inputs), rewards)
            around = EvalWorld(store.keep, events, self._phases, self._clock)
            evals = make_evaluations(inputs.evals, updater, rewards, inputs.tokenizer, around)
            evals.restore(written.points, standing_versions(book.ledger.versions(), self._beginning.step))
            self.outcome.evals = evals
            save_plan = wiring.save_plan(config, self.paths.checkpoints, inputs.model)
            about = About(self._record.run_id, incarnation, data.digest, inputs.source)
            contents = contents_of(about, written, store, updater)
            checkpoints = RunCheckpoints(save_plan, self._files, trainer, contents)
            world = World(
                self._clock,
                events,
                inputs.source,
                generator,
                trainer,
                weights,
                evals,
                checkpoints,
                reporter,
                self._phases,
            )
            plane = ControlPlane(config, world, book, inputs.steps)
            if self.paths.resumed:
                reporter.restore(read_metrics(self.paths.metrics), evals.rows())
                self.outcome.seconds_training = sum(reporter.curves.seconds)
                checkpoints.saved = self._beginning.step
            sources = Sources(self._engines.views, evals.curve, evals.rows, lambda: published.last)
            reporter.open(config.run_name or "run", inputs.steps, sources)

            def lost(fault: EngineDead) -> None:
                events.emit(EngineLost(fault.engine_id, fault.phase, fault.last_version, fault.reason))
                reporter.say(f"{fault}; the run goes on (--min-engines {config.min_engines})")
                updater.lost(fault.engine_id, fault.reason)

            stopper = asyncio.ensure_future(self._stopped(plane))
            try:
                await self._supervised(self._loop(plane, world, updater, base), reporter, lost)
            finally:
                stopper.cancel()
            if evals.kept:  # on an engine of their own, when those of the run are gone
                await self._engines.stop()
                await score_kept(config, evals, self.paths.weights, inputs.model, self._files)
                reporter.tick()  # writes the points
            self.outcome.final_folder = final_checkpoint(self.paths.weights, self._current(updater))
        finally:
            trainer.close()

    async def _loop(self, plane: ControlPlane, world: World, updater: Updater, base: WeightVersion) -> None:
        """Adopts the base version, then runs THE loop."""
        trainer, reporter, evals = world.trainer, world.reporter, world.evaluations
        assert isinstance(trainer, TrainerThread) and isinstance(reporter, RunReporter)
        assert isinstance(evals, EvalRuns)
        expected = await self._expected(trainer, updater)
        await updater.adopt(base, ATTEST_DEADLINE_S, expected)
        first = self._beginning.step
        await load_weights(self._beginning, trainer)
        if self.paths.resumed:
            interval, policy = self.config.update_weights_interval, Fate(self.config.on_resume)
            plane.restore(returning_groups(plane.book, world.source.prompt, first, interval, policy), first)
        reporter.step_begins()
        started = self._clock.now()
        try:
            restored = self._beginning.checkpoint is not None
            self.outcome.steps_done = await plane.run(base, first, restored)
        finally:
            self.outcome.seconds_training += self._clock.now() - started - evals.seconds

    async def _stopped(self, plane: ControlPlane) -> None:
        await self.limits.stopped()
        plane.stop()

    @staticmethod
    async def _expected(trainer: TrainerThread, updater: Updater) -> dict[str, str] | None:
        """What stock engines must report of the base weights; None where there are none."""
        stock = updater.policy.stock
        if stock is None:
            return None
        what = "the base weights to be digested as SGLang does"
        return await trainer.call(what, lambda t: stock_checksums(t.export(), stock))

    async def _launch(self, model: Path, index: int) -> Engine:
        config, folders = self.config, (self.paths.engines, self.paths.weights)
        if config.engine == "sglang":
            return await launch_sglang(wiring.sglang_launch(config, index, model, folders[0]), self._clock)
        return await launch(wiring.engine_launch(config, index, model, folders), self._clock)

    async def _start(self, inputs: RunInputs, trainer: TrainerThread) -> None:
        """Engines and trainer side by side; raises the first failure, the rest is taken down by `run`."""
        config = self.config
        self.paths.weights.mkdir(parents=True, exist_ok=True)

        settings = wiring.trainer_settings(config, inputs.model, inputs.steps)
        jobs = [trainer.start(settings), *map(self._engines.start, range(config.rollout_num_engines))]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _sampler(self, updater: Updater, inputs: RunInputs) -> Sampler:
        fleet = updater.fleet
        room = wiring.request_room(self.config, fleet.engines)
        routes = Routes(fleet.routable, fleet.standing, fleet.changed, room)
        pace = Pace(self.config.token_journal_interval)
        return Sampler(routes, inputs.tokenizer, self._clock, pace=pace)

    async def _supervised(
        self, work: Coroutine[Any, Any, None], reporter: RunReporter, lost: Callable[[EngineDead], None]
    ) -> None:
        """Runs `work` beside a watch on every engine. A death is told to `lost`; with fewer engines left than an
        update needs (--min-engines) it ends the run."""
        config = self.config
        probe = HealthProbe(config.rollout_health_check_interval, config.rollout_health_check_timeout)
        needed = config.rollout_num_engines if config.min_engines is None else config.min_engines
        ticker = asyncio.ensure_future(self._tick(reporter))
        try:
            await self._engines.during(work, Watch(probe, needed, self._phase, lost))
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
            reporter.tick()  # the last evaluation came after the last step

    def _phase(self) -> str:
        return self._phases.current

    async def _tick(self, reporter: RunReporter) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            reporter.tick()

    async def _take_down(self, events: EventLog, book: GroupBook) -> None:
        """What is open when a run has finished is dropped; after any other end a resume goes on with it."""
        leftovers = await self._engines.stop()
        try:
            with book.transaction():
                for group in list(book.open_groups) if self.outcome.status == "finished" else ():
                    book.drop(group, "the run ended")
        except OwnerLost:
            self.outcome.status = SUPERSEDED
        except LedgerError as fault:
            self.outcome.status, self.outcome.reason = "failed", self.outcome.reason or str(fault)
            raise
        finally:
            if self.outcome.status != SUPERSEDED:
                events.emit(RunEnded(self.outcome.status, self.outcome.reason, leftovers))

    @staticmethod
    def _current(updater: Updater) -> WeightVersion:
        assert updater.current is not None, "the base version is adopted before anything asks"
        return updater.current
