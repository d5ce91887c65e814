"""The list of a router that is slow, forgetful, or older than what is known of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from tests.scripted_engine import Answer, ScriptedEngine, reply
from tests.unit.rollout.parts import Log
from turnout.core.errors import ConfigError, EngineError, WeightError
from turnout.core.types import Finish, Trajectory
from turnout.core.version import WeightVersion
from turnout.placement.real import RealClock
from turnout.protocol.sglang import GenerateRequest, SamplingParams
from turnout.protocol.stream import PartialReply
from turnout.rollout.draft import Desk, Draft, Pace
from turnout.schedule.router_list import PROBE_S, RouterList
from turnout.schedule.run_router import RouterPlan, RunRouter
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.serving.router_client import RouterClient, RouterRoute
from turnout.transfer.fleet import Fleet
from turnout.weights.routing import Held, Standing

HELD = Held(WeightVersion(1, 3, "ab" * 16), 0)
LABEL = HELD.version.label
CLOCK = RealClock()


class LaterClock(RealClock):
    later_s = 0.0

    def now(self) -> float:
        return super().now() + self.later_s


class Router(ScriptedEngine):
    """Answers 202 and lists a worker from the second look on; passes requests as `on_generate` says."""

    def __init__(self) -> None:
        super().__init__("router")
        self.rows: list[dict[str, Any]] = []
        self.looks, self.label = 0, LABEL

    def _behave(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/workers" and body:
            row = {"id": str(len(self.rows)), "is_healthy": True, "metadata": body["labels"], **body}
            self.rows.append(row)
            self.looks = 0
            return Answer(202, {"status": "accepted"})
        if path == "/workers":
            self.looks += 1
            return {"workers": self.rows if self.looks > 1 else self.rows[:-1]}
        return super()._behave(path, body)


class Bench:
    """A router, and one engine that holds a version."""

    def __init__(self, router: Router, engine: ScriptedEngine) -> None:
        self.router, self.fleet = router, Fleet([engine.client(CLOCK)], Log(), None, 0)
        self.fleet.current = HELD
        self.fleet.hold("e0", HELD)
        self.clock = LaterClock()
        self.client = RouterClient("router", router.address, self.clock)
        self.members = RouterList("router", "run-a", self.fleet)
        self.members.begin(self.client)


def run(work: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with Router() as router, ScriptedEngine("e0") as engine:
            bench = Bench(router, engine)
            try:
                await asyncio.wait_for(work(bench), 20)
            finally:
                await bench.client.close()

    asyncio.run(main())


def test_rtr_13_a_worker_is_one_when_the_list_has_it_and_not_when_it_was_accepted() -> None:
    async def work(bench: Bench) -> None:
        assert not await bench.members.match()
        assert len(bench.router.rows) == 1, "it was accepted"
        with pytest.raises(WeightError, match="no engines yet"):
            bench.members.routable()
        await bench.members.match()
        bench.router.looks = 5
        assert await bench.members.match()
        [route] = bench.members.routable()
        assert list(route.behind.engines.values()) == ["e0"] and route.version == LABEL

    run(work)


def test_rtr_22_a_router_that_drops_what_trains_is_refused_at_the_start() -> None:
    async def work(bench: Bench) -> None:
        whole = reply(1, LABEL)
        bench.router.on_generate = lambda _: (
            whole | {"meta_info": {"finish_reason": {"type": "length"}, "completion_tokens": 1}}
        )
        await bench.members.match()
        bench.router.looks = 5
        await bench.members.match()
        bench.clock.later_s = PROBE_S
        with pytest.raises(ConfigError, match="does not pass token ids with their log-probs"):
            await bench.members.match()
        with pytest.raises(WeightError, match="yet to pass a token"):
            bench.members.routable()

    run(work)


def test_an_abort_of_the_first_token_is_no_fault_of_the_router() -> None:
    async def work(bench: Bench) -> None:
        bench.router.script("/generate", Answer(body=reply(0, LABEL, finish=Finish.ABORT)))
        await bench.members.match()
        bench.router.looks = 5
        assert await bench.members.match()
        with pytest.raises(WeightError, match="yet to pass a token"):
            bench.members.routable()
        assert await bench.members.match()
        assert len(bench.members.routable()) == 1

    run(work)


def test_rtr_05_a_list_of_another_shape_is_told_with_what_came() -> None:
    async def work(bench: Bench) -> None:
        bench.router.script("/workers", Answer(body={"urls": ["http://a:1"]}))
        with pytest.raises(EngineError, match=r"/workers not understood: \{'urls'"):
            await bench.members.match()

    run(work)


def test_a_worker_of_others_stays_and_nothing_goes_through_beside_it() -> None:
    async def work(bench: Bench) -> None:
        theirs = {"url": "http://127.0.0.1:9", "worker_type": "regular", "id": "x", "is_healthy": True}
        bench.router.rows.append(theirs)
        bench.router.looks = 5
        await bench.members.match()
        bench.router.looks = 5
        assert not await bench.members.match()
        assert theirs in bench.router.rows and not bench.router.sent("/workers/x")
        with pytest.raises(WeightError, match=r"127\.0\.0\.1:9, which must not be asked now"):
            bench.members.routable()

    run(work)


def test_a_worker_whose_certificate_is_not_trusted_is_no_dead_one() -> None:
    async def work(bench: Bench) -> None:
        async with ScriptedEngine("theirs") as engine:
            url = engine.address.url.replace("http", "https")  # so that the handshake fails
            theirs = {"url": url, "worker_type": "regular", "id": "x", "is_healthy": True}
            bench.router.rows.append(theirs)
            bench.router.looks = 5
            router = RunRouter(RouterPlan("router", "run-a", None, bench.router.address), Log(), CLOCK)
            with pytest.raises(ConfigError, match="it has workers of somebody else: https"):
                await router.check()
            assert not bench.router.sent("/workers/x"), "it stays in the list of the others"

    run(work)


def test_tokens_that_nobody_is_named_for_stand_as_with_all_engines_that_the_router_was_told_of() -> None:
    async def work(bench: Bench) -> None:
        bench.router.on_generate = lambda body: reply(body["sampling_params"]["max_new_tokens"], LABEL)
        await bench.members.match()
        bench.router.looks = 5
        await bench.members.match()
        bench.fleet.add(EngineClient("e1", Address("127.0.0.1", 9), CLOCK))  # joins, and proved nothing yet
        [route] = bench.members.routable()
        request = GenerateRequest("rid", (1,), SamplingParams(max_new_tokens=2))
        [told, _] = [item async for item in route.generate_stream(request, 5.0)]
        assert isinstance(told, PartialReply) and (told.engine_id, told.among) == ("router", ("e0",))
        pairs = RouterRoute(bench.client, replace(route.behind, pairs=True, told=("p", "d")), "run-a")
        parts = [item async for item in pairs.generate_stream(request, 5.0) if isinstance(item, PartialReply)]
        assert [(part.output_ids, part.among) for part in parts] == [((0,), ("p", "d")), ((7,), ("p", "d"))]
        desk = Desk(bench.members.routes(lambda: 9.0).standing, CLOCK, Pace())

        def kept(part: PartialReply) -> tuple[int, Standing]:
            draft = Draft(Trajectory.unbegun(0), desk, lambda _: None)
            draft.extend(part)
            return len(draft.ids), draft.settle()

        assert kept(told) == (2, Standing.COMMITTED), "e1 was not behind it"
        assert kept(replace(told, among=("e0", "e1")))[0] == 0, "e1 may have made it"
        bench.fleet.activate("e0")
        newer = replace(told, spans=((2, WeightVersion(1, 4, "cd" * 16).label),))
        assert kept(newer) == (2, Standing.TENTATIVE)
        bench.fleet.fence("e0", newer.spans[0][1], "a test")
        assert kept(newer)[0] == 0

    run(work)
