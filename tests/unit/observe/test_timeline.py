"""Spans and counters are what the events say: of a sync step, an async one, lost engines, and a resumed run."""

from __future__ import annotations

from itertools import pairwise

import pytest

from turnout.core.events import (
    EngineFenced,
    EngineLost,
    EngineReady,
    EngineWorked,
    Event,
    GroupCompleted,
    GroupCut,
    GroupDropped,
    GroupResumed,
    GroupTaken,
    GroupTrained,
    MemoryReleased,
    PhaseEnded,
    RunEnded,
    RunStarted,
    StepTrained,
    VersionAttested,
    VersionCommitted,
    VersionPrepared,
    VersionPublished,
)
from turnout.core.waits import RUN, UPDATE
from turnout.observe.timeline import Count, Span, Timed, counts, spans

V1 = "v000001-00"


def started(resumed_at: int | None = None) -> RunStarted:
    return RunStarted("run", 0, 1, "sync", 0, resumed_at=resumed_at)


def published(version: str = V1, step: int = 1) -> VersionPublished:
    return VersionPublished(version, 0, step, "00", step, 1000, ["engine-0"], density=0.5)


SYNC: list[Timed] = [
    (100.0, started()),
    (100.0, EngineReady("engine-0", "http://x", 1, "none")),
    (101.0, PhaseEnded(RUN, "start", 1.0)),
    (105.0, EngineWorked("engine-0", 4.0, 8)),
    (105.5, PhaseEnded(RUN, "rollout", 4.5)),
    (108.5, PhaseEnded(RUN, "train", 3.0)),
    (109.0, published()),
    (109.0, PhaseEnded(RUN, "publish", 0.5)),
    (109.5, VersionPrepared("engine-0", V1)),
    (109.5, PhaseEnded(RUN, "prepare", 0.5)),
    (110.0, VersionAttested("engine-0", V1, "00", "memory")),
    (110.0, VersionCommitted(V1)),
    (110.0, PhaseEnded(RUN, "activate", 0.5)),
    (110.1, StepTrained(0, 2, 64, 1, [[0, 48], [1, 16]])),
    (111.1, PhaseEnded(RUN, "checkpoint", 1.0)),
    (113.0, PhaseEnded(RUN, "evaluate", 1.9)),
    (113.0, RunEnded("finished", "", [])),
]


def of(lane: str, events: list[Timed]) -> list[tuple[str, float, float]]:
    found = [span for span in spans(events) if span.lane == lane]
    return [(span.name, round(span.start, 3), round(span.end, 3)) for span in found]


def test_a_sync_step_shows_its_bubble_on_both_sides() -> None:
    assert of("trainer", SYNC) == [
        ("idle", 100.0, 105.5),
        ("train", 105.5, 108.5),
        ("publish", 108.5, 109.0),
        ("idle", 109.0, 110.1),
        ("checkpoint", 110.1, 111.1),
        ("idle", 111.1, 113.0),
    ]
    waits = [
        span.args.get("waits_for") for span in spans(SYNC) if span.name == "idle" and span.lane == "trainer"
    ]
    assert waits == ["rollout", "prepare", "evaluate"]
    assert of("engine-0", SYNC) == [
        ("idle", 100.0, 101.0),
        ("rollout", 101.0, 105.0),
        ("idle", 105.0, 109.0),
        ("prepare", 109.0, 109.5),
        ("activate", 109.5, 110.0),
        ("idle", 110.0, 113.0),
    ]
    assert of("evaluate", SYNC) == [("evaluate", 111.1, 113.0)]


def test_what_a_span_was_for_is_said() -> None:
    by_name = {(span.lane, span.name): span for span in spans(SYNC)}
    assert by_name["trainer", "train"].args == {"step": 0, "groups": 2, "tokens": 64}
    assert by_name["update", "activate"].args == {"version": V1, "bytes": 1000, "density": 0.5}
    assert by_name["update", "publish"].args["version"] == V1
    assert by_name["engine-0", "rollout"].args == {"requests": 8}
    assert by_name["engine-0", "prepare"].args == {"version": V1}


def test_an_update_beside_the_loop_leaves_the_trainer_at_work() -> None:
    events: list[Timed] = [
        (0.0, started()),
        (1.0, PhaseEnded(RUN, "rollout", 1.0)),
        (2.0, PhaseEnded(RUN, "train", 1.0)),
        (2.5, published()),
        (2.5, PhaseEnded(RUN, "publish", 0.5)),
        (3.0, PhaseEnded(UPDATE, "prepare", 0.5)),
        (3.5, PhaseEnded(UPDATE, "activate", 0.5)),
        (4.5, PhaseEnded(RUN, "train", 2.0)),
    ]
    assert of("trainer", events) == [
        ("idle", 0.0, 1.0),
        ("train", 1.0, 2.0),
        ("publish", 2.0, 2.5),
        ("train", 2.5, 4.5),
    ]
    assert of("update", events) == [("publish", 2.0, 2.5), ("prepare", 2.5, 3.0), ("activate", 3.0, 3.5)]


def test_the_moment_of_telling_is_no_overlap_and_an_empty_phase_no_span() -> None:
    events: list[Timed] = [
        (1.0, PhaseEnded(RUN, "train", 1.0)),
        (1.5, PhaseEnded(RUN, "publish", 0.5002)),
        (1.5, PhaseEnded(UPDATE, "drain", 0.0001)),
        (1.5, PhaseEnded(RUN, "evaluate", 0.0)),
    ]
    assert of("trainer", events) == [("train", 0.0, 1.0), ("publish", 1.0, 1.5)]
    assert of("update", events) == [("publish", 1.0, 1.5)] and of("evaluate", events) == []


def test_parts_of_work_without_a_break_are_one_span() -> None:
    parts = [(5.0, 3), (10.0, 2), (12.0, 1), (20.0, 4)]
    seconds = [5.0, 5.0, 2.0, 1.0]
    events: list[Timed] = [(0.0, EngineReady("e", "", 1, "none"))]
    events += [(at, EngineWorked("e", long, number)) for (at, number), long in zip(parts, seconds)]
    assert of("e", events) == [("rollout", 0.0, 12.0), ("idle", 12.0, 19.0), ("rollout", 19.0, 20.0)]
    assert [span.args["requests"] for span in spans(events) if span.name == "rollout"] == [6, 4]


def test_an_engine_without_a_life_has_no_spans() -> None:
    """Fenced until it attests; gone from its loss until it is ready again."""
    events: list[Timed] = [
        (0.0, started()),
        (0.0, EngineReady("e", "", 1, "none")),
        (2.0, EngineFenced("e", V1, "no answer")),
        (3.0, EngineFenced("e", V1, "still none")),
        (5.0, EngineLost("e", "rollout", "none", "killed")),
        (9.0, EngineReady("e", "", 2, "none")),
        (10.0, EngineFenced("e", "", "its weights are unknown")),
        (11.0, VersionAttested("e", V1, "00", "memory")),
        (12.0, RunEnded("finished", "", [])),
    ]
    found = [("idle", 0.0, 2.0), ("fenced", 2.0, 5.0), ("idle", 9.0, 10.0), ("fenced", 10.0, 11.0)]
    assert of("e", events) == [*found, ("idle", 11.0, 12.0)]
    assert next(span.args for span in spans(events) if span.name == "fenced") == {"reason": "no answer"}


def test_memory_that_was_given_back_is_not_idle() -> None:
    events: list[Timed] = [
        (0.0, EngineReady("e", "", 1, "none")),
        (1.0, MemoryReleased("e", 10, 10)),
        (1.5, MemoryReleased("trainer", 10, 10)),
        (4.0, VersionAttested("e", V1, "00", "memory")),
        (4.0, RunEnded("finished", "", [])),
    ]
    assert of("e", events) == [("idle", 0.0, 1.0), ("released", 1.0, 4.0)]
    assert of("trainer", events) == []


def test_no_span_crosses_a_restart() -> None:
    later = [(at + 50, event) for at, event in [(100.0, started(0)), *SYNC[1:]]]
    found = spans([*SYNC[:-1], *later])
    assert not [span for span in found if span.start < 150.0 < span.end]
    for lane in ("trainer", "update"):
        own = [span for span in found if span.lane == lane]
        assert own and all(one.end <= other.start + 1e-6 for one, other in pairwise(own))


def last(events: list[Timed]) -> dict[str, float]:
    return {count.name: count.value for count in counts(events)}


@pytest.mark.parametrize(
    ("event", "in_flight", "buffer", "slots"),
    [
        (GroupTaken("h", "p", 0), 2, 0, 2),
        (GroupCut("g", 5), 0, 0, 1),
        (GroupCompleted("g", [], [], []), 0, 1, 1),
        (GroupTrained("g", 0, [], 0), 0, 0, 1),
        (GroupDropped("g", "why"), 0, 0, 0),
        (started(0), 0, 0, 1),
    ],
)
def test_counters_follow_the_groups(event: Event, in_flight: int, buffer: int, slots: int) -> None:
    found = last([(0.0, GroupTaken("g", "p", 0)), (1.0, event)])
    assert found == {"groups in flight": in_flight, "buffer": buffer, "slots": slots}


def test_the_commit_of_its_version_frees_a_slot_and_a_resume_takes_it_again() -> None:
    events: list[Timed] = [
        (0.0, GroupTaken("g", "p", 0)),
        (1.0, GroupCompleted("g", [], [], [])),
        (2.0, GroupTrained("g", 0, [], 0)),
        (3.0, published()),
    ]
    assert last(events)["slots"] == 1
    events.append((4.0, VersionCommitted(V1)))
    assert last(events)["slots"] == 0
    assert last([*events, (5.0, started(1))]) == last(events), "it was trained before the checkpoint"
    assert last([*events, (5.0, started(0))]) == {"groups in flight": 0, "buffer": 1, "slots": 1}
    assert last([*events, (5.0, started(0)), (6.0, GroupResumed("g", 0))])["buffer"] == 0


def test_counters_are_told_when_they_change() -> None:
    events: list[Timed] = [
        (0.0, GroupTaken("g", "p", 0)),
        (0.0, GroupTaken("h", "p", 0)),
        (0.5, GroupCompleted("g", [], [], [])),
        (0.5, GroupTaken("i", "p", 0)),
        *SYNC[-4:-3],
    ]
    found = list(counts(events))
    assert found[0] == Count("groups in flight", 0.0, 2)
    assert [count for count in found if count.at == 0.5] == [Count("buffer", 0.5, 1), Count("slots", 0.5, 3)]
    assert found[-1] == Count("lag", 110.1, 0.25)


def test_seconds_of_a_span() -> None:
    assert Span("trainer", "train", 1.0, 3.5).seconds == 2.5
