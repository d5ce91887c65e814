"""Rows of metrics: an evaluation stands before the next step, whenever the panel ticks, and is told once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.parts import Log
from turnout.core.events import StepTrained, VersionPublished
from turnout.core.types import Finish, Prompt, RolloutGroup, TrainBatch, Trajectory
from turnout.core.version import Runs, VersionSpans, WeightVersion
from turnout.observe.metrics import EVAL_SCORE, MetricsLog, read_metrics
from turnout.observe.run_view import VersionView
from turnout.placement.real import RealClock
from turnout.schedule.loop import StepBatch
from turnout.schedule.phases import Phases
from turnout.schedule.reporter import RunReporter, Sources


class Panel:
    live = False

    def __init__(self) -> None:
        self.said: list[str] = []
        self.views: list[Any] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def update(self, view: Any) -> None:
        self.views.append(view)


def batch(step: int, *rewards: float, short: str = "") -> StepBatch:
    members = tuple(
        Trajectory(
            (1,) * n,
            (-0.5,) * n,
            (1,) * n,
            VersionSpans(((n, "v"),)),
            finish,
            "",
            Runs(((n, "e"),)),
            0,
            reward,
        )
        for reward, n, finish in zip(rewards, (1, 3), (Finish.STOP, Finish.LENGTH))
    )
    group = RolloutGroup("g", 0, 0, Prompt("p", (1, 2), ""), members)
    return StepBatch(step, [group], TrainBatch(step, "v", ()), 2, 1, short, False, {})


METRICS = {"tokens": 4.0, "optimizer_steps": 1.0, "mismatch_mean": 0.01, "loss": 0.5, "seconds_total": 2.0}


@pytest.mark.parametrize("ticks", [False, True])
def test_an_evaluation_stands_before_the_row_of_the_next_step(ticks: bool, tmp_path: Path) -> None:
    points: list[tuple[int, float]] = []

    def rows() -> list[tuple[int, dict[str, float]]]:
        return [(step, {EVAL_SCORE: score}) for step, score in points]

    panel: Any = Panel()
    with MetricsLog(tmp_path / "m") as metrics:
        reporter = RunReporter(Log(), metrics, panel, Phases(RealClock()), RealClock())
        reporter.open("run", 2, Sources(lambda: (), lambda: tuple(points), rows))
        for step in range(2):
            points.append((step, 0.25))
            if ticks:
                reporter.tick()
            reporter.step(batch(step, 0.0, 1.0), METRICS, WeightVersion(0, step + 1, "a" * 32))
        points.append((2, 0.75))
        reporter.tick()
        reporter.tick()
    found = [(step, EVAL_SCORE in row) for step, row in read_metrics(tmp_path / "m")]
    assert found == [(0, True), (1, False), (1, True), (2, False), (2, True)]
    assert [text for text in panel.said if "evaluation" in text] == [
        "step 0: evaluation 0.250", "step 1: evaluation 0.250", "step 2: evaluation 0.750",
    ]  # fmt: skip


def test_what_a_version_took_is_in_the_row_and_in_the_picture(tmp_path: Path) -> None:
    panel: Any = Panel()
    made = VersionPublished("v", 0, 1, "a" * 32, 1, 6330, ["e0"], encoding="packed", density=0.01)
    with MetricsLog(tmp_path / "m") as metrics:
        reporter = RunReporter(Log(), metrics, panel, Phases(RealClock()), RealClock())
        reporter.open("run", 1, Sources(lambda: (), lambda: (), published=lambda: made))
        reporter.step(batch(0, 0.0, 1.0), METRICS, WeightVersion(0, 1, "a" * 32))
    ((_, row),) = read_metrics(tmp_path / "m")
    assert (row["weights/bytes"], row["weights/density"]) == (6330, 0.01)
    assert panel.views[-1].published == VersionView(6330, 0.01, "packed")


def test_the_row_of_a_step(tmp_path: Path) -> None:
    log, panel = Log(), Panel()
    with MetricsLog(tmp_path / "m") as metrics:
        reporter = RunReporter(log, metrics, panel, Phases(RealClock()), RealClock())  # type: ignore[arg-type]
        reporter.step(batch(4, 0.0, 1.0, short="end of the data"), METRICS, WeightVersion(0, 9, "a" * 32))
    ((step, row),) = read_metrics(tmp_path / "m")
    assert step == 5
    expected = {
        "rollout/reward_mean": 0.5, "rollout/response_len_mean": 2.0, "rollout/truncated_share": 0.5,
        "rollout/groups": 1.0, "rollout/groups_failed": 2.0, "rollout/groups_filtered": 1.0,
        "rollout/groups_of_equal_reward": 0.0, "tokens/response": 4.0, "tokens/prompt": 2.0,
        "weight_version": 9.0, "train/loss": 0.5, "seconds/train_total": 2.0,
    }  # fmt: skip
    assert expected.items() <= row.items()
    assert log.events == [StepTrained(4, 1, 4, 1)]
    assert panel.said == ["step 5: 1 groups only: end of the data"]
    assert reporter.curves.rewards == [0.5]


def test_the_age_of_the_tokens_is_told(tmp_path: Path) -> None:
    log, panel = Log(), Panel()
    old = replace(batch(4, 0.0, 1.0), lags=Counter({2: 1, 0: 3}), masked=7, evicted=2)
    with MetricsLog(tmp_path / "m") as metrics:
        reporter = RunReporter(log, metrics, panel, Phases(RealClock()), RealClock())  # type: ignore[arg-type]
        reporter.step(old, METRICS, WeightVersion(0, 9, "a" * 32))
    ((_, row),) = read_metrics(tmp_path / "m")
    expected = {
        "rollout/lag_mean": 0.5, "rollout/lag_max": 2.0, "rollout/masked_tokens": 7.0,
        "rollout/groups_evicted": 2.0,
    }  # fmt: skip
    assert expected.items() <= row.items()
    assert log.events == [StepTrained(4, 1, 4, 1, [[0, 3], [2, 1]], 7)]
    assert panel.views[-1].lag == (0.5, 2)
