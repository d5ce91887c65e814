"""One incarnation of a run from its start to its end: what is opened, how it ends, what is told of it.

What can be refused is checked before anything is started (turnout.schedule.incarnation). Promises: an engine that
dies ends the run with its id, the phase and its last version; after the run, however it ended, no process of it is
left, and events.jsonl, metrics.jsonl and summary.json tell what happened.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from turnout.config.run_config import RunConfig
from turnout.config.rundir import RunPaths
from turnout.core.errors import (
    EngineDead,
    LedgerError,
    OwnerLost,
    RunCut,
    RunStopped,
    TrainerLost,
    TurnoutError,
    one_line,
)
from turnout.core.events import EngineLost, RunEnded, RunStarted
from turnout.core.ports import Clock, Store
from turnout.observe.eventlog import EventLog
from turnout.observe.panel import Panel
from turnout.placement.cluster import closed
from turnout.placement.processes import OwnProcess
from turnout.rollout.book import GroupBook
from turnout.rollout.ledger_owner import Claim
from turnout.rollout.untold import untold
from turnout.schedule import wiring
from turnout.schedule.checkpoint_contents import Written
from turnout.schedule.checkpoint_state import newest_checkpoint
from turnout.schedule.clusters import cluster_of, token_of
from turnout.schedule.engine_starts import Run, launched
from turnout.schedule.external import external_engines
from turnout.schedule.incarnation import Incarnation, RunOutcome
from turnout.schedule.inputs import RunInputs
from turnout.schedule.limits import RunLimits
from turnout.schedule.phases import Phases
from turnout.schedule.reporter import RunReporter
from turnout.schedule.resume import earlier_events, earlier_points, find_beginning
from turnout.schedule.resume_ledger import open_ledger
from turnout.schedule.run_engines import RunEngines
from turnout.schedule.run_record import RunRecord
from turnout.schedule.run_router import RunRouter
from turnout.schedule.shown import metrics_log
from turnout.schedule.stall_watch import StallWatch, watched
from turnout.serving.launcher import STOP_GRACE_S

SUPERSEDED = "superseded"  # by a later incarnation: nothing more is written


class Session:
    """One incarnation of a run from start to end. `run` may be called once."""

    def __init__(
        self, config: RunConfig, paths: RunPaths, record: RunRecord, clock: Clock, files: Store
    ) -> None:
        """Raises ConfigError where the run should go on, but none of its checkpoints is complete."""
        begin = find_beginning(paths, record.run_id, files)
        cluster = cluster_of(config, record.run_id, paths.engines, clock)
        self._run = Run(config, paths, record.run_id, begin, clock, files, cluster, token_of(config))
        self._record, self._lost = record, 0
        self._left: dict[str, OwnProcess] | None = None
        self.outcome = RunOutcome(traffic=self._run.traffic)
        self.limits = RunLimits(config, paths.root, clock, self._ends)

    def again(self) -> Session | None:
        """After the trainer was lost: the next incarnation, in this process, with the engines that have gone on.
        None where the budget is spent, which is that of an engine, or the run should stop."""
        run, left = self._run, self._left
        if left is None or self.limits.stopping:
            return None
        made = Session(run.config, replace(run.paths, resumed=True), self._record, run.clock, run.files)
        made._run.left.update(left)
        self._left = None
        made._lost = self._lost + 1
        made.limits.spent_s = self.limits.spent_s + self.outcome.seconds_total
        return made

    async def close(self) -> None:
        """Stops engines that were left for an incarnation that did not come."""
        await _stopped(self._run.left)
        await _stopped(self._left or {})

    def _ends(self, status: str, reason: str) -> None:
        self.outcome.status, self.outcome.reason = status, reason

    async def run(self, inputs: RunInputs, panel: Panel) -> RunOutcome:
        """Runs to the end; raises the TurnoutError that ended it early, after everything was taken down: RunStopped
        where `limits` cut it off."""
        run, clock = self._run, self._run.clock
        started, paths, begin = clock.now(), run.paths, run.beginning
        external = external_engines(run.config, inputs.model, clock, (run.run_id, begin.incarnation))
        async with AsyncExitStack() as stack:
            claim = Claim.of_this_process(clock, begin.incarnation)
            ledger = stack.enter_context(open_ledger(paths, run.run_id, begin, claim))
            opening = self._opening()
            before = earlier_events(paths.events)
            points = earlier_points(before, opening)
            events = stack.enter_context(EventLog(paths.events, clock, take_over=True))
            phases = Phases(clock, events)
            router = wiring.router_of(run.config, run.run_id, paths.engines)
            gate = None if router is None else RunRouter(router, events, clock)
            start = partial(launched, run, inputs, external)
            self._engines = RunEngines(start, events, clock, phases.waits, gate)
            about, told = (run.run_id, begin.resumed_at), (events, panel)
            metrics = await metrics_log(stack, run.config, paths, about, told)
            stack.enter_context(panel)
            for event in (opening, *untold(ledger, before)):
                events.emit(event)
            reporter = RunReporter(events, metrics, panel, phases, clock)
            reporter.trains = not run.config.debug_rollout_only
            self.outcome.curves = reporter.curves
            written = Written(events, metrics, GroupBook(events, ledger), reporter, points)
            work = Incarnation(run, self._engines, phases, self.outcome, self.limits.stopped)
            watch = StallWatch(work.parties, paths.waits, events, clock, run.config.stall_warning_s)
            watch.say, reporter.waits = reporter.say, lambda: (watch.line, watch.stalled)
            try:
                async with watched(watch):
                    await self.limits.within(work.train(inputs, written), ledger)
                self.outcome.status, self.outcome.reason = "finished", ""
            except RunStopped as end:
                if isinstance(end, RunCut):
                    self.outcome.reason = one_line(end)
                raise
            except TurnoutError as fault:
                self.outcome.status, self.outcome.reason = "failed", one_line(fault)
                if isinstance(fault, EngineDead):
                    events.emit(EngineLost(fault.engine_id, fault.phase, fault.last_version, fault.reason))
                if isinstance(fault, TrainerLost) and self._lost < run.config.restarts:
                    await self._leave()
                raise
            except asyncio.CancelledError:
                self.outcome.status, self.outcome.reason = "interrupted", "interrupted"
                raise
            finally:
                await asyncio.shield(self._take_down(events, written.book))
                self.outcome.seconds_total = clock.now() - started
        return self.outcome

    def _opening(self) -> RunStarted:
        config, begin = self._run.config, self._run.beginning
        return RunStarted(
            self._run.run_id,
            begin.incarnation,
            config.seed,
            config.schedule,
            config.lag_bound,
            config.trust_label,
            begin.resumed_at,
            config.update_weights_interval,
        )

    async def _leave(self) -> None:
        """Without a checkpoint the engines would need the weights of the beginning: they are stopped."""
        run = self._run
        kept = newest_checkpoint(run.paths.checkpoints, run.run_id, run.files)
        self._left = {} if kept is None else await self._engines.leave()

    async def _take_down(self, events: EventLog, book: GroupBook) -> None:
        """What is open when a run has finished is dropped; after any other end a resume goes on with it."""
        leftovers = await self._engines.stop()
        leftovers += await closed(self._run.cluster)
        await _stopped(self._run.left)
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


async def _stopped(left: dict[str, OwnProcess]) -> None:
    """Stops each once: the id of one that has ended may be another's."""
    processes = list(left.values())
    left.clear()
    await asyncio.gather(*(process.stop(STOP_GRACE_S) for process in processes))
