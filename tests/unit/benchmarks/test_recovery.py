"""What the benchmark of recoveries makes of its repetitions."""

from __future__ import annotations

from benchmarks.recovery import KINDS, MARKS, _marks, summarised


def test_marks_are_seconds_from_the_signal_and_medians_over_the_repetitions():
    found = [_marks(10.0, 10.5, 12.0, 13.25), _marks(20.0, 21.0, 22.0, 23.0), _marks(0.0, 9.0, 9.5, 9.75)]
    row = summarised(found)
    assert row is not None and tuple(row) == MARKS
    assert row["unroutable"] == {"median_s": 1.0, "all_s": [0.5, 1.0, 9.0]}
    assert row["serving"] == {"median_s": 3.25, "all_s": [3.25, 3.0, 9.75]}


def test_what_was_not_measured_is_null():
    assert summarised(None) is None and summarised([]) is None
    assert len(set(KINDS)) == len(KINDS) == 7
