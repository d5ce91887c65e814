"""What engines report, and what the pool makes of it: fewer in flight, the newest cut, none while none answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.scripted_engine import RESET, Answer, ScriptedEngine
from tests.unit.rollout.parts import NO_LIMITS, Bench, plan
from turnout.core.errors import EngineError
from turnout.core.events import GroupCut, GroupResumed
from turnout.protocol.sglang import load_parts
from turnout.rollout.admission import Admission, AdmissionPlan
from turnout.rollout.pool import RolloutPool
from turnout.rollout.pool_plan import PoolPlan
from turnout.rollout.pressure import PressureWatch


def report(running: int = 8, waiting: int = 0, usage: float = 0.5) -> Any:
    row = {"num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": usage}
    return {"loads": [row]}


class Pressed:
    """A pool of 8 groups of 2 on one engine that answers when `go` is set, its admission and its watch."""

    def __init__(self, engine: ScriptedEngine, most: int = 8) -> None:
        self.engine, self.bench, self.go = engine, Bench(engine), asyncio.Event()
        self.admission = Admission(AdmissionPlan(most, per_step=4, max_staleness=9))
        ports = replace(self.bench.ports, admission=self.admission)
        self.pool = RolloutPool(ports, PoolPlan(8, 8, 1, None, plan(), NO_LIMITS, 20.0))
        client = engine.client(self.bench.clock)
        self.watch = PressureWatch(self.admission, lambda: [client], self.pool, self.bench.clock)
        engine.on_generate = self.answered

    async def answered(self, body: Any) -> Any:
        await self.go.wait()
        return self.engine.generated(body)

    async def looked(self, load: Any) -> int:
        """In flight after a look at an engine that reports so."""
        self.engine.load = load
        await self.watch.look()
        for _ in range(50):
            await asyncio.sleep(0.002)
        return self.pool.in_flight


def on(use: Callable[[Pressed], Awaitable[None]], **more: Any) -> None:
    async def main() -> None:
        async with ScriptedEngine() as engine:
            pressed = Pressed(engine, **more)
            try:
                await asyncio.wait_for(use(pressed), 20)
            finally:
                await pressed.pool.close()

    asyncio.run(main())


def test_no_more_than_asked_for_are_in_flight_and_all_are_made() -> None:
    async def use(pressed: Pressed) -> None:
        taking = asyncio.ensure_future(pressed.pool.take(8))
        await pressed.engine.until_running(6)
        assert pressed.pool.in_flight == 3
        pressed.go.set()
        assert [group.ordinal for group in (await taking).groups] == list(range(8))

    on(use, most=3)


def test_asy_10_the_newest_are_cut_where_memory_is_short_and_go_on_later() -> None:
    async def use(pressed: Pressed) -> None:
        taking = asyncio.ensure_future(pressed.pool.take(8))
        await pressed.engine.until_running(16)
        assert await pressed.looked(report(usage=0.95)) == 6
        cut = [event.group for event in pressed.bench.log.of(GroupCut)]
        assert cut == ["g00000006.0", "g00000007.0"]
        assert await pressed.looked(report()) == 7  # one more for each calm report
        assert await pressed.looked(report()) == 8
        assert [event.group for event in pressed.bench.log.of(GroupResumed)] == cut
        pressed.go.set()
        assert [group.ordinal for group in (await taking).groups] == list(range(8))

    on(use)


def test_a_long_queue_cuts_nothing() -> None:
    async def use(pressed: Pressed) -> None:
        taking = asyncio.ensure_future(pressed.pool.take(8))
        await pressed.engine.until_running(16)
        assert await pressed.looked(report(running=4, waiting=5)) == 8
        assert pressed.admission.limit == 6
        taking.cancel()

    on(use)


def test_while_no_engine_answers_nothing_starts_and_it_goes_on_by_itself() -> None:
    async def use(pressed: Pressed) -> None:
        pressed.engine.script("/v1/loads", RESET, RESET)  # the client asks twice
        assert await pressed.looked(report()) == 0
        taking = asyncio.ensure_future(pressed.pool.take(8))
        await asyncio.sleep(0.05)
        assert pressed.pool.in_flight == 0 and pressed.bench.source.position == 0
        assert await pressed.looked(report()) == 8
        pressed.go.set()
        assert len((await taking).groups) == 8

    on(use)


def test_an_engine_without_a_report_counts_as_calm() -> None:
    async def use(pressed: Pressed) -> None:
        pressed.engine.script("/v1/loads", Answer(404, {"error": {"message": "no such path"}}))
        await pressed.watch.look()
        assert pressed.admission.may_start(7, 0)

    on(use)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        (report(3, 4, 0.25), (3, 4, 0.25)),
        ({"loads": report(1, 0, 0.5)["loads"] + report(2, 1, 0.75)["loads"]}, (3, 1, 0.75)),
        ({"loads": []}, None),
        ({"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0}]}, None),
        ([{"num_reqs": 1}], None),
        (None, None),
    ],
)
def test_rol_11_parts_of_load_reports(row: Any, parts: Any) -> None:
    assert load_parts(row) == parts


def test_a_report_that_is_not_understood_is_an_error() -> None:
    async def main() -> None:
        async with ScriptedEngine() as engine:
            engine.load = {"loads": "many"}
            with pytest.raises(EngineError, match="not understood"):
                await engine.client().load_report(5.0)

    asyncio.run(main())
