"""trace.json is what Perfetto asks of Chrome's trace format, bounded, and says what it leaves out."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.unit.observe.test_timeline import SYNC
from turnout.core.events import (
    EngineFenced,
    EngineLost,
    EngineReady,
    EngineWorked,
    GroupTaken,
    PhaseEnded,
    VersionAttested,
    VersionPrepared,
    VersionPublished,
)
from turnout.observe import trace as module
from turnout.observe.timeline import Timed
from turnout.observe.trace import trace

ASYNC: list[Timed] = [
    (0.0, EngineReady("engine-0", "", 1, "none")),
    (0.5, GroupTaken("g", "p", 0)),
    (4.0, VersionPublished("v1", 0, 1, "00", 1, 10, ["engine-0"])),
    (5.0, VersionPrepared("engine-0", "v1")),
    (6.0, VersionAttested("engine-0", "v1", "00", "memory")),
    (6.0, PhaseEnded("update", "activate", 0.5)),
    (9.0, EngineWorked("engine-0", 8.5, 3)),
    (9.2, EngineFenced("engine-0", "", "no answer")),
    (9.5, EngineLost("engine-0", "rollout", "v1", "its process ended")),
]


def rows(events: list[Timed], phase: str) -> list[dict[str, Any]]:
    made = json.loads(trace(events, "a run"))
    assert made["displayTimeUnit"] == "ms"
    return [row for row in made["traceEvents"] if row["ph"] == phase]


@pytest.mark.parametrize("events", [SYNC, ASYNC, [*SYNC, *((at + 100, event) for at, event in SYNC)]])
def test_events_of_a_thread_do_not_overlap_and_every_thread_has_a_name(events: list[Timed]) -> None:
    complete = rows(events, "X")
    assert complete and all(type(row["ts"]) is int and row["dur"] >= 0 <= row["ts"] for row in complete)
    named = {row["tid"]: row["args"]["name"] for row in rows(events, "M") if row["name"] == "thread_name"}
    assert {row["tid"] for row in complete} == set(named)
    for lane, name in named.items():
        own = sorted((row["ts"], row["ts"] + row["dur"]) for row in complete if row["tid"] == lane)
        assert all(one[1] <= other[0] for one, other in pairwise(own)), name


def test_work_and_weights_of_an_engine_have_lanes_of_their_own_and_the_bubble_shows() -> None:
    named = {row["tid"]: row["args"]["name"] for row in rows(SYNC, "M") if row["name"] == "thread_name"}
    assert list(named.values()) == ["trainer", "update", "evaluate", "engine-0", "engine-0 weights"]
    idle = [(named[row["tid"]], row["dur"]) for row in rows(SYNC, "X") if row["name"] == "idle"]
    assert ("trainer", 5_500_000) in idle and ("engine-0", 4_000_000) in idle
    waits = [row["args"] for row in rows(SYNC, "X") if row["name"] == "idle" and "args" in row]
    assert waits[0] == {"waits_for": "rollout"}


def test_what_would_overlap_on_a_lane_gets_one_more() -> None:
    events: list[Timed] = [
        (0.0, EngineReady("e", "", 1, "none")),
        (1.0, EngineFenced("e", "", "no answer")),
        (2.0, VersionPublished("v1", 0, 1, "00", 1, 10, ["e"])),
        (2.0, EngineWorked("e", 0.5, 1)),
        (4.0, VersionAttested("e", "v0", "00", "memory")),
        (6.0, VersionPrepared("e", "v1")),
        (7.0, VersionAttested("e", "v1", "00", "memory")),
    ]
    named = {row["tid"]: row["args"]["name"] for row in rows(events, "M") if row["name"] == "thread_name"}
    found = {(named[row["tid"]], row["name"]) for row in rows(events, "X")}
    beside = {("e weights", "fenced"), ("e weights 2", "prepare")}
    assert found == {("e", "idle"), ("e", "rollout")} | beside


def test_counters_and_marks() -> None:
    found = {row["name"]: (row["ts"], row["args"]["value"]) for row in rows(ASYNC, "C")}
    assert found == {"groups in flight": (500_000, 1), "buffer": (0, 0), "slots": (500_000, 1)}
    assert [row["name"] for row in rows(ASYNC, "i")] == ["engine-0 lost in rollout: its process ended"]


def test_a_long_run_keeps_its_newest_part_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPANS_MAX", 20)
    monkeypatch.setattr(module, "POINTS_MAX", 5)
    events: list[Timed] = [(0.0, EngineReady("engine-0", "", 1, "none"))]
    for step in range(100):
        events += [
            (step + 0.1, GroupTaken(f"g{step}", "p", 0)),
            (step + 0.5, PhaseEnded("run", "train", 0.4)),
        ]
    made = json.loads(trace(events, "a run"))
    complete = [row for row in made["traceEvents"] if row["ph"] == "X"]
    assert len(complete) == 20 and max(row["ts"] + row["dur"] for row in complete) == 99_500_000
    left_out = made["otherData"]["left_out"]
    assert left_out.endswith(" s") and int(left_out.split()[0]) > 100
    assert next(row["name"] for row in made["traceEvents"] if row["ph"] == "i") == f"{left_out} are left out"
    points = [row for row in made["traceEvents"] if row["ph"] == "C" and row["name"] == "slots"]
    assert len(points) <= 6 and points[-1]["args"]["value"] == 100


def test_a_run_without_events_is_an_empty_trace() -> None:
    assert [row["ph"] for row in json.loads(trace([], "a run"))["traceEvents"]] == ["M"]
