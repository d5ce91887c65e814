"""Where an incarnation of a run begins: which one it is, the checkpoint that it goes on from, its first version.

A run's first incarnation is 0. A resumed one goes on from the newest complete checkpoint, or from step 0 where
there is none yet. Promises: an incarnation's number is above all that opened the run's store or ledger, or wrote a
checkpoint; the trainer's restored weights are published in full, through the ordinary update, before the first
prompt, so that any number of engines holds them; weights that are not those of the checkpoint's version end the
run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from turnout.config.rundir import RunPaths
from turnout.core.errors import DataError, InvariantBroken
from turnout.core.events import EvalDone, Event, RunStarted
from turnout.core.ports import Store
from turnout.core.version import WeightVersion
from turnout.observe.audit_log import as_one, of_kind
from turnout.observe.eventlog import read_events
from turnout.rollout.ledger_read import LedgerReader
from turnout.rollout.ledger_rows import VersionRow
from turnout.rollout.returning import COMMITTED
from turnout.schedule.checkpoint_state import Checkpoint, newest_checkpoint
from turnout.schedule.parts import TrainerThread
from turnout.train.backend import TrainBackend
from turnout.weights.catalog import INCARNATIONS
from turnout.weights.digest import root_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beginning:
    """`checkpoint` None: from the weights and prompts that the run began with."""

    incarnation: int = 0
    checkpoint: Checkpoint | None = None

    @property
    def step(self) -> int:
        """Train steps done."""
        return 0 if self.checkpoint is None else self.checkpoint.state.step

    @property
    def resumed_at(self) -> int | None:
        """What RunStarted tells: None in a run's first incarnation."""
        return self.step if self.incarnation else None

    @property
    def start(self) -> int:
        """The counter of the version that the incarnation goes on from."""
        return 0 if self.checkpoint is None else self.checkpoint.state.version.counter


def find_beginning(paths: RunPaths, run_id: str, files: Store) -> Beginning:
    """Raises ConfigError where there are checkpoints of the run but no complete one."""
    if not paths.resumed:
        return Beginning()
    found = newest_checkpoint(paths.checkpoints, run_id, files)
    opened = [Path(name).stem for name in files.names(paths.weights / INCARNATIONS)]
    known = [int(name) for name in opened if name.isdigit()]
    known += [] if found is None else [found.state.incarnation]
    owner = last_owner(paths.ledger)
    known += [] if owner is None else [owner]
    beginning = Beginning(max(known, default=-1) + 1, found)
    source = "the beginning" if found is None else str(found.folder)
    log.info("the run goes on from %s as incarnation %d", source, beginning.incarnation)
    return beginning


def last_owner(ledger: Path) -> int | None:
    """The incarnation that wrote a ledger last; None where there is no ledger that can be read."""
    try:
        reader = LedgerReader.of(ledger)
    except DataError:
        return None
    try:
        return reader.last_owner()
    finally:
        reader.close()


def earlier_events(path: Path) -> list[Event]:
    """What earlier incarnations told in their event log."""
    return [event for _, event in read_events(path)] if path.exists() else []


def earlier_points(told: list[Event], opening: RunStarted) -> list[EvalDone]:
    """The evaluation points of earlier incarnations that stand, where the one of `opening` goes on."""
    return of_kind(as_one([*told, opening]), EvalDone)


def standing_versions(rows: Iterable[VersionRow], step: int) -> list[tuple[WeightVersion, int]]:
    """The versions that were current before the one of the checkpoint with `step` train steps, in order, with their
    steps; the first of each step."""
    found: dict[int, WeightVersion] = {}
    for row in rows:
        if row.state == COMMITTED and row.step < step:
            found.setdefault(row.step, WeightVersion(row.incarnation, row.counter, row.root))
    return [(found[at], at) for at in sorted(found)]


async def load_weights(beginning: Beginning, trainer: TrainerThread) -> None:
    """Loads the trainer's state, where there is a checkpoint. Raises ModelError for a state of another model,
    InvariantBroken for other weights than the checkpoint's version."""
    checkpoint = beginning.checkpoint
    if checkpoint is None:
        return
    root = await trainer.call("the checkpoint to be loaded", lambda t: _loaded(t, checkpoint.folder))
    if root != checkpoint.state.version.root:
        raise InvariantBroken(
            f"{checkpoint.folder} holds weights with the root {root}, its version is "
            f"{checkpoint.state.version.label}"
        )


def _loaded(trainer: TrainBackend, folder: Path) -> str:
    trainer.load(folder)
    return root_of(trainer.export())
