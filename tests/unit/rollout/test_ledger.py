"""The ledger: what was said to be written is there, all of a transaction or nothing, and only one owner writes."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.rollout.ledger_parts import LABELS, as_killed, claim, file_ledger, fresh, part, prompt, whole
from tests.unit.rollout.parts import Log, memory_ledger
from turnout.core.errors import (
    ConfigError,
    DataError,
    IllegalTransition,
    InvariantBroken,
    LedgerError,
    OwnerLost,
)
from turnout.core.events import (
    GroupCompleted,
    GroupCut,
    GroupRequeued,
    GroupResumed,
    GroupTaken,
    GroupTrained,
)
from turnout.core.routed import RoutedExperts
from turnout.core.types import Finish, RolloutGroup, Trajectory
from turnout.core.version import WeightVersion
from turnout.placement.real import RealClock
from turnout.rollout import ledger_read, ledger_schema
from turnout.rollout.book import GroupBook
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_owner import LEASE_S, Claim
from turnout.rollout.ledger_read import LedgerReader
from turnout.rollout.ledger_rows import Piece
from turnout.rollout.ledger_schema import MIGRATIONS, open_database, read_database


def begun(book: GroupBook, *ordinals: int) -> None:
    for ordinal in ordinals:
        book.admit(fresh(ordinal), 0)
        book.start(fresh(ordinal).group_id)


def trained(book: GroupBook, step: int, *ordinals: int) -> None:
    begun(book, *ordinals)
    groups = [whole(ordinal) for ordinal in ordinals]
    for group in groups:
        book.complete(group)
    book.take(step, groups)
    book.train([GroupTrained(group.group_id, step, [], 0) for group in groups])


class Later(RealClock):
    """A wall that a test moves."""

    def __init__(self) -> None:
        self.at = 1000.0

    def wall(self) -> float:
        return self.at


def test_a_group_comes_back_as_it_was_stored_bit_for_bit(tmp_path: Path) -> None:
    book = GroupBook(Log(), file_ledger(tmp_path))
    begun(book, 7)
    book.complete(whole(7, members=3, tokens=9))
    killed = file_ledger(as_killed(tmp_path, tmp_path / "killed"))
    (stored,) = killed.open_groups()
    assert stored.row.state is GroupState.COMPLETED
    assert stored.group(prompt(7)) == whole(7, members=3, tokens=9)
    with pytest.raises(DataError, match=r"prompt 7 is p8, group g00000007\.0 was made of p7"):
        stored.group(prompt(8))


def test_pieces_of_a_member_are_joined_and_replaced_by_the_whole(tmp_path: Path) -> None:
    ledger = file_ledger(tmp_path)
    book = GroupBook(log := Log(), ledger)
    begun(book, 0)
    name = fresh(0).group_id
    ledger.journal([Piece(name, 0, 0, part(0, 0, 5)), Piece(name, 1, 0, part(1, 0, 2))])
    ledger.journal([Piece(name, 0, 5, part(0, 5, 3)), Piece(name, 1, 2, part(1, 2, 0, Finish.STOP))])
    book.cut(name)
    stored = file_ledger(as_killed(tmp_path, tmp_path / "killed")).open_groups()[0]
    members = stored.members
    assert members[0] == part(0, 0, 8)
    assert (members[1].finish, members[1].reward, members[1].text) == (Finish.STOP, 1 / 7, "answer 1")
    assert members[1].response_ids == part(1, 0, 2).response_ids
    book.resume(stored.group(fresh(0).prompt))
    book.complete(whole(0))
    assert ledger.members(name) == dict(enumerate(whole(0).trajectories))
    assert log.of(GroupCut) == [GroupCut(name, 10)]
    assert log.of(GroupResumed) == [GroupResumed(name, 10, 1)]


def test_routed_experts_are_kept_and_pieces_without_have_none(tmp_path: Path) -> None:
    ledger, name = file_ledger(tmp_path), fresh(0).group_id
    begun(GroupBook(Log(), ledger), 0)
    rows = RoutedExperts(3, bytes(range(12)), bytes(range(18)))
    ledger.journal([Piece(name, 0, 0, replace(part(0, 0, 3), routed=rows)), Piece(name, 0, 3, part(0, 3, 2))])
    (member,) = ledger.members(name).values()
    assert member.routed == RoutedExperts(3, rows.prompt, rows.rows + b"\xff" * 12)
    assert member.cut(3).routed == rows and len(member.routed) == 5


def test_a_piece_is_written_once_in_flight_and_without_a_gap() -> None:
    ledger = memory_ledger()
    book = GroupBook(Log(), ledger)
    begun(book, 0)
    name = fresh(0).group_id
    ledger.journal([Piece(name, 0, 0, part(0, 0, 5))])
    with pytest.raises(InvariantBroken, match="twice"):
        ledger.journal([Piece(name, 1, 0, part(1, 0, 1)), Piece(name, 0, 0, part(0, 0, 5))])
    assert list(ledger.members(name)) == [0], "the piece before the doubled one must not stay"
    ledger.journal([Piece(name, 0, 6, part(0, 6, 1))])
    with pytest.raises(InvariantBroken, match="member 0: a piece at 6 after 5 tokens"):
        ledger.members(name)
    book.drop(name, "why")
    with pytest.raises(InvariantBroken, match="1 pieces belong to groups not in flight"):
        ledger.journal([Piece(name, 0, 7, part(0, 7, 1))])


def test_nothing_of_a_failed_transaction_is_there_or_told() -> None:
    ledger = memory_ledger()
    book = GroupBook(log := Log(), ledger)
    begun(book, 0)
    told = len(log.events)
    with pytest.raises(IllegalTransition), book.transaction():
        book.admit(fresh(1), 0)
        book.complete(whole(0))
        book.take(0, [whole(0)])
        book.start(fresh(0).group_id)
    assert (len(log.events), ledger.counts) == (told, Counter({GroupState.INFLIGHT: 1}))
    assert (ledger.count_states(), ledger.members(fresh(0).group_id)) == ({GroupState.INFLIGHT: 1}, {})
    assert ledger.batch(0) is None and ledger.find(fresh(1).group_id) is None
    assert len(ledger.history(fresh(0).group_id)) == 2


def test_half_of_a_nested_transaction_never_stays() -> None:
    ledger = memory_ledger()
    book = GroupBook(log := Log(), ledger)
    with pytest.raises(InvariantBroken, match="failed, and the rest went on"), book.transaction():
        begun(book, 0)
        with pytest.raises(IllegalTransition):
            book.start(fresh(0).group_id)
    assert (log.events, ledger.count_states()) == ([], {})
    begun(book, 0)
    assert ledger.counts == {GroupState.WAITING: 0, GroupState.INFLIGHT: 1}


def test_events_are_told_after_they_are_written() -> None:
    ledger = memory_ledger()

    class Reader(Log):
        def emit(self, event: object) -> None:
            assert not ledger._connection.in_transaction
            super().emit(event)

    book = GroupBook(log := Reader(), ledger)
    with book.transaction():
        begun(book, 0, 1)
        assert log.events == []
    assert [event.group for event in log.of(GroupTaken)] == [fresh(0).group_id, fresh(1).group_id]
    book.complete(whole(0))
    assert len(log.of(GroupCompleted)) == 1


def test_counts_that_do_not_add_up_stop_the_transaction() -> None:
    ledger = memory_ledger()
    book = GroupBook(Log(), ledger)
    with pytest.raises(InvariantBroken, match="1 groups were admitted"), book.transaction():
        book.admit(fresh(0), 0)
        ledger.counts[GroupState.WAITING] -= 1
    assert ledger.count_states() == {}


def test_writing_outside_a_transaction_is_refused() -> None:
    ledger = memory_ledger()
    for write in (lambda: ledger.add(fresh(0), 0), lambda: ledger.store(whole(0))):
        with pytest.raises(InvariantBroken, match="in a transaction only"):
            write()


def test_a_requeued_group_ends_and_its_prompt_begins_anew() -> None:
    ledger = memory_ledger()
    book = GroupBook(log := Log(), ledger)
    begun(book, 3)
    book.complete(whole(3))
    again = book.requeue(fresh(3).group_id, prompt(3), 4, "stale")
    assert again == fresh(3, attempt=1)
    assert log.of(GroupRequeued) == [GroupRequeued("g00000003.0", "stale", "g00000003.1")]
    assert log.events[-1] == GroupTaken("g00000003.1", "p3", 4)
    assert [(row.state.value, row.cause) for row in ledger.attempts(3)] == [
        ("requeued", "stale"),
        ("waiting", None),
    ]
    assert ledger.members("g00000003.0") == {}, "tokens of an attempt that has ended are of no use"
    assert [piece["reward"] for piece in ledger.pieces("g00000003.0")] == [
        pytest.approx(30 / 7),
        pytest.approx(31 / 7),
    ]
    assert book.counts() == {"taken": 2, "trained": 0, "dropped": 0, "requeued": 1, "lost": 0}


def test_a_resume_goes_back_behind_its_step(tmp_path: Path) -> None:
    ledger = file_ledger(tmp_path)
    book = GroupBook(Log(), ledger)
    for step in range(4):
        trained(book, step, 2 * step, 2 * step + 1)
    begun(book, 8, 9, 10)
    ledger.journal([Piece(fresh(8).group_id, 0, 0, part(80, 0, 5))])
    book.complete(whole(9))
    book.take(4, [whole(9)])
    book.admit(fresh(11), 4)
    resumed = file_ledger(as_killed(tmp_path, tmp_path / "killed"))
    again = GroupBook(log := Log(), resumed)
    again.roll_back(2)
    assert log.events == [], "the start of the incarnation tells it"
    states = {row.ordinal: row.state.value for row in resumed.open_rows()}
    assert states == dict.fromkeys((4, 5, 6, 7, 9), "completed") | {
        8: "partial",
        10: "partial",
        11: "waiting",
    }
    assert resumed.open_groups()[0].group(prompt(4)) == whole(4)
    assert {row.trained for row in resumed.open_rows()} == {None}
    assert again.counts() == {"taken": 12, "trained": 4, "dropped": 0, "requeued": 0, "lost": 0}
    assert resumed.counts == resumed.count_states()
    assert [move.event for move in resumed.history(fresh(4).group_id)][-2:] == ["train", "restore"]
    assert resumed.history(fresh(4).group_id)[-1].incarnation == 1
    batch = resumed.batch(3)
    assert batch is not None and (batch.incarnation, batch.group_ids) == (
        0,
        (fresh(6).group_id, fresh(7).group_id),
    )
    assert resumed.next_ordinal() == 12


def test_versions_that_a_resume_leaves_behind_are_abandoned(tmp_path: Path) -> None:
    ledger = file_ledger(tmp_path)
    made = [WeightVersion(0, n, f"{n:032x}") for n in range(5)]
    for step, version in enumerate(made):
        ledger.put_version(version, step, "published")
        if step < 4:
            ledger.put_version(version, step, "committed")
    for step in (2, 3):  # of updates that failed
        ledger.put_version(WeightVersion(0, 3 + step, "f" * 32), step, "aborted")
    resumed = file_ledger(as_killed(tmp_path, tmp_path / "killed"))
    resumed.put_version(WeightVersion(1, 7, "5" * 32), 2, "committed")
    assert resumed.abandon_versions(2) == [made[3].label, made[4].label]
    states = ["committed"] * 3 + ["abandoned"] * 2 + ["aborted", "void", "committed"]
    assert [v.state for v in resumed.versions()] == states
    assert [v.step for v in resumed.versions()] == [0, 1, 2, 3, 4, 2, 3, 2]


def test_a_version_whose_weights_are_made_again_stands_until_a_resume_goes_back_behind_it(
    tmp_path: Path,
) -> None:
    made = [WeightVersion(0, n, f"{n:032x}") for n in range(4)]
    ledger = file_ledger(tmp_path)
    for step, version in enumerate(made):
        ledger.put_version(version, step, "committed")
    resumed = file_ledger(as_killed(tmp_path, tmp_path / "1"))
    assert resumed.abandon_versions(1) == [made[2].label, made[3].label]
    for step, root in ((2, made[2].root), (3, made[2].root)):  # those of step 3 came out otherwise
        resumed.remade_versions(step, root)
    states = ["committed", "committed", "remade", "abandoned"]
    assert [v.state for v in resumed.versions()] == states
    for step, back in ((2, []), (1, [made[2].label])):
        again = file_ledger(as_killed(tmp_path / "1", tmp_path / f"behind {step}"))
        assert again.abandon_versions(step) == back


def test_tokens_go_once_two_newer_checkpoints_cover_them_and_rows_stay() -> None:
    ledger = memory_ledger()
    book = GroupBook(Log(), ledger)
    for step in range(4):
        trained(book, step, 2 * step, 2 * step + 1)
    ledger.put_checkpoint(2, LABELS[0])
    trained(book, 4, 8, 9)
    assert all(ledger.members(fresh(n).group_id) for n in range(10)), "one checkpoint covers nothing"
    ledger.put_checkpoint(4, LABELS[1])
    for n in range(10, 16):
        trained(book, n, n)
    kept = [n for n in range(10) if ledger.members(fresh(n).group_id)]
    assert kept == [4, 5, 6, 7, 8, 9], "a resume at step 2 needs all that was trained since"
    (first, second) = ledger.pieces(fresh(0).group_id)
    assert (first["versions"], first["engines"]) == (
        [[3, LABELS[0]], [1, LABELS[1]]],
        [[3, "engine-0"], [1, "engine-1"]],
    )
    assert (second["finish"], second["reward"]) == ("stop", pytest.approx(1 / 7))
    assert ledger.count_states()[GroupState.TRAINED] == 16
    with pytest.raises(DataError, match=r"g00000000\.0, trained at step 0, are forgotten"):
        book.roll_back(0)
    assert ledger.count_states()[GroupState.TRAINED] == 16


def test_a_group_that_a_batch_gave_back_keeps_its_tokens() -> None:
    ledger = memory_ledger()
    book = GroupBook(Log(), ledger)
    begun(book, 0)
    book.complete(whole(0))
    book.take(0, [whole(0)])
    book.give_back(fresh(0).group_id)
    for step in (1, 2):
        ledger.put_checkpoint(step, LABELS[0])
    for n in range(1, 6):
        trained(book, n, n)
    assert ledger.members(fresh(0).group_id)


def test_a_checkpoint_gets_a_copy_of_what_a_resume_needs(tmp_path: Path) -> None:
    for ledger in (file_ledger(tmp_path), memory_ledger()):
        book = GroupBook(Log(), ledger)
        trained(book, 0, 0, 1)
        begun(book, 2, 3)
        book.complete(whole(2))
        ledger.journal([Piece(fresh(3).group_id, 0, 0, part(30, 0, 5))])
        ledger.put_meta("run_id", "r")
        ledger.put_version(WeightVersion(0, 1, "1" * 32), 1, "committed")
        folder = tmp_path / ("a" if ledger.path else "b")
        folder.mkdir()
        ledger.backup(folder / "ledger.sqlite")
        assert [path.name for path in folder.iterdir()] == ["ledger.sqlite"], "one file, nothing beside it"
        with pytest.raises(DataError, match="holds something already"):
            ledger.backup(folder / "ledger.sqlite")
        copied = file_ledger(folder)
        assert copied.incarnation == 1
        assert copied.open_groups() == ledger.open_groups()
        assert copied.counts == ledger.counts
        assert copied.members(fresh(0).group_id) == {}, "no resume needs tokens of a group that was trained"
        assert copied.history(fresh(3).group_id) == ledger.history(fresh(3).group_id)
        assert (copied.meta("run_id"), copied.versions(), copied.batches(0)) == (
            "r",
            ledger.versions(),
            ledger.batches(0),
        )


def test_a_later_incarnation_stops_the_older_writer_before_its_next_write(tmp_path: Path) -> None:
    old = file_ledger(tmp_path, pid=1)
    book = GroupBook(log := Log(), old)
    begun(book, 0)
    told = len(log.events)
    new = file_ledger(tmp_path, pid=2)
    assert (old.incarnation, new.incarnation) == (0, 1)
    with pytest.raises(OwnerLost, match=r"owned by incarnation 1 \(process 2 on here\): incarnation 0 stops"):
        book.complete(whole(0))
    with pytest.raises(OwnerLost):
        old.put_meta("key", "value")
    assert (len(log.events), new.row(fresh(0).group_id).state) == (told, GroupState.INFLIGHT)
    GroupBook(Log(), new).complete(whole(0))


def test_an_owner_that_lives_is_not_robbed(tmp_path: Path) -> None:
    clock = Later()
    path = tmp_path / "ledger.sqlite"

    def take(host: str, lives: bool) -> Ledger:
        return Ledger(open_database(path), Claim(clock, host, 2, None, lambda pid: lives))

    first = take("here", True)
    with pytest.raises(ConfigError, match="process 2 on here writes it"):
        take("here", True)
    with pytest.raises(ConfigError, match=r"on here writes it .* or wait 60 s"):
        take("there", False)
    clock.at += LEASE_S / 2 + 1
    first.renew()
    clock.at += LEASE_S / 2 + 1
    with pytest.raises(ConfigError):
        take("there", False)
    clock.at += LEASE_S
    assert take("there", False).incarnation == 1, "a lease that nobody renewed is over"
    with pytest.raises(OwnerLost):
        first.renew()
    assert take("there", False).incarnation == 2, "its process is dead"
    take("there", False).close()
    assert take("elsewhere", True).incarnation == 4, "a ledger that was closed is free"


def test_an_incarnation_is_used_once(tmp_path: Path) -> None:
    assert file_ledger(tmp_path, incarnation=4).incarnation == 4
    with pytest.raises(InvariantBroken, match="incarnation 4 after 4"):
        file_ledger(tmp_path, incarnation=4)
    assert file_ledger(tmp_path).incarnation == 5


@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_full_disk_is_told_and_leaves_nothing_half_written(tmp_path: Path, where: str) -> None:
    ledger = file_ledger(tmp_path) if where == "file" else memory_ledger()
    book = GroupBook(log := Log(), ledger)
    begun(book, 0)
    told, states = len(log.events), ledger.count_states()
    pages = ledger._connection.execute("PRAGMA page_count").fetchone()[0]
    ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerError, match="can't be written: database or disk is full"):
        book.complete(whole(0, members=8, tokens=1000))
    assert (len(log.events), ledger.counts, ledger.count_states()) == (told, states, states)
    ledger._connection.execute("PRAGMA max_page_count = 1000000")
    book.complete(whole(0, members=8, tokens=1000))
    assert len(ledger.members(fresh(0).group_id)) == 8


def test_files_that_are_no_ledger_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    for content, why in (
        (b"not a database at all" * 100, "file is not a database"),
        (b"x", "is torn"),
    ):
        path.write_bytes(content)
        for opens in (open_database, read_database):
            with pytest.raises(DataError, match=rf"ledger\.sqlite: .*{why}"):
                opens(path)
        assert path.read_bytes() == content
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE groups (name TEXT)")
    other.close()
    before = path.read_bytes()
    for opens in (open_database, read_database):
        with pytest.raises(DataError, match="an SQLite file, but not a ledger"):
            opens(path)
    assert path.read_bytes() == before
    with pytest.raises(DataError, match="there is no such file"):
        read_database(tmp_path / "none.sqlite")


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    ledger = file_ledger(tmp_path)
    book = GroupBook(Log(), ledger)
    for n in range(20):
        trained(book, n, n)
    ledger.close()
    path = tmp_path / "ledger.sqlite"
    size = path.stat().st_size
    for keep in (size // 2, 5000, 100):
        torn = tmp_path / f"torn{keep}.sqlite"
        torn.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(DataError, match=f"torn{keep}"):
            open_database(torn)
    scratched = bytearray(path.read_bytes())
    scratched[4096 * 3 : 4096 * 4] = bytes(4096)
    path.write_bytes(scratched)
    with pytest.raises(DataError, match="is torn"):
        open_database(path)


def test_a_newer_schema_is_refused_by_its_number_and_an_older_one_brought_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = file_ledger(tmp_path)
    begun(GroupBook(Log(), ledger), 0)
    ledger.close()
    older = tmp_path / "older" / "ledger.sqlite"
    older.parent.mkdir()
    shutil.copy(tmp_path / "ledger.sqlite", older)
    newer = (*MIGRATIONS, "CREATE TABLE more (x TEXT); ALTER TABLE groups ADD COLUMN extra TEXT;")
    monkeypatch.setattr(ledger_schema, "MIGRATIONS", newer)
    with pytest.raises(DataError, match=r"schema version 2 of 3 -> resume the run: it migrates"):
        read_database(older)
    migrated = open_database(older)
    assert migrated.connection.execute("SELECT group_id, extra FROM groups").fetchall() == [
        ("g00000000.0", None)
    ]
    migrated.close()
    monkeypatch.undo()
    before = older.read_bytes()
    for opens in (open_database, read_database):
        with pytest.raises(DataError, match="schema version 3, this Turnout knows 2 -> update"):
            opens(older)
    assert older.read_bytes() == before
    broken = (*MIGRATIONS, "CREATE TABLE more (x TEXT); CREATE TABLE groups (y TEXT);")
    monkeypatch.setattr(ledger_schema, "MIGRATIONS", broken)
    with pytest.raises(DataError, match="can't be read: table groups already exists"):
        open_database(tmp_path / "ledger.sqlite")
    monkeypatch.undo()
    assert (
        open_database(tmp_path / "ledger.sqlite").connection.execute("SELECT count(*) FROM groups").fetchone()
    )


def test_a_network_file_system_gets_an_exclusive_ledger_with_a_rollback_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert ledger_schema.file_system(Path("/proc/self")) == "proc"
    monkeypatch.setattr(ledger_schema, "file_system", lambda folder: "nfs4")
    with caplog.at_level("INFO"):
        ledger = file_ledger(tmp_path)
    assert [record.message.split(": ")[1] for record in caplog.records] == [
        "exclusive mode, rollback journal"
    ]
    begun(GroupBook(Log(), ledger), 0)
    assert not (tmp_path / "ledger.sqlite-wal").exists()
    with pytest.raises(DataError, match="locked"):
        read_database(tmp_path / "ledger.sqlite")
    (tmp_path / "copy").mkdir()
    ledger.backup(tmp_path / "copy" / "ledger.sqlite")
    ledger.close()
    assert LedgerReader.of(tmp_path / "ledger.sqlite").find(fresh(0).group_id) is not None


def test_a_copy_that_fails_leaves_the_ledger_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = memory_ledger()
    book = GroupBook(Log(), ledger)
    begun(book, 0)
    monkeypatch.setitem(ledger_read._COPIED, "no_such_table", "")
    with pytest.raises(LedgerError, match=r"can't be copied to .*torn\.sqlite: no such table"):
        ledger.backup(tmp_path / "torn.sqlite")
    monkeypatch.undo()
    begun(book, 1)
    ledger.backup(tmp_path / "whole.sqlite")
    assert LedgerReader.of(tmp_path / "whole.sqlite").open_groups() == ledger.open_groups()


def test_a_reader_reads_beside_the_writer_and_never_writes(tmp_path: Path) -> None:
    ledger = file_ledger(tmp_path)
    book = GroupBook(Log(), ledger)
    begun(book, 0)
    reader = LedgerReader.of(tmp_path / "ledger.sqlite")
    book.complete(whole(0))
    assert reader.row(fresh(0).group_id).state is GroupState.COMPLETED
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._connection.execute("DELETE FROM groups")


def test_reading_a_ledger_at_rest_leaves_no_file_beside_it(tmp_path: Path) -> None:
    """Where the folder can't be written it could not make one either."""
    path = tmp_path / "ledger.sqlite"
    ledger = file_ledger(tmp_path)
    book = GroupBook(Log(), ledger)
    begun(book, 0)
    assert ledger_schema.state_of(path) == ledger_schema.state_of(path)
    live = ledger_schema.state_of(path)
    ledger.close()
    at_rest = ledger_schema.state_of(path)
    assert at_rest != live
    reader = LedgerReader.of(path)
    assert reader.find(fresh(0).group_id) is not None
    assert [one.name for one in tmp_path.iterdir()] == ["ledger.sqlite"]
    again = file_ledger(tmp_path)  # a resume: the reader's connection is out of date
    assert ledger_schema.state_of(path) != at_rest
    again.close()
    reader.close()
    assert [one.name for one in tmp_path.iterdir()] == ["ledger.sqlite"]


def test_a_ledger_that_can_not_be_opened_is_not_told_to_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_ledger(tmp_path).close()
    error = sqlite3.OperationalError("attempt to write a readonly database")
    error.sqlite_errorcode = sqlite3.SQLITE_READONLY_DIRECTORY

    def refuses(*_: object) -> None:
        raise error

    monkeypatch.setattr(ledger_schema, "_check_kind", refuses)
    with pytest.raises(DataError, match=r"readonly database -> .*copy the directory"):
        read_database(tmp_path / "ledger.sqlite")


def test_an_in_memory_ledger_goes_on_with_its_next_incarnation() -> None:
    database = open_database(None)
    first = Ledger(database, claim())
    begun(GroupBook(Log(), first), 0)
    database.connection.execute("BEGIN")
    database.connection.execute("DELETE FROM groups")
    second = Ledger(database, claim())
    assert (second.incarnation, second.counts) == (1, {GroupState.INFLIGHT: 1})
    with pytest.raises(OwnerLost):
        first.put_meta("a", "b")


def test_the_unbegun_member_has_no_tokens() -> None:
    ledger = memory_ledger()
    book = GroupBook(Log(), ledger)
    begun(book, 0)
    ledger.journal([Piece(fresh(0).group_id, 0, 0, Trajectory.unbegun(5))])
    assert ledger.members(fresh(0).group_id) == {0: Trajectory.unbegun(5)}


def test_a_group_of_empty_responses_comes_back_as_well() -> None:
    ledger = memory_ledger()
    book = GroupBook(Log(), ledger)
    begun(book, 0)
    empty = RolloutGroup(
        fresh(0).group_id, 0, 0, prompt(0), (part(0, 0, 0, Finish.STOP), part(1, 0, 0, Finish.STOP))
    )
    book.complete(empty)
    book.take(0, [empty])
    book.train([GroupTrained(empty.group_id, 0, [], 0)])
    book.roll_back(0)
    assert ledger.open_groups()[0].group(prompt(0)) == empty
