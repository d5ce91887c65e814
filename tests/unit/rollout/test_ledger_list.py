"""Pages of groups by state, cause and step; one member; attempts; a scan that takes too long is broken off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.rollout.ledger_parts import LABELS, file_ledger, fresh, prompt, whole
from tests.unit.rollout.parts import Log
from turnout.core.errors import DeadlineExceeded
from turnout.core.events import GroupTrained
from turnout.core.version import WeightVersion
from turnout.rollout import ledger_list
from turnout.rollout.book import GroupBook
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger_list import LedgerList, Wanted


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerList:
    """Groups 0 to 5: 0 and 1 train in step 0, 2 is dropped, 3 sent back, the others are under way; beside the
    writer."""
    writer = file_ledger(tmp_path)
    book = GroupBook(Log(), writer)
    writer.put_version(WeightVersion(0, 1, "00000000000000aa" + "0" * 16), 3, "committed")
    for ordinal in range(6):
        book.admit(fresh(ordinal), 0)
        book.start(fresh(ordinal).group_id)
    done = [whole(0), whole(1)]
    for group in done:
        book.complete(group)
    book.drop("g00000002.0", "stale: lag 3")
    book.requeue("g00000003.0", prompt(3), 0, "tool failed")
    book.take(0, done)
    book.train([GroupTrained(group.group_id, 0, [], 0) for group in done])
    return LedgerList.of(tmp_path / "ledger.sqlite")


def names(ledger: LedgerList, **wanted: object) -> list[str]:
    return [row.group_id[7:] for row in ledger.page(Wanted(**wanted))]  # type: ignore[arg-type]


def test_pages_newest_first(ledger: LedgerList) -> None:
    assert names(ledger, limit=3) == ["05.0", "04.0", "03.1"]
    assert names(ledger, limit=3, below="g00000003.1") == ["03.0", "02.0", "01.0"]
    assert names(ledger, state=GroupState.TRAINED) == ["01.0", "00.0"]
    assert names(ledger, cause="stale: lag 3") == ["02.0"]
    assert names(ledger, state=GroupState.TRAINED, cause="stale: lag 3") == []
    assert names(ledger, limit=0) == ["05.0"]


def test_pages_of_a_step(ledger: LedgerList) -> None:
    assert names(ledger, step=0) == ["00.0", "01.0"]
    assert names(ledger, step=0, below="g00000000.0") == ["01.0"]
    assert names(ledger, step=0, state=GroupState.DROPPED) == names(ledger, step=7) == []


def test_one_member_attempts_states_and_versions(ledger: LedgerList) -> None:
    member = ledger.member("g00000001.0", 1)
    assert member is not None and member.response_ids == whole(1).trajectories[1].response_ids
    assert ledger.member("g00000001.0", 7) is None and ledger.member("g00000002.0", 0) is None
    assert [(row.attempt, row.state.value) for row in ledger.sisters("g00000003.1")] == [
        (0, "requeued"),
        (1, "waiting"),
    ]
    assert ledger.states() == {"dropped": 1, "inflight": 2, "requeued": 1, "trained": 2, "waiting": 1}
    assert ledger.version_steps({LABELS[0], "absent"}) == {LABELS[0]: 3}


def test_a_scan_is_broken_off(ledger: LedgerList, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_list, "SCAN_S", -1.0)
    monkeypatch.setattr(ledger_list, "STEPS", 1)
    with pytest.raises(DeadlineExceeded, match="groups that fit"):
        ledger.page(Wanted())
    assert ledger.member("g00000001.0", 1) is not None
