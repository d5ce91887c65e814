"""The event log: one writer, whole lines, torn ends."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnout.core.errors import ConfigError, DataError, InvariantBroken
from turnout.core.events import KINDS, GroupDropped, GroupTaken, StepTrained, from_json, to_json
from turnout.observe.eventlog import EventLog, read_events


class Clock:
    def __init__(self):
        self.time = 100.0

    def wall(self):
        self.time += 0.5
        return self.time

    now = wall


EVENTS = [
    GroupTaken("g1", "p\u2028\u2029\u0085\x0b\x1c\r1", 0),
    GroupDropped("g1", "a\nb"),
    StepTrained(0, 1, 64, 1),
]


def test_dat_10_what_is_written_is_read(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, Clock()) as log:
        for event in EVENTS:
            log.emit(event)
            assert log.size == path.stat().st_size, "the event is with the operating system when emit returns"
    assert list(read_events(path)) == [(100.5 + i / 2, e) for i, e in enumerate(EVENTS)]


def test_a_second_writer_is_refused_and_the_first_goes_on(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, Clock()) as log:
        with pytest.raises(ConfigError, match="another run writes it"):
            EventLog(path, Clock())
        log.emit(EVENTS[0])
    with EventLog(path, Clock()) as log:
        log.emit(EVENTS[1])
    assert [event for _, event in read_events(path)] == EVENTS[:2]


@given(cut=st.integers(1, 400), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_log_cut_anywhere_loses_only_the_event_that_was_cut(tmp_path_factory, cut, data):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with EventLog(path, Clock()) as log:
        for event in EVENTS:
            log.emit(event)
    whole = path.read_bytes()
    cut = min(cut, len(whole))
    path.write_bytes(whole[:-cut])
    kept = whole[:-cut].count(b"\n")
    told = []
    assert [event for _, event in read_events(path, told.append)] == EVENTS[:kept]
    torn = len(whole[:-cut]) - (whole[:-cut].rfind(b"\n") + 1)
    assert bool(told) == (torn > 0)
    with EventLog(path, Clock()) as log:
        assert log.torn_bytes == torn
        log.emit(EVENTS[2])
    assert [event for _, event in read_events(path, told.append)] == [*EVENTS[:kept], EVENTS[2]]


def test_a_long_torn_end_is_cut(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 200_000)
    with EventLog(path, Clock()) as log:
        assert (log.size, log.torn_bytes) == (0, 200_000)


@pytest.mark.parametrize(
    "bad", ['{"event": "Nonsense", "at": 1}', '{"event": "GroupTaken", "at": 1}', "[]", "x", "{}"]
)
def test_a_bad_line_in_the_middle_is_told_with_its_number(tmp_path, bad):
    path = tmp_path / "events.jsonl"
    good = json.dumps(to_json(EVENTS[0], 1.0))
    path.write_text(f"{good}\n{bad}\n{good}\n")
    with pytest.raises(DataError, match=r"events\.jsonl:2"):
        list(read_events(path))


def test_a_number_that_is_not_finite_never_reaches_the_log(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, Clock()) as log, pytest.raises(InvariantBroken, match="EvalDone"):
        log.emit(KINDS["EvalDone"]("a", "v", 0, float("nan"), 1, 0))
    assert path.read_bytes() == b""


def test_every_kind_survives_the_file():
    for event in EVENTS:
        assert from_json(json.loads(json.dumps(to_json(event, 1.0)))) == event


def test_a_successor_leaves_a_writer_that_sleeps_behind_and_what_that_one_writes_later_is_read_by_nobody(
    tmp_path, caplog
):
    """As after SIGSTOP: the ledger has another owner by then, which the caller has made sure of."""
    path = tmp_path / "events.jsonl"
    with EventLog(path, Clock()) as old:
        old.emit(GroupDropped("g1", "before"))
        with EventLog(path, Clock(), take_over=True) as new:
            new.emit(GroupDropped("g2", "successor"))
            old.emit(GroupDropped("g3", "woke up"))
            new.emit(GroupDropped("g4", "successor"))
            with pytest.raises(ConfigError, match="another run writes it"):
                EventLog(path, Clock())
    assert "left behind" in caplog.text
    assert [event.group for _, event in read_events(path)] == ["g1", "g2", "g4"]
    assert [name.name for name in tmp_path.iterdir()] == ["events.jsonl"]
