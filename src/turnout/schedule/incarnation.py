"""One incarnation of a run at work: engines, trainer, weights and the control plane, wired and set going.

Order: engines and trainer start side by side; the version that the engines loaded is attested before the first
prompt is taken; a checkpoint's weights are loaded and made current before that as well. Promises: an engine that
dies is told, and ends the run where it can't do without; the trainer's thread is gone afterwards. Engines belong to
the session, which stops them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from turnout.core.errors import (
    DeadlineExceeded,
    EngineDead,
)
from turnout.core.events import EngineLost
from turnout.core.ports import EventSink
from turnout.core.version import WeightVersion
from turnout.observe.metrics import read_metrics
from turnout.placement.tasks import first
from turnout.rollout.demonstrations import Demonstrations
from turnout.rollout.draft import Pace
from turnout.rollout.rewards import RewardRunner
from turnout.rollout.sampler import Routes, Sampler
from turnout.rollout.staleness import Fate
from turnout.rollout.worker import Generator, Samples
from turnout.schedule import wiring
from turnout.schedule.checkpoint_contents import About, Written, contents_of
from turnout.schedule.checkpoints import RunCheckpoints
from turnout.schedule.colocated import Colocated, Sharing, Switches
from turnout.schedule.control import ControlPlane, World
from turnout.schedule.engine_changes import EngineChanges, Limits
from turnout.schedule.engine_lives import Around, at_once
from turnout.schedule.engine_requests import AddressFile, EngineRequests, beside
from turnout.schedule.engine_starts import Run
from turnout.schedule.eval_sets import make_evaluations
from turnout.schedule.evaluations import EvalRuns, EvalWorld
from turnout.schedule.external import FILE, beginning_roster
from turnout.schedule.inputs import RunInputs
from turnout.schedule.parts import TrainerThread, WeightUpdates
from turnout.schedule.phases import Phases
from turnout.schedule.publications import Publications
from turnout.schedule.reporter import Curves, RunReporter, Sources
from turnout.schedule.resume import (
    load_weights,
    standing_versions,
)
from turnout.schedule.resume_ledger import returning_groups
from turnout.schedule.roster import roster
from turnout.schedule.run_engines import RunEngines
from turnout.schedule.run_models import RunModels
from turnout.schedule.save_thread import SaveThread
from turnout.schedule.saved_batches import SavedBatches, SavedPlan
from turnout.schedule.schedule import schedule_of
from turnout.schedule.score import ATTEST_DEADLINE_S, score_kept
from turnout.schedule.stall_watch import Parties
from turnout.schedule.train_wiring import rank_plan, trainer_settings
from turnout.schedule.weight_plane import (
    Origin,
    check_engines,
    final_checkpoint,
    make_store,
    open_plane,
)
from turnout.serving.client import EngineClient, Traffic
from turnout.serving.left_behind import end_left_behind
from turnout.train.untrained import UntrainedBackend
from turnout.transfer.transport import Transport
from turnout.transfer.turns import TakingTurns
from turnout.transfer.updater import Updater
from turnout.weights.store import WeightStore

TICK_S = 0.5


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
    weights_root: str = ""  # of a run without versions
    traffic: Traffic = field(default_factory=Traffic)


class Incarnation:
    """See the module. `stop` returns when the run should stop early, in good order; `train` fills `outcome` as it
    goes."""

    def __init__(
        self,
        run: Run,
        engines: RunEngines,
        phases: Phases,
        outcome: RunOutcome,
        stop: Callable[[], Awaitable[None]],
    ) -> None:
        self._run, self._engines, self._phases, self.outcome, self._stop = run, engines, phases, outcome, stop
        self.config, self.paths, self._beginning = run.config, run.paths, run.beginning
        self._clock, self._files = run.clock, run.files
        self._turns: Colocated | None = None
        self.parties = Parties(phases, lambda: engines.updated, engines.facts)

    async def train(self, inputs: RunInputs, written: Written) -> None:
        """Starts engines and trainer, and trains to the end of the run; engines may be left running."""
        config, events, book, reporter = self.config, written.events, written.book, written.reporter
        trainer = self.parties.trainer = TrainerThread(
            self._clock, config.train_step_timeout_s, rank_plan(config, self.paths), self._run.cluster
        )
        try:
            await self._start(inputs, trainer, events)
            await check_engines(config, self._engines.updated)
            store = make_store(config, self.paths.weights, self._files, self._clock, inputs.model)
            begin = self._beginning
            origin = Origin(trainer, inputs.model, begin.incarnation, begin.start)
            transport, base = await self._opened(store, origin)
            published = Publications(events, book.ledger)
            published.expect(base, 0)
            clients, policy = self._engines.updated, wiring.update_policy(config)
            updater = self._updater = Updater(transport, clients, published, self._clock, policy)
            weights = WeightUpdates(updater, trainer, wiring.update_patience(config, self._engines.up))
            models = self._models = await RunModels(
                config, self._engines, transport, events, self._clock
            ).begun()
            rewards = wiring.reward_runner(config, self._clock, models.models)
            sampler = await self._sampler(updater, inputs)
            generator = Generator(self._trained_on(inputs, sampler, updater), rewards, self._phases.waits)
            around = EvalWorld(store, events, self._phases, self._clock, dedicated=models.dedicated)
            self.outcome.evals = evals = self._evaluations(inputs, updater, rewards, around)
            evals.restore(written.points, standing_versions(book.ledger.versions(), begin.step))
            checkpoints = self._checkpoints(inputs, trainer, (written, store, updater))
            saved = SavedBatches(
                self._learner(trainer), SavedPlan(config, self.paths.root, inputs.steps), self._files
            )
            parts = generator, models.informed(saved), weights, evals, checkpoints, reporter, self._phases
            world = World(self._clock, events, inputs.source, *parts, saved.taken)
            plane = ControlPlane(config, world, book, inputs.steps)
            self.parties.pool = plane.pool
            if self.paths.resumed:
                reporter.restore(read_metrics(self.paths.metrics), evals.rows())
                self.outcome.seconds_training = sum(reporter.curves.seconds)
                checkpoints.saved = begin.step
            shown = (
                *(evals.curve, evals.rows, lambda: published.last, sampler.later_turns, self.paths.shown),
                lambda pool=plane.pool: pool.held,
            )
            reporter.open(config.run_name or "run", inputs.steps, Sources(self._engines.views, *shown))
            stopper = asyncio.ensure_future(self._stopped(plane))
            try:
                work = models.stay(self._loop(plane, world, updater, (base, trainer)))
                await self._supervised(work, reporter, self._around(updater, models, written))
            finally:
                stopper.cancel()
                await checkpoints.close()
            if evals.kept:  # on an engine of their own, when those of the run are gone
                await self._engines.stop_updated()
                await score_kept(config, evals, self.paths.weights, inputs.model, self._files)
                reporter.tick()  # writes the points
            self.outcome.final_folder = final_checkpoint(self.paths.weights, self._current(updater))
        finally:
            await trainer.close()

    async def _loop(
        self, plane: ControlPlane, world: World, updater: Updater, begin: tuple[WeightVersion, TrainerThread]
    ) -> None:
        """Adopts the base version, then runs THE loop."""
        (base, trainer), reporter, evals = begin, world.reporter, world.evaluations
        assert isinstance(reporter, RunReporter) and isinstance(evals, EvalRuns)
        with self._phases("start"):
            expected = await updater.checksums(trainer.export, self.config.train_step_timeout_s)
            kept = self._engines.kept
            if updater.following is not None and self._beginning.checkpoint is not None:
                kept = frozenset(updater.fleet.engines)  # they hold what their followers brought last
            await updater.adopt(base, ATTEST_DEADLINE_S, expected, kept=kept)
            await load_weights(self._beginning, trainer)
        first = self._beginning.step
        if self.paths.resumed:
            interval, policy = self.config.update_weights_interval, Fate(self.config.on_resume)
            plane.restore(returning_groups(plane.book, world.source.prompt, first, interval, policy), first)
        reporter.step_begins()
        started = self._clock.now()
        try:
            restored = self._beginning.checkpoint is not None
            async with beside(self._changes(updater, reporter), reporter.say):
                work = plane.run(base, first, restored)
                if updater.following is not None:
                    work = updater.following.beside(work)
                self.outcome.steps_done = await work
        finally:
            self.outcome.seconds_training += self._clock.now() - started - evals.seconds
            await updater.transport.close()  # engines of somebody else go on, and are in a few groups at most

    def _changes(self, updater: Updater, reporter: RunReporter) -> dict[str, Coroutine[Any, Any, None]]:
        """What changes the engines while the loop runs: commands, and the file of addresses."""
        config, clock = self.config, self._clock
        limits = Limits(config.engines_needed, config.update_weight_timeout_s)
        changes = EngineChanges(self._engines, updater, updater.events, limits)
        requests = EngineRequests(changes, self.paths.root, clock, self._files)
        work: dict[str, Coroutine[Any, Any, None]] = {"`turnout engines`": requests.run()}
        if config.rollout_external_engine_file is not None:
            kept = {plan.engine_id for plan in roster(config)}
            file = Path(config.rollout_external_engine_file)
            work[FILE] = AddressFile(changes, file, kept, clock, reporter.say).run()
        return work

    def _learner(self, trainer: TrainerThread) -> TrainerThread | Colocated:
        return trainer if self._turns is None else self._turns

    def _around(self, updater: Updater, models: RunModels, written: Written) -> Around:
        events, reporter, fleet, turns = written.events, written.reporter, updater.fleet, self._turns

        def lost(fault: EngineDead, then: str) -> None:
            events.emit(EngineLost(fault.engine_id, fault.phase, fault.last_version, fault.reason))
            reporter.say(f"{fault}; {then}")
            if fault.engine_id in fleet.engines:
                updater.lost(fault.engine_id, fault.reason)
            models.lost(fault.engine_id)

        async def joins(client: EngineClient) -> None:
            if not client.plan.updated:
                again = partial(models.again, client)
                what = await (again() if turns is None else turns.takes_in(client, again))
                reporter.say(f"engine {client.engine_id} {what}")
                return
            if turns is not None:
                await turns.joins(client)
            told = False
            while True:
                try:
                    serves = await updater.join(client, self.config.update_weight_timeout_s)
                    break
                except DeadlineExceeded as fault:
                    if not told:
                        reporter.say(f"engine {client.engine_id} runs again, but takes no part yet: {fault}")
                    told = True
                    if fleet.engines.get(client.engine_id) is client:  # the next update asks it
                        return
            what = "serves again" if serves else "runs again and takes part in the next update"
            reporter.say(f"engine {client.engine_id} {what}")

        room = at_once if turns is None else turns.engines_turn
        return Around(lambda: self._phases.current, lost, joins, fleet.unasked, fleet.changing, room)

    async def _stopped(self, plane: ControlPlane) -> None:
        await self._stop()
        plane.stop()

    async def _start(self, inputs: RunInputs, trainer: TrainerThread, events: EventSink) -> None:
        """Engines and trainer side by side, or, where they share memory, one after the other; raises the first
        failure, the rest is taken down by `run`."""
        config = self.config
        if self._engines.router is not None:
            await self._engines.router.check()
        self.paths.weights.mkdir(parents=True, exist_ok=True)
        plans = beginning_roster(config)
        keep = self._beginning.checkpoint is not None  # else they would need the weights of the beginning
        wanted = frozenset(plan.engine_id for plan in plans if keep)
        await end_left_behind(self.paths.engines, self._clock, wanted)
        if schedule_of(config).swap:
            sharing = Sharing(self._engines, lambda: self._updater.fleet, lambda: self._models.frozen)
            turns = self._turns = Colocated(Switches.of(config), trainer, sharing, events, self._clock)
            self._phases.guard = turns.check
            with self._phases("start"):
                await self._run.cluster.open()
                await self._trainer(inputs, trainer)
                await turns.begin()
                await self._engines.begin(plans, config.engines_needed)
            return
        with self._phases("start"):
            await self._run.cluster.open()
            engines = self._engines.begin(plans, config.engines_needed)
            results = await asyncio.gather(self._trainer(inputs, trainer), engines, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _trainer(self, inputs: RunInputs, trainer: TrainerThread) -> None:
        if self.config.debug_rollout_only:
            trainer.hold(UntrainedBackend(inputs.model, self.config.dtype))
        else:
            kept = self.paths.root / "offload" if self.config.offloads_train else None
            settings = trainer_settings(self.config, inputs.model, inputs.steps)
            await trainer.start(replace(settings, offload=kept))

    async def _opened(self, store: WeightStore, origin: Origin) -> tuple[Transport, WeightVersion]:
        with self._phases("start"):
            transport, base = await open_plane(self.config, store, self._clock, origin, self._run.run_id)
        if self._turns is not None:
            transport = TakingTurns(transport, self._turns, self._clock)
        return transport, base

    def _checkpoints(
        self, inputs: RunInputs, trainer: TrainerThread, parts: tuple[Written, WeightStore, Updater]
    ) -> RunCheckpoints:
        config, begin = self.config, self._beginning
        about = About(self._run.run_id, begin.incarnation, inputs.fingerprints[0].digest, inputs.source)
        beside = SaveThread(self._clock, config.train_step_timeout_s) if config.async_save else None
        plan = wiring.save_plan(config, self.paths.checkpoints, inputs.model)
        return RunCheckpoints(plan, self._files, trainer, contents_of(about, *parts), beside)

    async def _routed(self, work: Coroutine[Any, Any, None], reporter: RunReporter) -> None:
        """Runs `work` beside a watch on the trainer's ranks and one on the router, where there are such."""
        router, trainer = self._engines.router, self.parties.trainer
        watches = [] if trainer is None else trainer.watches
        if router is not None:
            watches.append(router.watch(lambda: self._phases.current, reporter.say))
        await first(work, *watches)

    async def _sampler(self, updater: Updater, inputs: RunInputs) -> Sampler:
        """Asks engines, or the router, which is started here."""
        routes, router = wiring.routes(self.config, updater.fleet), self._engines.router
        if router is not None:
            await router.start(updater.fleet)
            routes = router.members.routes(routes.room)
        pace = Pace(self.config.token_journal_interval)
        return Sampler(routes, inputs.tokenizer, self._clock, pace=pace)

    def _trained_on(self, inputs: RunInputs, sampler: Sampler, updater: Updater) -> Samples:
        if self.config.fine_tunes:
            return Demonstrations(inputs.shown, lambda: self._current(updater).label)
        return self._samples(inputs, sampler)

    def _samples(self, inputs: RunInputs, sampler: Sampler) -> Samples:
        return wiring.samples(self.config, sampler, inputs.tokenizer)

    def _evaluations(
        self, inputs: RunInputs, updater: Updater, rewards: RewardRunner, world: EvalWorld
    ) -> EvalRuns:
        def samples(routes: Routes) -> Samples:
            return self._samples(inputs, Sampler(routes, inputs.tokenizer, self._clock))

        return make_evaluations(inputs.evals, updater, rewards, samples, world)

    async def _supervised(
        self, work: Coroutine[Any, Any, None], reporter: RunReporter, around: Around
    ) -> None:
        """Runs `work` beside a watch on every engine."""
        ticker = asyncio.ensure_future(self._tick(reporter))
        try:
            await self._engines.during(self._routed(work, reporter), wiring.engine_care(self.config), around)
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
            reporter.tick()  # the last evaluation came after the last step

    async def _tick(self, reporter: RunReporter) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            reporter.tick()

    @staticmethod
    def _current(updater: Updater) -> WeightVersion:
        assert updater.current is not None, "the base version is adopted before anything asks"
        return updater.current
