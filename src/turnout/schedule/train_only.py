"""A run that only trains, on saved batches (--load-debug-rollout-data): no engine, no prompt, no ledger.

Promises: the batches train in their order, each with the settings and from the state that it had, so that a run
in deterministic mode gives the weights and the error that it gave then; summary.json has the root of the last
weights (`weights_root`). It is not gone on with: batches are files, a run on them begins anew.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnout.config.load import dump
from turnout.config.run_config import RunConfig
from turnout.config.rundir import RunPaths
from turnout.core.errors import ConfigError, Fault, RunStopped, TurnoutError, one_line
from turnout.core.events import RunEnded, RunStarted
from turnout.core.ports import Clock, Store
from turnout.core.rng import random_id
from turnout.observe.eventlog import EventLog
from turnout.observe.metrics import REWARD, SECONDS, MetricsLog
from turnout.observe.panel import Panel
from turnout.schedule import wiring
from turnout.schedule.checkpoints import check_folders, export_hf
from turnout.schedule.incarnation import RunOutcome
from turnout.schedule.limits import RunLimits
from turnout.schedule.parts import TrainerThread
from turnout.schedule.reporter import train_row
from turnout.schedule.saved_batches import STATE, SavedBatches, SavedPlan, saved_batch, saved_paths
from turnout.schedule.shown import metrics_log
from turnout.schedule.train_wiring import rank_plan, trainer_settings
from turnout.train.saved_batch import SavedBatch
from turnout.weights.digest import root_of

log = logging.getLogger(__name__)


class TrainOnly:
    """One such run, from start to end. `run` may be called once."""

    def __init__(self, config: RunConfig, paths: RunPaths, clock: Clock, files: Store) -> None:
        """Raises ConfigError where the directory holds a run, or a folder to save to is in use."""
        if paths.resumed:
            reason = "holds a run, and one on saved batches goes on with none"
            raise ConfigError(Fault("--run-dir", str(paths.root), reason, "give another folder"))
        check_folders(config)
        self._config, self._paths, self._clock, self._files = config, paths, clock, files
        self.outcome = RunOutcome()
        self.limits = RunLimits(config, paths.root, clock, self._ends)
        files.publish_file(paths.config, dump(config).encode())

    def _ends(self, status: str, reason: str) -> None:
        self.outcome.status, self.outcome.reason = status, reason

    def again(self) -> None:
        """It is not gone on with."""

    async def close(self) -> None:
        """It has no engines."""

    async def run(self, model: Path, panel: Panel) -> RunOutcome:
        """Trains on all batches; raises the TurnoutError that ended it early."""
        config, paths, outcome = self._config, self._paths, self.outcome
        started = self._clock.now()
        async with AsyncExitStack() as stack:
            events = stack.enter_context(EventLog(paths.events, self._clock))
            run_id = random_id()
            metrics = await metrics_log(stack, config, paths, (run_id, None), (events, panel))
            stack.enter_context(panel)
            opening = RunStarted(run_id, 0, config.seed, config.schedule, config.lag_bound)
            events.emit(opening)
            try:
                await self.limits.within(self._train(model, metrics, panel), None)
                self._ends("finished", "")
            except TurnoutError as fault:
                if not isinstance(fault, RunStopped):
                    self._ends("failed", one_line(fault))
                raise
            finally:
                outcome.seconds_total = self._clock.now() - started
                events.emit(RunEnded(outcome.status, outcome.reason, []))
        return outcome

    async def _train(self, model: Path, metrics: MetricsLog, panel: Panel) -> None:
        config, outcome = self._config, self.outcome
        files = saved_paths(str(config.load_debug_rollout_data), config.num_rollout)
        ranks = rank_plan(config, self._paths)
        trainer = TrainerThread(self._clock, config.train_step_timeout_s, ranks)
        try:
            first = saved_batch(files[0], config)
            await trainer.start(trainer_settings(config, model, first.about.get("steps")))
            if (state := files[0].parent / STATE).is_dir() and Path(
                str(config.load_debug_rollout_data)
            ).is_dir():
                await trainer.call("the trainer's state to be loaded", lambda backend: backend.load(state))
            trained = SavedBatches(trainer, SavedPlan(config, self._paths.root, None), self._files)
            for number, path in enumerate(files, start=1):
                if self.limits.stopping:
                    raise RunStopped(f"stopped after {outcome.steps_done} steps")
                saved = first if number == 1 else saved_batch(path, config)
                began = self._clock.now()
                told = await trained.train(saved.batch)
                seconds = self._clock.now() - began
                row = _rewards(saved) | train_row(told) | {SECONDS + "step": seconds}
                metrics.write(number, row)
                outcome.steps_done = number
                outcome.seconds_training += seconds
                outcome.curves.rewards.append(row.get(REWARD, 0.0))
                outcome.curves.mismatch.append(told["mismatch_mean"])
                panel.say(f"step {number}/{len(files)} of {path.name}: loss {told['loss']:.6g}")
            outcome.weights_root = await trainer.call(
                "the root of the weights", lambda b: root_of(b.export())
            )
            plan = wiring.save_plan(config, self._paths.checkpoints, model)
            await export_hf(replace(plan, periodic=False), self._files, trainer)
        finally:
            await trainer.close()


def _rewards(saved: SavedBatch) -> dict[str, float]:
    """What the batch tells of rewards."""
    groups: list[dict[str, Any]] = saved.about.get("groups", [])
    rewards = [m["reward"] for group in groups for m in group["members"] if m["reward"] is not None]
    return {REWARD: sum(rewards) / len(rewards)} if rewards else {}
