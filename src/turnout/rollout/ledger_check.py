"""Whether a ledger keeps its promises, read back as a whole: for tests, the simulator, `turnout inspect --check`.

Pure reading. Each problem names its group or step; none at all is what every ledger has, at every moment between
two transactions, also of a run that was killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from turnout.core.errors import IllegalTransition, InvariantBroken
from turnout.rollout.group_machine import ENDED, TABLE, GroupEvent, GroupState
from turnout.rollout.ledger_read import LedgerReader
from turnout.rollout.ledger_rows import GroupRow, Move

ADMIT = "admit"


def problems(ledger: LedgerReader) -> Iterator[str]:
    """What is wrong, in words; reads everything."""
    before: GroupRow | None = None
    for row in ledger.rows():
        yield from _order(before, row)
        yield from _history(row, ledger.history(row.group_id))
        yield from _members(ledger, row)
        if row.trained is not None and not _in_batch(ledger, row):
            yield f"group {row.group_id} was trained by step {row.trained}, whose batch does not have it"
        before = row
    if before is not None and before.state is GroupState.REQUEUED:
        yield f"group {before.group_id} was requeued, and has no next attempt"


def _order(before: GroupRow | None, row: GroupRow) -> Iterator[str]:
    """Every prompt has attempts 0 to n, of which all but the last were requeued; no prompt is left out."""
    place, requeued = (-1, -1), False
    if before is not None:
        place, requeued = (before.ordinal, before.attempt), before.state is GroupState.REQUEUED
    wanted = (place[0], place[1] + 1) if requeued else (place[0] + 1, 0)
    if (row.ordinal, row.attempt) != wanted:
        yield f"group {row.group_id} stands where attempt {wanted[1]} at prompt {wanted[0]} belongs"


def _history(row: GroupRow, moves: list[Move]) -> Iterator[str]:
    """The table leads from WAITING through the history to the state of the row."""
    if not moves and row.state in ENDED:
        return  # of a checkpoint's copy
    if len(moves) != row.moves or [(m.event, m.state) for m in moves[:1]] != [(ADMIT, GroupState.WAITING)]:
        yield f"group {row.group_id} has {len(moves)} moves told of {row.moves}"
        return
    state = GroupState.WAITING
    for move in moves[1:]:
        try:
            state = TABLE.after(state, GroupEvent(move.event))
        except IllegalTransition as fault:
            yield f"group {row.group_id}: {fault}"
            return
        if state != move.state:
            yield f"group {row.group_id} is told {move.state} after {move.event}, the table says {state}"
    if any(later.incarnation < earlier.incarnation for earlier, later in pairwise(moves)):
        yield f"group {row.group_id} was moved by an incarnation after a later one"
    if state is not row.state or (state is GroupState.TRAINED) != (row.trained is not None):
        yield f"group {row.group_id} is {row.state} (step {row.trained}), its history leads to {state}"
    if state is GroupState.TRAINED and moves[-1].step != row.trained:
        yield f"group {row.group_id} was trained by step {row.trained}, its history says {moves[-1].step}"


def _members(ledger: LedgerReader, row: GroupRow) -> Iterator[str]:
    """Pieces of a member meet; of a complete group each member has ended and is scored."""
    try:
        members = ledger.members(row.group_id)
    except InvariantBroken as fault:
        yield str(fault)
        return
    if row.state in (GroupState.WAITING, GroupState.DROPPED, GroupState.REQUEUED) and members:
        yield f"group {row.group_id} is {row.state} and has tokens"
    if row.state in (GroupState.COMPLETED, GroupState.TAKEN):
        unfit = [member for member, t in members.items() if t.partial or t.reward is None]
        if unfit or not members:
            yield f"group {row.group_id} is {row.state}, members {unfit or 'none'} are not complete"


def _in_batch(ledger: LedgerReader, row: GroupRow) -> bool:
    batch = None if row.trained is None else ledger.batch(row.trained)
    return batch is not None and batch.group_ids.count(row.group_id) == 1
