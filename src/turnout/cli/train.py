"""`turnout train RUN.yaml [--option value ...]`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from turnout.cli.options import split_run_file
from turnout.config.load import load
from turnout.config.run_config import RunConfig
from turnout.config.rundir import RunPaths, make_run_dir
from turnout.core.errors import (
    ConfigError,
    Fault,
    LedgerError,
    RunStopped,
    TrainerLost,
    TurnoutError,
    one_line,
)

if TYPE_CHECKING:
    from turnout.schedule.session import Session
    from turnout.schedule.train_only import TrainOnly

TERMINATED = 143


def command(argv: list[str]) -> int:
    """Runs one training run; the exit status. The first word may be a YAML or JSON file."""
    if not argv:
        remedy = "give a run's file (`turnout new` writes one), or see `turnout train --help`"
        raise ConfigError(Fault("RUN.yaml", "", "is missing", remedy))
    from turnout.placement.processes import collector_off, settle_collector

    with collector_off():
        config = load(*split_run_file(argv))
        _prepare_process(config)
        paths, source, sessions = _loaded(config)
    settle_collector()
    try:
        status = asyncio.run(_run(sessions, source, config, paths))
    finally:
        _finish(config, paths, sessions[-1])
    return status


def _loaded(config: RunConfig) -> tuple[RunPaths, Any, list[Session | TrainOnly]]:
    """The run's folder, what it reads, and its first session."""
    from turnout.placement.real import DiskStore, RealClock
    from turnout.schedule.inputs import load_inputs
    from turnout.schedule.run_record import open_record
    from turnout.schedule.session import Session
    from turnout.schedule.train_only import TrainOnly
    from turnout.train.model_zoo import resolve_checkpoint

    model = resolve_checkpoint(config.hf_checkpoint)
    clock, files = RealClock(), DiskStore()
    if config.train_only:
        paths = make_run_dir(config)
        return paths, model, [TrainOnly(config, paths, clock, files)]
    inputs = load_inputs(config, model)
    paths = make_run_dir(config)
    record = open_record(paths, config, inputs.fingerprints, files)
    return paths, inputs, [Session(config, paths, record, clock, files)]


async def _run(sessions: list[Session | TrainOnly], source: Any, config: RunConfig, paths: RunPaths) -> int:
    """Runs the session, and the next ones where the trainer is lost and may start again."""
    from turnout.observe.panel import Panel
    from turnout.placement.real import RealClock

    panel = Panel(config.panel, RealClock())
    panel.say(f"run {paths.root}")
    task = asyncio.ensure_future(sessions[0].run(source, panel))

    def told(name: str) -> None:
        """The first time in good order, the second time at once."""
        if sessions[-1].limits.stopping:
            task.cancel()
        else:
            panel.say(f"{name}: the run stops, within {config.grace_s:g} s")
            sessions[-1].limits.stop("interrupted", name)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        asyncio.get_running_loop().add_signal_handler(number, told, number.name)
    try:
        while True:
            try:
                await task
                return 0
            except TrainerLost as fault:
                if (following := sessions[-1].again()) is None:
                    raise
                panel.say(f"{one_line(fault)}; the run goes on from its last checkpoint")
                sessions.append(following)
                task = asyncio.ensure_future(following.run(source, panel))
    except RunStopped as end:
        print(f"turnout: {one_line(end)}; the same command goes on with it", file=sys.stderr)
        return 0 if sessions[-1].outcome.status == "paused" else TERMINATED
    except asyncio.CancelledError:
        if not sessions[-1].limits.stopping:  # by no signal of those above: Ctrl-C
            raise
        print("turnout: terminated", file=sys.stderr)
        return TERMINATED
    finally:
        await sessions[-1].close()


def _finish(config: RunConfig, paths: RunPaths, session: Session | TrainOnly) -> None:
    from turnout.placement.real import DiskStore
    from turnout.schedule.finish import finish, show
    from turnout.schedule.session import SUPERSEDED

    if session.outcome.status == SUPERSEDED:
        return
    try:
        summary = finish(config, paths, session.outcome, DiskStore())
    except OSError as error:
        told = f"{paths.summary} can't be written: {error}"
        if session.outcome.status == "finished":
            raise LedgerError(told) from None
        print(f"turnout: {told}", file=sys.stderr)  # what ended the run is told as well
        return
    if session.outcome.status == "finished":
        show(config, paths, session.outcome, summary)
        if not summary.audit.ok:
            raise TurnoutError(f"the audit of the run failed: {summary.audit.failed[0]}")


def _prepare_process(config: RunConfig) -> None:
    """Before torch is loaded: threads of this process, and pools that give the cores back while they wait."""
    from turnout.placement.processes import POOL_ENVIRONMENT, raise_file_limit
    from turnout.schedule.wiring import cpu_count

    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    os.environ["OMP_NUM_THREADS"] = str(config.trainer_thread_count(cpu_count()))
    os.environ.update(POOL_ENVIRONMENT)
    raise_file_limit()
