"""What was written and not told is told by the next incarnation, wherever the log was cut off."""

from __future__ import annotations

import pytest

from tests.unit.rollout.ledger_parts import fresh, prompt, whole
from tests.unit.rollout.parts import Log, memory_ledger
from turnout.core.events import (
    GroupCompleted,
    GroupCut,
    GroupDropped,
    GroupRequeued,
    GroupTaken,
    GroupTrained,
)
from turnout.rollout.book import GroupBook
from turnout.rollout.untold import untold


def lived() -> tuple[GroupBook, Log]:
    """Groups of every kind: 0 trained at step 0, 1 dropped, 2 requeued, 3 complete, 4 waiting."""
    book = GroupBook(log := Log(), memory_ledger())
    for ordinal in range(5):
        book.admit(fresh(ordinal), 0)
    for ordinal in range(4):
        book.start(fresh(ordinal).group_id)
    for ordinal in (0, 3):
        book.complete(whole(ordinal))
    book.drop(fresh(1).group_id, "why")
    book.requeue(fresh(2).group_id, prompt(2), 0, "stale")
    book.take(0, [whole(0)])
    book.train([GroupTrained(whole(0).group_id, 0, [], 0)])
    return book, log


def test_a_log_that_is_whole_lacks_nothing() -> None:
    book, log = lived()
    assert untold(book.ledger, log.events) == []


@pytest.mark.parametrize("lost", range(11))
def test_each_event_that_was_lost_is_told_as_it_was(lost: int) -> None:
    book, log = lived()
    missing = log.events[lost]
    again = untold(book.ledger, log.events[:lost] + log.events[lost + 1 :])
    assert again == ([] if isinstance(missing, GroupTrained) else [missing])


def test_a_group_of_which_nothing_was_told_is_told_in_order() -> None:
    book, log = lived()
    again = untold(book.ledger, [])
    assert [type(e) for e in again if e.group == fresh(0).group_id] == [GroupTaken, GroupCompleted]
    assert [type(e) for e in again if e.group == fresh(1).group_id] == [GroupTaken, GroupDropped]
    assert [type(e) for e in again if e.group == fresh(2).group_id] == [GroupTaken, GroupRequeued]
    assert {repr(e) for e in again} == {repr(e) for e in log.events if not isinstance(e, GroupTrained)}


def test_a_group_in_flight_that_nobody_was_told_of_is_told_as_cut() -> None:
    """The next incarnation cuts it, and RunStarted tells that of those only that were known."""
    book, _ = lived()
    book.admit(fresh(7), 1)
    book.start(fresh(7).group_id)
    again = untold(book.ledger, [])
    assert [type(e) for e in again if e.group == fresh(7).group_id] == [GroupTaken, GroupCut]
