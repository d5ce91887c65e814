"""A ledger that keeps its promises has no problems; each promise that is broken in the file is found."""

from __future__ import annotations

import pytest

from tests.unit.rollout.ledger_parts import fresh, part, prompt, whole
from tests.unit.rollout.parts import Log, memory_ledger
from turnout.core.events import GroupTrained
from turnout.rollout.book import GroupBook
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_check import problems
from turnout.rollout.ledger_rows import Piece


def lived() -> Ledger:
    """0 trained, 1 requeued and then dropped, 2 complete, 3 cut with tokens."""
    ledger = memory_ledger()
    book = GroupBook(Log(), ledger)
    for ordinal in range(4):
        book.admit(fresh(ordinal), 0)
        book.start(fresh(ordinal).group_id)
    for ordinal in (0, 2):
        book.complete(whole(ordinal))
    again = book.requeue(fresh(1).group_id, prompt(1), 0, "stale")
    book.drop(again.group_id, "why")
    ledger.journal([Piece(fresh(3).group_id, 0, start, part(30, start, 2)) for start in (0, 2)])
    book.cut(fresh(3).group_id)
    book.take(0, [whole(0)])
    book.train([GroupTrained(whole(0).group_id, 0, [], 0)])
    return ledger


def test_a_ledger_of_every_kind_of_group_has_no_problem() -> None:
    assert list(problems(lived())) == []


BROKEN = {
    "a lost prompt": (
        "DELETE FROM groups WHERE ordinal = 2",
        "g00000003.0 stands where attempt 0 at prompt 2",
    ),
    "a lost attempt": (
        "DELETE FROM groups WHERE group_id = 'g00000001.1'",
        "stands where attempt 1 at prompt 1",
    ),
    "a requeued last group": (
        "UPDATE groups SET state = 'requeued' WHERE ordinal = 3",
        "g00000003.0 was requeued, and has no next attempt",
    ),
    "a state without its move": (
        "UPDATE groups SET state = 'taken' WHERE ordinal = 2",
        "its history leads to completed",
    ),
    "a move that the table lacks": (
        "UPDATE history SET event = 'train' WHERE group_id = 'g00000002.0' AND move = 2",
        "event train is not allowed in state inflight",
    ),
    "a move to another state": (
        "UPDATE history SET state = 'taken' WHERE group_id = 'g00000002.0' AND move = 2",
        "told taken after complete, the table says completed",
    ),
    "a lost move": (
        "DELETE FROM history WHERE group_id = 'g00000002.0' AND move = 1",
        "has 2 moves told of 3",
    ),
    "an old incarnation's move": ("UPDATE history SET incarnation = 3 WHERE move = 1", "after a later one"),
    "a step without the group": (
        "UPDATE batches SET group_ids = '[]'",
        "step 0, whose batch does not have it",
    ),
    "a group twice in a batch": (
        """UPDATE batches SET group_ids = '["g00000000.0", "g00000000.0"]'""",
        "step 0, whose batch does not have it",
    ),
    "another step": ("UPDATE groups SET trained = 5 WHERE ordinal = 0", "its history says 0"),
    "a gap in the tokens": (
        "DELETE FROM trajectories WHERE group_id = 'g00000003.0' AND start = 0",
        "a piece at 2 after 0 tokens",
    ),
    "a complete group without tokens": (
        "DELETE FROM trajectories WHERE group_id = 'g00000002.0'",
        "members none",
    ),
    "an unscored member": (
        "UPDATE trajectories SET reward = NULL WHERE group_id = 'g00000002.0' AND member = 1",
        r"members \\[1\\] are not complete",
    ),
    "tokens of an attempt that has ended": (
        "UPDATE trajectories SET group_id = 'g00000001.0' WHERE group_id = 'g00000003.0'",
        "g00000001.0 is requeued and has tokens",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found(name: str) -> None:
    statement, why = BROKEN[name]
    ledger = lived()
    assert ledger._connection.execute(statement).rowcount > 0
    found = "\n".join(problems(ledger))
    assert why.replace("\\", "") in found
