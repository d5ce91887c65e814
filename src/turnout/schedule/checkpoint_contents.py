"""What a run's checkpoints hold besides the trainer, taken from the parts of the run that write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnout.core.errors import InvariantBroken
from turnout.core.events import EvalDone
from turnout.observe.eventlog import EventLog
from turnout.observe.metrics import MetricsLog
from turnout.rollout.book import GroupBook
from turnout.rollout.source import PromptSource
from turnout.schedule.checkpoint_state import LEDGER, CheckpointState
from turnout.schedule.checkpoints import Contents
from turnout.schedule.reporter import RunReporter
from turnout.transfer.updater import Updater
from turnout.weights.store import WeightStore


@dataclass(frozen=True)
class Written:
    """Where a run writes what it does; `points` are the evaluations that earlier incarnations did."""

    events: EventLog
    metrics: MetricsLog
    book: GroupBook
    reporter: RunReporter
    points: Sequence[EvalDone]


@dataclass(frozen=True)
class About:
    """Which run it is, which incarnation of it, on which data."""

    run_id: str
    incarnation: int
    data: str
    source: PromptSource


def contents_of(about: About, written: Written, store: WeightStore, updater: Updater) -> Contents:
    """Everything that one checkpoint commits together."""
    ledger = written.book.ledger

    def state(steps_done: int) -> CheckpointState | None:
        held = updater.fleet.current
        if held is None:
            raise InvariantBroken("a base version is adopted before anything is saved")
        if held.step != steps_done:
            return None
        store.pin(held.version)  # the checkpoint that is written now goes on from it
        place = about.source.position, about.source.epoch
        return CheckpointState(about.run_id, about.incarnation, steps_done, *place, held.version, about.data)

    def owned() -> None:
        with ledger.transaction():
            pass  # raises where another incarnation has taken over

    def copy_ledger(folder: Path) -> None:
        owned()
        if not ledger.beside:
            ledger.backup(folder / LEDGER)

    def check(folder: Path) -> None:
        if ledger.beside:
            ledger.backup(folder / LEDGER)
        store.check()
        written.events.sync()
        written.metrics.sync()

    def saved(state: CheckpointState) -> None:
        ledger.put_checkpoint(state.step, state.version.label)

    return Contents(state, copy_ledger, check, saved, owned)
