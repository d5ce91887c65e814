"""The picture of a run from its files: incrementally the same as at once, resumes counted once, faults told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnout.core.events import (
    EngineFenced,
    EngineLost,
    EngineReady,
    EvalDone,
    Event,
    GroupCompleted,
    GroupDropped,
    GroupTaken,
    GroupTrained,
    RunEnded,
    RunStarted,
    StepTrained,
    VersionAborted,
    VersionAttested,
    VersionCommitted,
    VersionPublished,
    to_json,
)
from turnout.observe import run_picture
from turnout.observe.run_reader import RunReader
from turnout.observe.step_bins import length_bucket

V1, V2 = "v000001-00000000000000aa", "v000002-00000000000000bb"


def group(number: int, step: int) -> list[Event]:
    name = f"g{number:08d}.0"
    return [
        GroupTaken(name, str(number), step),
        GroupCompleted(name, [[5, 5, 5, 5], [9, 9, 9, 9]], [V1], [0.0, 1.0]),
        GroupTrained(name, step, [V1], step),
    ]


def trained(step: int) -> list[Event]:
    return [*group(step, step), StepTrained(step, 1, 14, 1, [[step, 14]])]


def put(root: Path, events: list[Event], at: float = 100.0) -> None:
    with (root / "events.jsonl").open("a") as file:
        for number, event in enumerate(events):
            file.write(json.dumps(to_json(event, at + number)) + "\n")


def lags(reader: RunReader) -> list[object]:
    return [row["lags"] for row in reader.picture.bins.shapes(-1)]


def read(root: Path) -> RunReader:
    reader = RunReader(root)
    while reader.advance(budget=200):
        pass
    assert reader.progress == 1.0
    return reader


START = RunStarted("r", 0, 1, "async", 2)


def test_what_is_appended_is_read_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, [START, *trained(0)])
    reader = read(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout/reward_mean": 0.5, "train/x": null}\n')
    put(tmp_path, trained(1))
    assert reader.advance() and not reader.advance()
    whole = read(tmp_path)
    assert lags(reader) == lags(whole) == [[(0, 14)], [(1, 14)]]
    assert reader.picture.counts == whole.picture.counts
    assert reader.picture.bins.means(("rollout/reward_mean", "train/x"), -1)[0]["rollout/reward_mean"] == 0.5
    assert reader.picture.bins.shapes(-1)[0]["lengths"] == [(length_bucket(5), 1), (length_bucket(9), 1)]
    assert reader.picture.step == 1 and reader.picture.open == {}


@pytest.mark.parametrize("live", [False, True])
def test_steps_that_a_resume_undid_count_as_they_were_trained_last(tmp_path: Path, live: bool) -> None:
    put(tmp_path, [START, *trained(0), *trained(1), EvalDone("eval", V1, 2, 0.5, 10, 0)])
    reader = read(tmp_path)
    again = RunStarted("r", 1, 1, "async", 2, resumed_at=1)
    put(tmp_path, [again, GroupTrained("g00000001.0", 1, [V1], 2), StepTrained(1, 1, 14, 1, [[2, 14]])])
    epoch = reader.epoch
    if live:
        reader.advance()
        assert reader.epoch != epoch
    else:
        reader = read(tmp_path)
    assert lags(reader) == [[(0, 14)], [(2, 14)]]
    assert reader.picture.evals == [] and reader.picture.counts["trained"] == 2
    assert [row["lengths"] for row in reader.picture.bins.shapes(-1)] == [[(10, 1), (13, 1)]] * 2
    assert reader.picture.fleet.fault_counts == {"run resumed": 1}


def test_metrics_that_were_rewound_are_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n + 1, "x": 1.0}) + "\n" for n in range(3)))
    reader = read(tmp_path)
    new = tmp_path / "new"
    new.write_text(json.dumps({"step": 1, "x": 7.0}) + "\n")
    new.replace(path)
    assert reader.advance()
    assert [row["x"] for row in reader.picture.bins.means(("x",), -1)] == [7.0]


def test_versions_engines_and_faults(tmp_path: Path) -> None:
    put(
        tmp_path,
        [
            START,
            EngineReady("engine-0", "http://h:1", 1, "none"),
            EngineReady("engine-1", "http://h:2", 2, "none"),
            VersionPublished(
                V1, 0, 1, "aa", 1, 1000, ["engine-0", "engine-1"], encoding="packed", density=0.1
            ),
            VersionAttested("engine-0", V1, "aa", "memory"),
            VersionAttested("engine-1", V1, "aa", "memory"),
            VersionCommitted(V1),
            VersionPublished(V2, 0, 2, "bb", 2, 1000, ["engine-0", "engine-1"]),
            EngineFenced("engine-1", V2, "too late"),
            VersionAborted(V2, "not enough attested"),
            EngineLost("engine-0", "rollout", V1, "killed"),
        ],
    )
    fleet = read(tmp_path).picture.fleet
    first, newest = fleet.version_rows(-1)
    assert newest["aborted"] == "not enough attested" and fleet.version_rows(fleet.revision) == []
    assert fleet.serving() == {V1: ["engine-1"]} and first["attested"] == {"engine-0": 1.0, "engine-1": 2.0}
    assert (first["committed"] - first["published"], first["bytes"], first["density"]) == (3.0, 1000, 0.1)
    lost, fenced = fleet.engine_rows()
    assert (lost["state"], lost["losses"], fenced["state"], fenced["reason"]) == (
        "lost",
        1,
        "fenced",
        "too late",
    )
    assert [kind for _, kind, _, _ in fleet.faults] == ["engine fenced", "update aborted", "engine lost"]


def test_causes_buffer_intervals_and_the_end(tmp_path: Path) -> None:
    put(tmp_path, [START, *group(0, 0)[:2], *group(1, 0)[:2], GroupTaken("g00000002.0", "2", 0)])
    put(tmp_path, [GroupDropped("g00000000.0", "stale: lag 3"), StepTrained(0, 1, 1, 1, [[0, 1]])])
    put(tmp_path, [EvalDone("eval", V1, 0, 0.5, 100, 0), EvalDone("odd", V1, 0, -3.0, 100, 0)])
    put(tmp_path, [RunEnded("finished", "", [])])
    picture = read(tmp_path).picture
    row = picture.bins.means(("groups/buffered", "groups/under_way", "groups/slots"), -1)[0]
    assert (row["groups/buffered"], row["groups/under_way"], row["groups/slots"]) == (1, 1, 2)
    assert picture.causes == {"stale: lag 3": 1} and picture.status == "finished"
    share, odd = picture.evals
    assert 0.4 < share["low"] < 0.5 < share["high"] < 0.6 and odd["low"] is None
    assert picture.slowest[0][1] == "g00000000.0"


def test_what_was_got_of_another_reader_is_worth_nothing(tmp_path: Path) -> None:
    epochs = {RunReader(tmp_path).epoch for _ in range(5)}
    assert len(epochs) > 1 and all(0 <= epoch < 1 << 53 for epoch in epochs)


def published(version: str, step: int) -> VersionPublished:
    return VersionPublished(version, 0, step, "aa", step, 1000, ["engine-0"])


def test_a_version_gives_back_the_slots_of_the_groups_that_it_was_made_from(tmp_path: Path) -> None:
    put(tmp_path, [START, *trained(0), published(V1, 1), *trained(1)])
    reader = read(tmp_path)
    assert reader.picture.slots == 2
    put(tmp_path, [VersionCommitted(V1)])
    reader.advance()
    assert reader.picture.slots == 1  # of step 1, which V1 was not made from
    put(tmp_path, [published(V2, 2), VersionCommitted(V2)])
    reader.advance()
    assert reader.picture.slots == 0


def test_evaluations_are_thinned_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_picture, "EVALS", 8)
    picture = run_picture.RunPicture()
    for step in range(8):
        for name in ("a", "b"):
            picture.fold(step, 1.0, EvalDone(name, V1, step, 0.5, 10, 0))
    found = {name: [one["step"] for one in picture.evals if one["name"] == name] for name in "ab"}
    assert all(len(steps) >= 2 and steps[-1] == 7 and steps[0] == 0 for steps in found.values())
    assert len(picture.evals) <= 8


def test_lines_that_can_not_be_read_are_counted_and_the_rest_is_shown(tmp_path: Path) -> None:
    put(tmp_path, [START])
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "NextYears", "at": 1.0}\n{"event": "StepTrained", "at": 1.0}\nnot json\n')
    put(tmp_path, trained(0))
    reader = read(tmp_path)
    assert reader.picture.unknown == {"NextYears": 1} and reader.bad_count == 2
    assert lags(reader) == [[(0, 14)]]
