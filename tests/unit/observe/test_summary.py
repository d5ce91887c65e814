"""summary.json and the interval of a score."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.core.events import (
    GroupDropped,
    GroupRequeued,
    GroupResumed,
    RunStarted,
    StepTrained,
)
from turnout.observe.audit import AuditReport, GroupCounts
from turnout.observe.summary import EvalScore, RunSummary, lag_summary, wilson_interval, write_summary
from turnout.placement.real import DiskStore


def summary(**more):
    report = AuditReport(["a", "b"], [("c", "group g1 is lost"), ("c", "group g2 is lost")])
    return RunSummary("ok", [0.0, 0.3, 0.6, 0.9], 61.0, 50.0, 4, GroupCounts(9, 6, 1, 0, 2), report, **more)


def test_keys_that_the_acceptance_tests_read(tmp_path):
    path = tmp_path / "summary.json"
    before, after = EvalScore(0.1, 0.05, 0.2, 200), EvalScore(0.6, 0.5, 0.7, 200, 1)
    write_summary(
        DiskStore(),
        path,
        summary(eval_before=before, eval_after=after, mismatch_mean_abs_logprob=0.01, extra={"seed": 7}),
    )
    found = json.loads(path.read_text())
    assert found["reward_first"] == pytest.approx(0.3) and found["reward_last"] == pytest.approx(0.6)
    assert (found["eval_before"], found["eval_after"], found["steps"]) == (0.1, 0.6, 4)
    assert (found["seconds_total"], found["seconds_training"], found["weight_versions_committed"]) == (
        61.0,
        50.0,
        4,
    )
    assert found["groups"] == {"taken": 9, "trained": 6, "dropped": 1, "lost": 2, "open": 0, "requeued": 0}
    assert (found["audit"]["passed"], found["audit"]["failed"]) == (2, 1)
    assert found["audit"]["details"] == ["c: group g1 is lost", "c: group g2 is lost"]
    assert found["eval_after_detail"]["high"] == 0.7 and found["seed"] == 7
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"], "no temporary file stays"


def test_a_run_without_steps_or_evaluation_has_nulls(tmp_path):
    path = tmp_path / "s.json"
    nothing = RunSummary("failed", [], 1.0, 0.0, 0, GroupCounts(0, 0, 0, 0, 0), AuditReport([], []))
    write_summary(DiskStore(), path, nothing)
    found = json.loads(path.read_text())
    assert found["reward_first"] is None and found["eval_after"] is None and found["steps"] == 0


def test_numbers_that_are_not_finite_become_null(tmp_path):
    path = tmp_path / "s.json"
    write_summary(
        DiskStore(), path, summary(mismatch_mean_abs_logprob=math.nan, extra={"x": [math.inf, 1.0]})
    )
    found = json.loads(path.read_text())
    assert found["mismatch_mean_abs_logprob"] is None and found["x"] == [None, 1.0]


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # from the formula's published examples, to 4 digits
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_mirrors(pair):
    successes, n = pair
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    mirrored = wilson_interval(n - successes, n)
    assert mirrored == pytest.approx((1 - high, 1 - low))


def test_impossible_counts():
    for successes, n in ((-1, 3), (4, 3), (0, -1)):
        with pytest.raises(ValueError, match="successes of"):
            wilson_interval(successes, n)


def test_how_old_trained_tokens_were_is_counted_by_token():
    log = [
        RunStarted("run", 0, 7, "async", 2),
        StepTrained(0, 2, 10, 1, [[0, 10]]),
        GroupDropped("g1", "stale: lag 3, --max-staleness 2"),
        GroupDropped("g2", "reward timed out"),
        GroupRequeued("g3", "stale: lag 4, --max-staleness 2", "g3.1"),
        GroupRequeued("g4", "engine gone", "g4.1"),
        GroupResumed("g5", 32, 3),
        StepTrained(1, 2, 9, 1, [[1, 9]], 77),
        RunStarted("run", 1, 7, "async", 2, resumed_at=1),  # the last step is undone, and trained again
        StepTrained(1, 2, 30, 1, [[0, 10], [2, 20]], 5),
    ]
    assert lag_summary(log) == {
        "lag": {"max": 2, "mean_token_weighted": 1.0, "histogram": {"0": 20, "2": 20}},
        "replayed": 1,
        "evicted": 2,
        "masked_tokens": 5,
        "partial_resumes": 3,
    }
    assert lag_summary([])["lag"] == {"max": None, "mean_token_weighted": None, "histogram": {}}
