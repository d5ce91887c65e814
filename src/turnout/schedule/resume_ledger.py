"""The ledger of a run that goes on: which file it is, and what is in it for the rollouts.

Promises: the ledger in the run directory is used where it belongs to the run and is at least as new as the
checkpoint; otherwise the checkpoint's copy takes its place, the other file is kept beside it, and what is lost is
told. After `returning_groups` every group is as it was at the checkpoint, or is brought back by it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from turnout.config.rundir import RunPaths
from turnout.core.errors import DataError, Fault
from turnout.core.rng import random_id
from turnout.core.types import Prompt
from turnout.rollout.book import GroupBook
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_owner import Claim
from turnout.rollout.ledger_read import LedgerReader
from turnout.rollout.ledger_rows import StoredGroup
from turnout.rollout.ledger_schema import open_database
from turnout.rollout.returning import Returned, Returning, due_step
from turnout.rollout.staleness import Fate
from turnout.schedule.checkpoint_state import LEDGER
from turnout.schedule.resume import Beginning

L = TypeVar("L", bound=Ledger)
RUN_ID = "run_id"
log = logging.getLogger(__name__)


def open_ledger(
    paths: RunPaths, run_id: str, beginning: Beginning, claim: Claim, kind: type[L] = Ledger
) -> L:  # fmt: skip
    """Opens it to write, as this incarnation. Raises ConfigError where another process does, DataError where it is
    torn and there is no checkpoint with a copy."""
    checkpoint = beginning.checkpoint
    if checkpoint is not None and (why := _unusable(paths.ledger, run_id, checkpoint.folder / LEDGER)):
        log.warning(
            "%s %s: %s takes its place; groups and tokens since step %d are lost and sampled anew",
            paths.ledger,
            why,
            checkpoint.folder / LEDGER,
            checkpoint.state.step,
        )
        _replace(paths.ledger, checkpoint.folder / LEDGER)
    ledger = kind(open_database(paths.ledger), replace(claim, incarnation=beginning.incarnation))
    if ledger.meta(RUN_ID) != run_id:
        ledger.put_meta(RUN_ID, run_id)
    return ledger


def returning_groups(
    book: GroupBook, prompt: Callable[[int], Prompt], step: int, interval: int, policy: Fate
) -> Returning:
    """Goes back to a checkpoint with `step` train steps, and says what comes back of the groups that are open then,
    where versions are made every `interval` steps. Raises DataError for a group of another prompt than the data
    has now, or whose tokens are gone."""
    ledger = book.ledger
    book.roll_back(step)
    ledger.abandon_versions(step)
    found = ledger.open_groups()
    unfinished = [one.row.ordinal for one in found if one.row.state is not GroupState.COMPLETED]
    passed = [row.ordinal for row in ledger.trained_from(min(unfinished))] if unfinished else []
    groups = [_returned(one, prompt, step, interval) for one in found]
    versions = {row.label: row for row in ledger.versions()}
    return Returning(groups, versions, _batches(ledger, found, step), policy, passed)


def _returned(one: StoredGroup, prompt: Callable[[int], Prompt], step: int, interval: int) -> Returned:
    row, state = one.row, one.row.state
    if state is GroupState.COMPLETED and not one.members:
        reason = f"the tokens of group {row.group_id} are gone"
        raise DataError(Fault("ledger", "", reason, "begin a new run"))
    return Returned(one.group(prompt(row.ordinal)), state, due_step(row.admitted, step, interval))


def _batches(ledger: Ledger, found: list[StoredGroup], step: int) -> dict[int, tuple[str, ...]]:
    """The batches from `step` on that can be trained as they were recorded."""
    complete = {one.row.group_id for one in found if one.row.state is GroupState.COMPLETED}
    batches: dict[int, tuple[str, ...]] = {}
    while (batch := ledger.batch(step)) is not None and complete.issuperset(batch.group_ids):
        batches[step] = batch.group_ids
        complete.difference_update(batch.group_ids)
        step += 1
    return batches


def _unusable(live: Path, run_id: str, copy: Path) -> str:
    """Why the ledger in the run directory cannot be gone on with; empty where it can."""
    try:
        ours = LedgerReader.of(live)
    except DataError as fault:
        return str(fault.faults[0].reason)
    saved = LedgerReader.of(copy)
    try:
        if ours.meta(RUN_ID) != run_id:
            return f"belongs to run {ours.meta(RUN_ID)}"
        steps = saved.last_batch()
        older = ours.next_ordinal() < saved.next_ordinal()
        if older or (steps is not None and ours.batch(steps) is None):
            return "is older than the checkpoint"
        return ""
    except DataError as fault:
        return str(fault.faults[0].reason)
    finally:
        ours.close()
        saved.close()


def _replace(live: Path, copy: Path) -> None:
    """The file that was there is kept under another name, with its log."""
    mark = random_id()[:8]
    for suffix in ("", "-wal", "-shm", "-journal"):
        path = live.with_name(live.name + suffix)
        if path.exists():
            path.rename(path.with_name(f"{live.name}.lost-{mark}{suffix}"))
    live.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(copy, live)
