"""Moves that a transaction has said and not yet written."""

from __future__ import annotations

import pytest

from tests.unit.rollout.ledger_parts import fresh
from tests.unit.rollout.parts import Log, memory_ledger
from turnout.core.errors import InvariantBroken
from turnout.rollout.book import GroupBook
from turnout.rollout.group_machine import GroupEvent, GroupState
from turnout.rollout.ledger_check import problems

NAMES = [fresh(ordinal).group_id for ordinal in range(3)]


def begin(book: GroupBook) -> None:
    for ordinal in range(3):
        book.admit(fresh(ordinal), 0)
        book.start(NAMES[ordinal])


def test_a_transaction_writes_one_row_a_group_and_every_line_of_its_history() -> None:
    ledger = memory_ledger()
    book, said = GroupBook(Log(), ledger), list[str]()
    ledger._connection.set_trace_callback(said.append)
    with book.transaction():
        begin(book)
        book.drop(NAMES[0], "why")
    ledger._connection.set_trace_callback(None)
    rows = [line for line in said if line.startswith(("INSERT INTO groups", "UPDATE groups"))]
    assert len(rows) == 3 and sum(line.startswith("INSERT INTO history") for line in said) == 7
    states = [ledger.row(name).state for name in NAMES]
    assert states == [GroupState.DROPPED, GroupState.INFLIGHT, GroupState.INFLIGHT]
    assert [move.event for move in ledger.history(NAMES[0])] == ["admit", "start", "drop"]
    assert ledger.count_states() == +ledger.counts and not list(problems(ledger))


def test_who_reads_in_the_transaction_sees_them() -> None:
    ledger = memory_ledger()
    book = GroupBook(Log(), ledger)
    with book.transaction():
        begin(book)
        assert ledger.count_states() == {GroupState.INFLIGHT: 3}
        book.cut(NAMES[1])
        assert [row.state for row in ledger.rows()][1] is GroupState.PARTIAL
        book.drop(NAMES[1], "why")
        assert ledger.row(NAMES[1]).cause == "why"
    assert [move.event for move in ledger.history(NAMES[1])] == ["admit", "start", "cut", "drop"]


def test_a_group_that_is_not_where_its_row_says_is_not_moved() -> None:
    ledger = memory_ledger()
    book = GroupBook(Log(), ledger)
    begin(book)
    ledger._connection.execute("UPDATE groups SET moves = 9 WHERE group_id = ?", (NAMES[1],))
    with pytest.raises(InvariantBroken, match="1 groups are not where they were"):
        book.cut(NAMES[1])
    old = ledger.row(NAMES[0])
    book.cut(NAMES[0])
    with pytest.raises(InvariantBroken, match="is not inflight any more"), book.transaction():
        ledger.move(old, GroupEvent.CUT, GroupState.PARTIAL, None, None)
    with pytest.raises(InvariantBroken, match="taken twice"):
        book.admit(fresh(2), 0)
    book.drop(NAMES[2], "why")
    with pytest.raises(InvariantBroken, match="taken twice"):
        book.admit(fresh(2), 0)
    assert ledger.counts[GroupState.DROPPED] == 1 and ledger.counts[GroupState.WAITING] == 0
