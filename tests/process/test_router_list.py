"""A real router between samples and scripted engines: who is behind it, and what its answers mean."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.process.test_router import KINDS, needs
from tests.scripted_engine import Answer, ScriptedEngine, reply
from tests.unit.rollout.parts import Log
from turnout.core.errors import ConfigError, EngineDead, EngineRefused, VersionUnmet, WeightError
from turnout.core.events import RouterLost, RouterReady
from turnout.core.version import WeightVersion
from turnout.placement.real import RealClock
from turnout.protocol.sglang import GenerateReply, GenerateRequest, SamplingParams
from turnout.protocol.stream import PartialReply
from turnout.schedule.run_router import RouterPlan, RunRouter
from turnout.serving.router_client import RouterRoute, Worker
from turnout.serving.router_launcher import RouterLaunch, launch_router
from turnout.transfer.fleet import Fleet
from turnout.weights.routing import Held

CLOCK = RealClock()
HELD = Held(WeightVersion(1, 3, "ab" * 16), 0)
LABEL = HELD.version.label
KIND = [pytest.param(kind, marks=needs(kind)) for kind in KINDS]


class World:
    """Two scripted engines and a router of the run, with nobody behind it."""

    def __init__(self, kind: str, folder: Path, engines: list[ScriptedEngine]) -> None:
        for engine in engines:
            engine.label = LABEL
        self.engines, self.log = engines, Log()
        self.fleet = Fleet([engine.client(CLOCK) for engine in engines], self.log, None, 0)
        self.fleet.current = HELD
        self.launch = RouterLaunch("router", kind, "manual", {}, 60.0, folder)
        self.router = RunRouter(RouterPlan("router", "run-a", self.launch), self.log, CLOCK)

    async def until(self, *names: str) -> RouterRoute:
        """The route through the router once these engines, and nobody else, are behind it."""
        while True:
            with contextlib.suppress(WeightError):
                [route] = self.router.members.routable()
                if sorted(route.behind.engines.values()) == sorted(names):
                    return route
            await asyncio.wait_for(self.router.members.changed(), 30)


@contextlib.asynccontextmanager
async def world(kind: str, folder: Path) -> AsyncIterator[World]:
    async with ScriptedEngine("e0") as one, ScriptedEngine("e1") as two:
        made = World(kind, folder, [one, two])
        await made.router.start(made.fleet)
        watch = asyncio.ensure_future(made.router.watch(lambda: "rollout", lambda _: None))
        try:
            yield made
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await made.router.stop()


async def becomes(true: Callable[[], Any]) -> None:
    """Returns when `true()`, or what it awaits, is true; the test has a deadline."""
    while True:
        found = true()
        if await found if asyncio.iscoroutine(found) else found:
            return
        await asyncio.sleep(0.05)


def request(key: str = "k", count: int = 3, **more: Any) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=count, sampling_seed=5)
    return GenerateRequest("a" * 32, (1, 2), params, extra_key=LABEL, routing_key=key, **more)


async def streamed(route: RouterRoute, asked: GenerateRequest) -> list[PartialReply | GenerateReply]:
    return [item async for item in route.generate_stream(asked, 30)]


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 100))


@pytest.mark.parametrize("kind", KIND)
def test_rtr_07_rtr_14_engines_are_behind_a_router_while_they_hold_a_committed_version(
    kind: str, tmp_path: Path
) -> None:
    async def work() -> None:
        async with world(kind, tmp_path) as made:
            with pytest.raises(WeightError, match="no engines yet"):
                made.router.members.routable()
            assert made.router.serving() == []
            made.fleet.hold("e0", HELD)
            route = await made.until("e0")
            assert made.router.serving() == [route], "custom functions ask the router too"
            items = await streamed(route, request())
            assert isinstance(items[0], PartialReply) and items[0].engine_id == "e0"
            assert items[-1].output_ids == tuple(reply(3, LABEL, 5)["output_ids"])
            assert items[-1].spans == ((3, LABEL),) and items[-1].logprobs == (-0.5,) * 3
            [body] = [body for body in made.engines[0].sent("/generate") if body["rid"] == "a" * 32]
            assert body["extra_key"] == LABEL and body["sampling_params"]["sampling_seed"] == 5
            made.fleet.hold("e1", HELD)
            route = await made.until("e0", "e1")
            homes = {key: (await streamed(route, request(key)))[0].engine_id for key in "abcdefgh" * 2}  # type: ignore[union-attr]
            assert set(homes.values()) == {"e0", "e1"}, "the least loaded of two gets a new prompt"
            for key, home in homes.items():
                assert (await streamed(route, request(key)))[0].engine_id == home, "and keeps it"  # type: ignore[union-attr]
            made.fleet.activate("e0")
            with pytest.raises(WeightError, match="put into place"):
                made.router.members.routable()
            made.fleet.fence("e0", "", "a test")
            with pytest.raises(WeightError, match="must not be asked"):
                made.router.members.routable()
            route = await made.until("e1")
            assert [(await streamed(route, request(key)))[0].engine_id for key in homes] == ["e1"] * 8  # type: ignore[union-attr]
            made.fleet.hold("e0", HELD)  # the same address again, while smg still takes it out
            await made.until("e0", "e1")

    run(work)


@pytest.mark.parametrize("kind", KIND)
def test_what_engines_answer_comes_through(kind: str, tmp_path: Path) -> None:
    async def work() -> None:
        async with world(kind, tmp_path) as made:
            [engine, other] = made.engines
            made.fleet.hold("e0", HELD)
            route = await made.until("e0")
            before = len(engine.sent("/generate"))
            engine.script("/generate", *[Answer(400, {"error": {"message": "too long", "code": 400}})] * 20)
            for _ in range(20):
                with pytest.raises(EngineRefused, match="too long"):
                    await streamed(route, request())
            assert len(await streamed(route, request())) == 2, "a fault of requests is none of the engine"
            assert len(engine.sent("/generate")) == before + 21, "nothing is retried"
            stale = {"error": {"message": "old"}, "served": {"version": "v2", "root": "r"}}
            engine.script("/generate", Answer(409, stale))
            with pytest.raises(VersionUnmet) as unmet:
                await streamed(route, request())
            assert unmet.value.last_version == "v2"
            events = {"Content-Type": "text/event-stream"}
            for headers in ({}, events):
                engine.script("/generate", Answer(body=[reply(1, LABEL)], ending="cut", headers=headers))
                with pytest.raises(EngineDead):
                    await streamed(route, request())
            await engine._runner.cleanup()  # the process is gone, and nobody has told
            with pytest.raises(EngineDead):
                await streamed(route, request())
            made.fleet.hold("e1", HELD)
            made.fleet.lost("e0", "gone")
            route = await made.until("e1")
            assert len(await streamed(route, request())) == 2
            made.router._router.process._process.kill()  # type: ignore[union-attr] # its guard, which ends it
            await becomes(lambda: len(made.log.of(RouterReady)) == 2)
            assert "ended" in made.log.of(RouterLost)[0].reason
            with pytest.raises(EngineDead):
                await streamed(route, request())
            assert len(await streamed(await made.until("e1"), request())) == 2
            assert other.sent("/generate")

    run(work)


@pytest.mark.parametrize("kind", KIND)
def test_a_router_of_somebody_else_keeps_what_others_put_there(kind: str, tmp_path: Path) -> None:
    async def work() -> None:
        theirs = await launch_router(RouterLaunch("theirs", kind, "manual", {}, 60.0, tmp_path), CLOCK)

        async def count(serving: bool = False) -> int:
            return sum(one.serves if serving else not one.leaves for one in await theirs.client.workers())

        async def empty() -> bool:
            return await count() == 0

        try:
            async with ScriptedEngine("e0") as stranger, ScriptedEngine("e1") as mine:
                plan = RouterPlan("router", "run-a", None, theirs.client.address)
                log = Log()
                for engine, whose in ((stranger, "run-b"), (mine, "run-a")):
                    await theirs.client.add(Worker(engine.address.url), whose)
                while await count(serving=True) < 2:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
                with pytest.raises(ConfigError, match=f"workers of somebody else: {stranger.address.url}"):
                    await RunRouter(plan, log, CLOCK).check()
                assert await count() == 2
            await RunRouter(plan, log, CLOCK).check()  # both are gone now: so are their entries
            await becomes(empty)
            async with ScriptedEngine("e0") as engine:
                engine.label = LABEL
                fleet = Fleet([engine.client(CLOCK)], log, None, 0)
                fleet.current = HELD
                fleet.hold("e0", HELD)
                router = RunRouter(plan, log, CLOCK)
                await router.start(fleet)
                watch = asyncio.ensure_future(router.watch(lambda: "rollout", lambda _: None))
                while True:
                    with contextlib.suppress(WeightError):
                        router.members.routable()
                        break
                    await asyncio.sleep(0.05)
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
                await router.stop()
                await becomes(empty)
        finally:
            await theirs.stop()

    run(work)


@needs("smg")
def test_arguments_are_those_that_the_router_has(tmp_path: Path) -> None:
    async def work() -> None:
        wrong = RouterLaunch("router", "smg", "by_mood", {"no-such": 1, "queue-size": 7}, 60.0, tmp_path)
        with pytest.raises(ConfigError) as refused:
            await RunRouter(RouterPlan("router", "r", wrong), Log(), CLOCK).check()
        assert [fault.where for fault in refused.value.faults] == ["--router-no-such", "--router-policy"]

    run(work)
