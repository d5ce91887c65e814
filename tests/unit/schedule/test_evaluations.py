"""When a run evaluates and on which version, and that a step has one point of each set (ASY-14)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.scripted_engine import HANG, RESET, ScriptedEngine
from tests.unit.rollout.parts import Bench, plan, prompts
from turnout.core.errors import EngineDead, TurnoutError, WeightError
from turnout.core.events import EvalDone, EvalSkipped
from turnout.core.rng import SeedTree
from turnout.core.version import WeightVersion
from turnout.placement.real import RealClock
from turnout.rollout.evaluate import EvalMeans, EvalSet
from turnout.schedule import evaluations
from turnout.schedule.evaluations import EvalPlan, EvalRuns, EvalWorld
from turnout.schedule.phases import Phases

HELD_OUT, BASELINE = EvalSet("held-out", prompts(2), plan(1)), EvalSet("baseline", prompts(1), plan(1))


class World:
    """Evaluations on one scripted engine; `version` is what it serves and what is committed."""

    def __init__(self, engine: ScriptedEngine, made: EvalPlan) -> None:
        self.engine, self.bench = engine, Bench(engine)
        self.apart = made.mode == "dedicated"
        self.served: list[int] = []
        self.fault: TurnoutError | None = None
        self.kept: list[WeightVersion] = []
        self.released: list[WeightVersion] = []
        self.at(0)
        self.runs = EvalRuns(
            made,
            EvalMeans(self.bench.generator, self.bench.rewards, SeedTree(1)),
            EvalWorld(self, self.bench.log, Phases(RealClock()), RealClock(), dedicated=self),
            lambda: (self.version, self.version.counter),
        )

    async def serve(self, version: WeightVersion) -> None:
        """As engines that only evaluate."""
        if self.fault is not None:
            raise self.fault
        self.served.append(version.counter)
        self.engine.label = version.label

    def routable(self) -> Any:
        raise NotImplementedError("the bench has its own routes")

    changed = routable

    def keep(self, version: WeightVersion) -> None:
        self.kept.append(version)

    def release(self, version: WeightVersion) -> None:
        self.released.append(version)

    def at(self, step: int) -> None:
        """The version of this step is committed."""
        self.version = WeightVersion(0, step, f"{step:032d}")
        if not self.apart:
            self.engine.label = self.version.label

    def told(self) -> list[tuple[str, int]]:
        return [(event.name, event.step) for event in self.bench.log.of(EvalDone)]


def on(use: Callable[[World], Awaitable[Any]], made: EvalPlan) -> Any:
    async def main() -> Any:
        async with ScriptedEngine() as engine:
            return await asyncio.wait_for(use(World(engine, made)), 20)

    return asyncio.run(main())


def run(
    *asked: tuple[int, bool], interval: int | None = None, skip_before: bool = False, **more: Any
) -> tuple[Any, Any]:
    """(name, step) of every point told, after these calls (steps done, last)."""

    async def use(world: World) -> tuple[Any, Any]:
        for steps_done, last in asked:
            world.at(steps_done)
            await world.runs.run_if_due(steps_done, last)
        return world.told(), world.runs

    return on(use, EvalPlan([HELD_OUT], [BASELINE], interval, skip_before, **more))


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


def test_asy_14_a_point_lands_at_the_step_of_its_version() -> None:
    """With --update-weights-interval 3 the weights after step 4 are those of step 3."""

    async def use(world: World) -> Any:
        for step in range(9):
            world.at(step - step % 3)
            await world.runs.run_if_due(step, step == 8)
        return world.bench.log.of(EvalDone), [call["extra_key"] for call in world.engine.sent("/generate")]

    points, asked = on(use, EvalPlan([HELD_OUT], [], 2, True))
    versions = [WeightVersion(0, n, f"{n:032d}").label for n in (3, 6)]
    assert [(point.step, point.version) for point in points] == list(zip([3, 6], versions))
    assert asked == [f"{version}!" for version in versions for _ in range(2)]


def done(*steps: int) -> list[EvalDone]:
    return [EvalDone("held-out", f"v{step}", step, 0.5, 2, 0, "d") for step in steps]


def versions(*steps: int) -> list[tuple[WeightVersion, int]]:
    return [(WeightVersion(0, step, f"{step:032d}"), step) for step in steps]


@pytest.mark.parametrize(
    ("known", "resumed_at", "steps"), [((0, 2), 2, [4, 5]), ((0, 2), 3, [4, 5]), ((0,), 2, [2, 4, 5])]
)
def test_a_resume_repeats_no_point_and_leaves_none_out(
    known: tuple[int, ...], resumed_at: int, steps: list[int]
) -> None:
    async def use(world: World) -> Any:
        world.runs.restore(done(*known), versions(*range(resumed_at)))
        for step in range(resumed_at, 6):
            world.at(step)
            await world.runs.run_if_due(step, step == 5)
        return world.told(), world.runs.curve()

    told, curve = on(use, EvalPlan([HELD_OUT], [BASELINE], 2, False))
    assert told == [("held-out", step) for step in steps]
    assert sorted(step for step, _ in curve) == sorted({*known, *steps})


def test_a_resume_knows_which_version_came_before_its_own() -> None:
    """A version every 3 steps, a point every 4: that of step 6 is the first after 4, also after a kill there."""

    async def use(world: World) -> Any:
        world.runs.restore(done(0), versions(0, 3))
        world.at(6)
        await world.runs.run_if_due(6, False)
        return world.told()

    assert on(use, EvalPlan([HELD_OUT], [], 4, False)) == [("held-out", 6)]


def test_a_resume_keeps_the_versions_that_are_scored_after_the_run() -> None:
    async def use(world: World) -> Any:
        world.runs.restore([], versions(0, 1, 2, 3))
        world.at(4)
        await world.runs.run_if_due(4, False)
        return [step for _, step, _ in world.runs.kept], [version.counter for version in world.kept]

    assert on(use, EvalPlan([HELD_OUT], [], 2, False, mode="checkpoint")) == ([0, 2, 4], [0, 2, 4])


def test_a_checkpoint_waits_for_points_of_earlier_versions_and_not_for_its_own() -> None:
    async def use(world: World) -> Any:
        held: dict[int, asyncio.Event] = {0: asyncio.Event(), 1: asyncio.Event()}

        async def answered(body: Any) -> Any:
            step = world.version.counter
            await held[step].wait()
            return world.engine.generated(body)

        world.engine.on_generate = answered
        await world.runs.run_if_due(0, False)
        waits = asyncio.ensure_future(world.runs.caught_up(1))
        await asyncio.sleep(0.05)
        early = waits.done()
        await world.runs.caught_up(0)
        held[0].set()
        await waits
        made = list(world.runs.points)
        world.at(1)
        world.runs.renewed()
        await world.runs.caught_up(1)
        held[1].set()
        await world.runs.caught_up(2)
        return early, made, sorted(world.runs.points)

    early, made, after = on(use, EvalPlan([HELD_OUT], [], 1, False, beside=True, hold_s=20.0))
    assert (early, made, after) == (False, [("held-out", 0)], [("held-out", 0), ("held-out", 1)])


BESIDE = EvalPlan([HELD_OUT, BASELINE], [], 1, False, beside=True, hold_s=20.0)


def test_asy_14_beside_training_the_update_waits_for_the_requests() -> None:
    async def use(world: World) -> Any:
        gate = asyncio.Event()

        async def held(body: Any) -> Any:
            await gate.wait()
            return world.engine.generated(body)

        world.engine.on_generate = held
        await world.runs.run_if_due(0, False)  # returns, though no request is answered
        update = asyncio.ensure_future(world.runs.settled())
        await world.engine.until_running(3)
        assert not update.done()
        gate.set()
        await update
        await world.runs.run_if_due(1, False)  # the version of step 1 is still on its way
        world.at(1)
        world.runs.renewed()
        await world.runs.settled()
        world.at(2)
        world.runs.renewed()
        await world.runs.run_if_due(2, True)
        return world.bench.log.of(EvalDone), world.runs.rows()

    points, rows = on(use, BESIDE)
    assert [(point.name, point.step) for point in points] == [
        ("held-out", 0), ("baseline", 0), ("held-out", 1), ("baseline", 1), ("held-out", 2), ("baseline", 2),
    ]  # fmt: skip
    assert [point.version[:7] for point in points] == [f"v00000{n}" for n in (0, 0, 1, 1, 2, 2)]
    interval = {"eval/low": pytest.approx(0.3424, abs=1e-4), "eval/high": 1.0}  # of 2 of 2
    score = {"eval/held-out/score": 1.0, "eval/held-out/failed": 0.0, "eval/score": 1.0}
    assert rows[0] == (0, score | interval)
    assert rows[1] == (0, {"eval/baseline/score": 1.0, "eval/baseline/failed": 0.0})


def test_asy_14_no_update_between_the_call_and_its_first_request() -> None:
    """`settled` right after `run_if_due`, before the evaluation had a turn: it waits all the same."""

    async def use(world: World) -> int:
        await world.runs.run_if_due(0, False)
        await world.runs.settled()
        return len(world.engine.sent("/generate"))

    assert on(use, BESIDE) == 3


def test_asy_14_what_is_not_done_within_the_hold_is_cut_and_the_point_is_not_written() -> None:
    async def use(world: World) -> Any:
        world.engine.on_generate = lambda body: HANG
        await world.runs.run_if_due(0, False)
        await world.engine.until_running(3)
        await world.runs.settled()
        world.engine.on_generate = world.engine.generated
        world.at(1)
        await world.runs.run_if_due(1, True)
        return world.told(), world.bench.log.of(EvalSkipped)

    told, skipped = on(use, replace(BESIDE, hold_s=0.05))
    assert told == [("held-out", 1), ("baseline", 1)], "the next points are made"
    assert [(event.name, event.step, event.version[:7]) for event in skipped] == [
        ("held-out", 0, "v000000"), ("baseline", 0, "v000000"),
    ]  # fmt: skip
    assert "were not done within 0.05 s (--eval-hold)" in skipped[0].reason


def test_a_dead_engine_beside_training_ends_the_run_at_the_next_update() -> None:
    async def use(world: World) -> None:
        world.engine.on_generate = lambda body: RESET
        await world.runs.run_if_due(0, False)
        with pytest.raises(EngineDead):
            while True:
                await world.runs.settled()
                await asyncio.sleep(0.01)

    on(use, BESIDE)


def test_closing_gives_up_what_is_under_way() -> None:
    async def use(world: World) -> Any:
        world.engine.on_generate = lambda body: HANG
        await world.runs.run_if_due(0, False)
        await world.engine.until_running(3)
        await world.runs.close()
        await world.engine.until_running(0)
        return world.bench.log.events

    assert on(use, BESIDE) == []


def test_mode_checkpoint_keeps_versions_and_asks_no_engine() -> None:
    async def use(world: World) -> Any:
        for step in range(5):
            world.at(step)
            await world.runs.run_if_due(step, step == 4)
        kept = [(version.counter, step, [s.name for s in sets]) for version, step, sets in world.runs.kept]
        return kept, [v.counter for v in world.kept], world.engine.calls

    kept, in_store, calls = on(use, EvalPlan([HELD_OUT], [BASELINE], 2, False, mode="checkpoint"))
    assert kept == [(0, 0, ["held-out", "baseline"]), (2, 2, ["held-out"]), (4, 4, ["held-out"])]
    assert in_store == [0, 2, 4]
    assert calls == []


APART = EvalPlan([HELD_OUT], [BASELINE], 1, False, mode="dedicated", beside=True, hold_s=20.0)


def test_dedicated_engines_make_points_one_version_after_the_other_and_hold_nothing_up() -> None:
    async def use(world: World) -> Any:
        gate = asyncio.Event()

        async def held(body: Any) -> Any:
            await gate.wait()
            return world.engine.generated(body)

        world.engine.on_generate = held
        await world.runs.run_if_due(0, False)
        for step in (1, 2):
            await world.runs.settled()  # an update does not wait for them, nor does a checkpoint
            await world.runs.caught_up(step)
            world.at(step)
            world.runs.renewed()
        await world.engine.until_running(3)
        assert world.told() == [] and world.served == [0]
        gate.set()
        world.at(3)
        world.runs.renewed()
        await world.runs.run_if_due(3, True)
        points = [(point.name, point.step, point.version[:7]) for point in world.bench.log.of(EvalDone)]
        return points, world.served, [v.counter for v in world.kept], [v.counter for v in world.released]

    points, served, kept, released = on(use, APART)
    assert points[:2] == [("held-out", 0, "v000000"), ("baseline", 0, "v000000")]
    assert points[2:] == [("held-out", step, f"v{step:06d}") for step in (1, 2, 3)]
    assert served == kept == released == [0, 1, 2, 3], "each stays in the store until its point is made"


def test_what_dedicated_engines_cannot_make_is_told_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "TRY_PAUSE_S", 0.0)

    async def use(world: World) -> Any:
        world.fault = WeightError("torn")
        await world.runs.run_if_due(0, False)
        await world.runs.run_if_due(0, True)
        world.fault = None
        world.engine.on_generate = lambda body: HANG
        world.at(1)
        await world.runs.run_if_due(1, True)  # the end of the run waits for so long
        await world.engine.until_running(0)
        return [(event.step, event.reason) for event in world.bench.log.of(EvalSkipped)]

    first, second, last = on(use, replace(APART, hold_s=0.5))
    assert first == second == (0, "torn")
    assert last == (1, "it was not made within 0.5 s of the run's end (--eval-hold)")


def test_a_resume_makes_the_points_that_dedicated_engines_still_owed() -> None:
    async def use(world: World) -> Any:
        world.runs.restore(done(0), versions(0, 1, 2))
        world.at(3)
        await world.runs.run_if_due(3, False)
        world.at(4)
        await world.runs.run_if_due(4, True)
        return world.told()

    made = on(use, APART)
    assert made == [("baseline", 0), *(("held-out", step) for step in (1, 2, 3, 4))]
