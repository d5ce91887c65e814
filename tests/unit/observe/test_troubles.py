"""What went wrong, by the events of a run."""

from __future__ import annotations

import json

from turnout.cli import doctor
from turnout.observe.troubles import MAX_LINES, troubles

LOST = {
    "event": "EngineLost", "at": 10.0, "engine": "engine-1", "phase": "rollout", "last_version": "v000003-aa",
    "reason": "process 7 of engine engine-1 ended: killed by SIGKILL; its log engines/engine-1.log ends: ...",
}  # fmt: skip
BACK = {"event": "EngineReady", "at": 15.0, "engine": "engine-1"}
STALE = {
    "event": "GroupDropped",
    "at": 16.0,
    "group": "g00000003.0",
    "reason": "stale: lag 2, --max-staleness 1",
}
STALL = {
    "event": "RunStalled",
    "at": 18.0,
    "line": "run -> rollout -> reward r: its score",
    "root": "reward r",
}


def test_an_engine_that_has_not_come_again_and_one_that_has():
    first = {"event": "EngineReady", "at": 1.0, "engine": "engine-1"}
    line = "engine-1 was lost in phase rollout: process 7 of engine engine-1 ended: killed by SIGKILL"
    assert troubles([first, LOST], 13.0) == [f"3 s ago: {line}; it has not come again"]
    assert troubles([first, LOST, BACK], 20.0) == [f"10 s ago: {line}; it served again after 5 s"]
    assert troubles([first], 20.0) == []


def test_groups_are_counted_by_reason_and_lines_are_in_order():
    other = {**STALE, "group": "g00000009.0", "at": 17.0}
    requeued = {"event": "GroupRequeued", "at": 30.0, "group": "g00000002.0", "reason": "cut", "attempt": "x"}
    assert troubles([LOST, BACK, STALE, other, STALL, requeued], 30.0)[1:] == [
        "13 s ago: 2 groups were dropped, the last g00000009.0: stale: lag 2, --max-staleness 1",
        "12 s ago: it stood still: run -> rollout -> reward r: its score",
        "0 s ago: 1 group was sent back to be sampled again, the last g00000002.0: cut",
    ]


def test_another_incarnation_begins_anew_and_lines_are_few():
    assert troubles([LOST, {"event": "RunStarted", "at": 20.0}, STALE], 7220.0) == [
        "2 h ago: 1 group was dropped, the last g00000003.0: stale: lag 2, --max-staleness 1"
    ]
    many = [{**STALE, "at": float(n), "reason": f"{n:03}" + "x" * 300} for n in range(50)]
    lines = troubles(many, 650.0)
    assert len(lines) == MAX_LINES and lines[-1].startswith("10 min ago") and max(map(len, lines)) < 250
    assert "049" in lines[-1]


def test_the_end_of_the_log_is_read_and_what_is_half_written_is_not(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    assert list(doctor.last_events(path)) == []
    path.write_text(
        "".join(json.dumps({"event": "x", "at": n}) + "\n" for n in range(100)) + '{"event": "tor'
    )
    assert [row["at"] for row in doctor.last_events(path)] == list(range(100))
    monkeypatch.setattr(doctor, "TAIL_BYTES", 100)
    assert [row["at"] for row in doctor.last_events(path)] == [97, 98, 99]
