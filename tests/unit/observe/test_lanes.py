"""Stretches of time read from a log, and their spans as lanes."""

from __future__ import annotations

import json
from pathlib import Path

from turnout.core.events import EngineReady, EngineWorked, Event, GroupTaken, PhaseEnded, RunStarted, to_json
from turnout.observe import event_windows
from turnout.observe.lanes import MAX_SPANS, lane_rows
from turnout.observe.run_reader import RunReader
from turnout.observe.timeline import Span


def log(root: Path, seconds: int) -> RunReader:
    """Each second engine-0, ready from the start, works 0.4 s, and the trainer trains 0.5 s to its end."""
    events: list[tuple[float, Event]] = [
        (100.0, RunStarted("r", 0, 1, "sync", 0)),
        (100.0, EngineReady("engine-0", "http://h:1", 1, "none")),
    ]
    for n in range(seconds):
        events.append((100.0 + n, GroupTaken(f"g{n:08d}.0", "1", n)))
        events.append((100.4 + n, EngineWorked("engine-0", 0.4, 8)))
        events.append((101.0 + n, PhaseEnded("run", "train", 0.5)))
    (root / "events.jsonl").write_text("".join(json.dumps(to_json(e, at)) + "\n" for at, e in events))
    reader = RunReader(root)
    reader.advance(1 << 30)
    return reader


def test_a_stretch_is_read_without_groups_and_with_the_engines_before_it(tmp_path: Path) -> None:
    reader = log(tmp_path, 200)
    events, whole = reader.between(150.1, 151.05)
    assert whole and [type(event).__name__ for _, event in events] == [
        "RunStarted", "EngineReady", "EngineWorked", "PhaseEnded",
    ]  # fmt: skip
    assert [at for at, _ in events][2:] == [150.4, 151.0]


def test_the_index_stays_small_and_finds_the_place(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(event_windows, "STRIDE", 64)
    monkeypatch.setattr(event_windows, "PLACES", 16)
    reader = log(tmp_path, 200)
    assert len(reader.windows._places) <= 17
    for start in (100.0, 133.3, 299.0):
        events, _ = reader.between(start, start + 1.05)
        assert next(at for at, event in events if isinstance(event, PhaseEnded)) <= start + 1.0


def test_too_much_is_broken_off_and_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(event_windows, "MAX_BYTES", 1000)
    assert log(tmp_path, 200).between(100.0, 300.0)[1] is False


def test_spans_are_cut_to_the_stretch_and_shares_are_of_it() -> None:
    rows = lane_rows(
        [
            Span("engine-0", "rollout", 0.0, 6.0),
            Span("trainer", "train", 5.0, 20.0),
            Span("x", "idle", 0.0, 1.0),
        ],
        4.0,
        10.0,
    )
    assert [(row["lane"], row["spans"]) for row in rows["lanes"]] == [
        ("trainer", [["train", 5.0, 10.0, {}]]),
        ("engine-0", [["rollout", 4.0, 6.0, {}]]),
    ]
    assert rows["lanes"][1]["shares"] == {"rollout": 0.3333} and rows["left_out"] == 0


def test_many_short_spans_are_joined_and_the_shortest_left_out() -> None:
    near = [Span("e", "rollout", n * 1e-4, n * 1e-4 + 5e-5) for n in range(1000)]
    [row] = lane_rows(near, 0.0, 10.0)["lanes"]
    assert len(row["spans"]) < 40 and sum(span[3].get("spans", 1) for span in row["spans"]) == 1000
    far = [Span(f"e{n % 7}", str(n), n, n + 0.5 + n / 1e5) for n in range(MAX_SPANS + 50)]
    assert lane_rows(far, 0.0, 7000.0)["left_out"] == 50
