"""Events that the ledger knows and the event log does not: the process died after a move was written and before it
was told, or in the middle of the line. That is at most one transaction of an incarnation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from turnout.core.events import Event, GroupCompleted, GroupCut, GroupDropped, GroupRequeued, GroupTaken
from turnout.core.types import Prompt, RolloutGroup
from turnout.rollout.book import completed
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger_read import LedgerReader
from turnout.rollout.ledger_rows import GroupRow, next_attempt

Told = GroupTaken | GroupCompleted | GroupDropped | GroupRequeued
UNDER_WAY = (GroupState.INFLIGHT, GroupState.PARTIAL)
COMPLETE = (GroupState.COMPLETED, GroupState.TAKEN, GroupState.TRAINED)


def untold(ledger: LedgerReader, told: Iterable[Event]) -> list[Told | GroupCut]:
    """What a resume has to tell after its RunStarted, in an order that the audit takes. `told` is the whole log.
    The training of groups is left out: what was trained since the checkpoint is undone, the rest was told."""
    known: dict[type, set[str]] = {
        GroupTaken: set(),
        GroupCompleted: set(),
        GroupDropped: set(),
        GroupRequeued: set(),
    }
    for event in told:
        if isinstance(event, Told):
            known[type(event)].add(event.group)
    events: list[Told | GroupCut] = []
    for row in ledger.rows():
        found = _events(ledger, row, row.group_id in known[GroupCompleted])
        events += [event for event in found if event.group not in known[type(event)]]
        if row.group_id not in known[GroupTaken] and row.state in UNDER_WAY:
            events.append(GroupCut(row.group_id, ledger.token_count(row.group_id)))
    return events


def _events(ledger: LedgerReader, row: GroupRow, complete: bool) -> Iterator[Told]:
    name = row.group_id
    prompt = Prompt(row.prompt_id, (), "")  # what is told names it only
    yield GroupTaken(name, row.prompt_id, row.admitted)
    if row.state in COMPLETE and not complete:
        members = tuple(ledger.members(name).values())
        yield completed(RolloutGroup(name, row.ordinal, row.attempt, prompt, members))
    elif row.state is GroupState.DROPPED:
        yield GroupDropped(name, row.cause or "")
    elif row.state is GroupState.REQUEUED:
        yield GroupRequeued(name, row.cause or "", next_attempt(row, prompt).group_id)
