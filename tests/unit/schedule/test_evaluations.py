"""When a run evaluates, and that a step has one point of each set."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.parts import Bench, plan, prompts
from turnout.core.events import EvalDone
from turnout.placement.real import RealClock
from turnout.rollout.evaluate import EvalSet
from turnout.schedule.evaluations import EvalPlan, EvalRuns
from turnout.schedule.phases import Phases

HELD_OUT, BASELINE = EvalSet("held-out", prompts(2), plan(1)), EvalSet("baseline", prompts(1), plan(1))


def run(
    *asked: tuple[int, bool], interval: int | None = None, skip_before: bool = False
) -> tuple[Any, EvalRuns]:
    """(name, step) of every point told, after these calls (steps done, last)."""

    async def main() -> tuple[Any, EvalRuns]:
        async with ScriptedEngine() as engine:
            bench = Bench(engine)
            made = EvalRuns(
                EvalPlan([HELD_OUT], [BASELINE], interval, skip_before),
                bench.generator,
                bench.rewards,
                bench.log,
                Phases(RealClock()),
            )
            for steps_done, last in asked:
                await made.run_if_due(steps_done, last)
            return [(event.name, event.step) for event in bench.log.of(EvalDone)], made

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("interval", "skip_before", "steps"),
    [
        (None, False, [0, 5]),
        (None, True, [5]),
        (2, False, [0, 2, 4, 5]),
        (2, True, [2, 4, 5]),
        (10, False, [0, 5]),
    ],
)
def test_when_a_point_is_due(interval: int | None, skip_before: bool, steps: list[int]) -> None:
    asked = [(step, step == 5) for step in range(6)]
    told, made = run(*asked, interval=interval, skip_before=skip_before)
    assert [step for name, step in told if name == "held-out"] == steps
    assert [step for name, step in told if name == "baseline"] == [0] * (not skip_before)
    assert [step for step, _ in made.curve()] == steps


def test_a_step_has_one_point_of_each_set() -> None:
    told, _ = run((0, False), (2, False), (2, True), interval=2)
    assert told == [("held-out", 0), ("baseline", 0), ("held-out", 2)]


def test_first_and_last() -> None:
    _, made = run((0, False), (1, False), (2, True), interval=1)
    before, after = made.first_and_last("held-out")
    assert before is made.points["held-out", 0]
    assert after is made.points["held-out", 2]
    assert made.first_and_last("baseline") == (made.points["baseline", 0], None)
    assert made.first_and_last("none") == (None, None)
