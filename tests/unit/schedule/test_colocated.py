"""Trainer and engines that take turns on memory: the table, and who gives what when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.core.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineError,
    IllegalTransition,
    InvariantBroken,
    TrainError,
    WeightError,
)
from turnout.core.types import TrainBatch
from turnout.placement.real import RealClock
from turnout.schedule.colocated import Colocated, Switches
from turnout.schedule.colocated_machine import NEEDS, TRAINERS, TURNS, Moved, Turn, check
from turnout.serving.roster import EnginePlan
from turnout.train.backend import GivenBack
from turnout.transfer.turns import TakingTurns

MB = 1 << 20
# What the memory of each side is while it is this turn: (engines, trainer).
HOLDS = {
    Turn.ROLLOUT: ("all", ""), Turn.IDLE: ("all", ""), Turn.RELEASED: ("", ""), Turn.TRAIN: ("", "all"),
    Turn.AWAY: ("", ""), Turn.STALE: ("weights", ""), Turn.LOADED: ("weights", ""),
}  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=40))
def test_whatever_is_told_both_sides_never_have_the_memory(told: list[tuple[int, bool]]) -> None:
    """Against a model of two sides that take and give: what the table refuses is what would have both hold memory,
    a request without KV, or memory given twice. Told is what is legal, or (True) anything."""
    turn = Turn.ROLLOUT
    engines, trainer, quiet, attested = "all", "", False, False
    for number, anything in told:
        legal = {
            Moved.QUIET: engines == "all" and not quiet,
            Moved.RELEASED: engines == "all" and quiet,
            Moved.ONLOADED: engines == trainer == "" and quiet,
            Moved.OFFLOADED: trainer == "all",
            Moved.ROOM: trainer == "" and not quiet,  # engines that are quiet are about to give back
            Moved.ATTESTED: engines == "weights" and not attested,
            Moved.SERVING: attested,
        }
        allowed = [moved for moved in Moved if anything or legal[moved]]
        moved = allowed[number % len(allowed)]
        if not legal[moved]:
            with pytest.raises(IllegalTransition):
                TURNS.after(turn, moved)
            continue
        turn = TURNS.after(turn, moved)
        quiet = (quiet or moved is Moved.QUIET) and moved is not Moved.OFFLOADED
        attested = (attested or moved is Moved.ATTESTED) and moved not in (Moved.ROOM, Moved.SERVING)
        trainer = {Moved.ONLOADED: "all", Moved.OFFLOADED: ""}.get(moved, trainer)
        engines = {Moved.RELEASED: "", Moved.ROOM: "weights", Moved.SERVING: "all"}.get(moved, engines)
        assert (engines, trainer) == HOLDS[turn]


def test_phases_of_a_run_begin_in_their_turn_only() -> None:
    for phase, turns in NEEDS.items():
        for turn in Turn:
            if turn in turns:
                check(phase, turn)
            else:
                with pytest.raises(InvariantBroken, match=phase):
                    check(phase, turn)
    assert not NEEDS["rollout"] & TRAINERS and not NEEDS["evaluate"] & TRAINERS
    assert not NEEDS["checkpoint"] & TRAINERS, "a save reads what the trainer keeps, not what it has in hand"
    check("start", Turn.TRAIN)


class FakeEngine:
    """Holds 100 MB; gives them back `late_s` after it said so, or `share` of them."""

    def __init__(
        self, name: str = "engine-0", late_s: float = 0.0, share: float = 1.0, updated: bool = True
    ) -> None:
        self.engine_id, self.late_s, self.share = name, late_s, share
        self.plan = EnginePlan(name, updated=updated)
        self.bytes, self.loads, self.calls = 100 * MB, [2, 1, 0], list[tuple[str, tuple[str, ...]]]()
        self.dead = False

    async def load(self) -> int:
        if self.dead:
            raise self.fault(EngineDead, "load", "gone")
        return self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]

    async def control(self, path: str, body: dict[str, Any], _deadline_s: float) -> Any:
        if self.dead:
            raise self.fault(EngineDead, "update", "gone")
        tags = tuple(body["tags"])
        self.calls.append((path, tags))
        if path == "/release_memory_occupation":
            asyncio.get_running_loop().call_later(self.late_s, self._free)
            return {"success": True, "freed_bytes": {"weights": 60 * MB, "kv_cache": 40 * MB}}
        return {"success": True}

    def _free(self) -> None:
        self.bytes -= int(self.share * 100 * MB)

    def fault(self, kind: type[EngineError], phase: str, reason: str) -> EngineError:
        return kind(self.engine_id, phase, "none", reason)


class FakeWorld:
    """Two sides of one memory; `log` is what happened, in order."""

    def __init__(self, *engines: FakeEngine, gives: float = 1.0) -> None:
        self.engines, self.gives = list(engines), gives
        self.log: list[str] = []
        self.rests: list[str] = []
        self.other: WeightError | None = None
        self.turns = Colocated(Switches(True, True, 0.5), self, self, self, RealClock())  # type: ignore[arg-type]

    # the engines
    def running(self) -> list[FakeEngine]:
        return self.engines

    def held(self, engine_id: str) -> int:
        return next(engine.bytes for engine in self.engines if engine.engine_id == engine_id)

    def rest(self, engine: FakeEngine) -> None:
        self.rests.append(engine.engine_id)

    async def returns(self, engine: FakeEngine) -> None:
        engine.calls.append(("returns", ()))
        if self.other:
            raise self.other

    # the trainer
    async def call(self, _what: str, work: Callable[[Any], Any]) -> Any:
        return work(self)

    def offload(self) -> GivenBack:
        self.log.append("offload")
        return GivenBack(100 * MB, int(self.gives * 100 * MB))

    def onload(self) -> None:
        self.log.append(f"onload beside {sum(engine.bytes for engine in self.engines) // MB} MB")

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        self.log.append(f"train {batch.step}")
        with pytest.raises(InvariantBroken):
            self.turns.check("evaluate")
        return {"loss": 1.0}

    def emit(self, event: Any) -> None:
        self.log.append(f"{event.who} {event.fell // MB} of {event.asked // MB}")

    async def wake(self) -> None:
        """An update."""
        self.turns.check("prepare")
        updated: Any = [engine for engine in self.engines if engine.plan.updated]
        assert await self.turns.room(updated, 1.0) == {}
        self.turns.check("activate")
        assert await self.turns.serving(updated, 1.0) == {}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


BATCH = TrainBatch(0, "", ())


def test_mem_01_the_trainer_takes_memory_only_when_the_engines_are_gone() -> None:
    """An engine frees a while after it answered."""
    late = FakeEngine(late_s=0.2)
    world = FakeWorld(late)

    async def work() -> None:
        await world.turns.begin()
        metrics = await world.turns.train(BATCH)
        assert (metrics["released_bytes"], metrics["offloaded_bytes"]) == (100 * MB, 100 * MB)
        assert world.turns.turn is Turn.AWAY and world.rests == ["engine-0"]
        await world.wake()
        assert world.turns.turn is Turn.ROLLOUT

    run(work())
    order = ["offload", "trainer 100 of 100", "engine-0 100 of 100", "onload beside 0 MB", "train 0"]
    assert world.log == [*order, "offload", "trainer 100 of 100"]
    assert late.loads == [0], "its requests were waited for, by what it says"
    assert late.calls == [
        ("/release_memory_occupation", ("cuda_graph", "kv_cache", "weights")),
        ("/resume_memory_occupation", ("weights",)),
        ("/resume_memory_occupation", ("cuda_graph", "kv_cache")),
    ]


def test_mem_01_who_keeps_its_memory_ends_the_run_by_name() -> None:
    with pytest.raises(EngineError, match=r"engine-1.*gave back 52428800 of 104857600 bytes within 0\.5 s"):
        run(FakeWorld(FakeEngine(), FakeEngine("engine-1", share=0.5)).turns.train(BATCH))
    keeps = FakeWorld(FakeEngine(), gives=0.5)
    with pytest.raises(TrainError, match=r"gave back 52428800 of 104857600 bytes \(--offload-train\)"):
        run(keeps.turns.train(BATCH))
    assert "train 0" in keeps.log


def test_mem_07_an_engine_that_still_runs_requests_is_not_released() -> None:
    busy = FakeEngine()
    busy.loads = [1]
    with pytest.raises(DeadlineExceeded, match="requests of engine engine-0 to end"):
        run(FakeWorld(busy).turns.train(BATCH))
    assert busy.calls == []


def test_an_engine_that_dies_on_the_way_is_left_to_who_watches_it() -> None:
    """Before and after the release; one that comes in the trainer's turn gives back at once, or waits."""
    dead, other = FakeEngine("engine-0"), FakeEngine("engine-1")
    dead.dead = True
    world = FakeWorld(dead, other)

    async def work() -> None:
        await world.turns.train(BATCH)
        assert world.turns.turn is Turn.AWAY
        other.dead = True
        faults = await world.turns.room([other], 1.0)  # type: ignore[list-item]
        assert isinstance(faults["engine-1"], EngineDead)
        again = FakeEngine("engine-1")
        world.engines = [again]
        world.turns.turn = Turn.TRAIN
        await world.turns.joins(again)  # type: ignore[arg-type]
        assert [path for path, _ in again.calls] == ["/release_memory_occupation"]
        waits = asyncio.ensure_future(world.turns.engines_turn())
        await asyncio.sleep(0.1)
        assert not waits.done()
        world.turns.turn = Turn.AWAY
        await waits
        await world.wake()
        assert again.calls[-1] == ("/resume_memory_occupation", ("cuda_graph", "kv_cache"))

    run(work())


def test_mem_01_an_engine_that_comes_while_the_others_give_back_gives_back_as_well() -> None:
    """Before the trainer's turn, so that whoever had it join did not ask for it."""
    late = FakeEngine("engine-1")

    class First(FakeEngine):
        async def load(self) -> int:
            if late not in world.engines:
                world.engines = [*world.engines, late]
                await world.turns.joins(late)  # type: ignore[arg-type]
            return await super().load()

    world = FakeWorld(First())
    metrics = run(world.turns.train(BATCH))
    assert "onload beside 0 MB" in world.log and metrics["released_bytes"] == 200 * MB


BACK = [("/resume_memory_occupation", ("cuda_graph", "kv_cache", "weights")), ("returns", ())]


def test_a_frozen_model_is_asked_nothing_gives_back_and_returns_before_rollouts_go_on() -> None:
    """Nothing new goes to it before it is waited for. One that returns with other weights ends the run."""
    judge = FakeEngine("judge-0", updated=False)

    class Busy(FakeEngine):
        async def load(self) -> int:
            assert world.rests == ["judge-0"], "its requests end, and no new ones come"
            return await super().load()

    world = FakeWorld(Busy(), judge)

    async def work() -> None:
        for _ in range(2):
            await world.turns.train(BATCH)
            assert judge.calls.pop()[0] == "/release_memory_occupation"
            await world.wake()
            assert world.turns.turn is Turn.ROLLOUT and judge.calls == BACK
            judge.calls.clear()
            for engine in world.engines:
                engine.bytes = 100 * MB
            world.rests.clear()
        world.other = WeightError("judge-0 holds another root")
        await world.turns.train(BATCH)
        with pytest.raises(WeightError, match="another root"):
            await world.wake()

    run(work())


def test_a_frozen_model_that_dies_or_comes_again_in_the_trainers_turn_waits_for_its_own() -> None:
    dead, again = FakeEngine("judge-0", updated=False), FakeEngine("judge-0", updated=False)
    world = FakeWorld(FakeEngine(), dead)
    joined = list[str]()

    async def joins() -> str:
        joined.append(world.turns.turn.value)
        return "serves again"

    async def work() -> None:
        assert await world.turns.takes_in(dead, joins) == "serves again"  # type: ignore[arg-type]
        await world.turns.train(BATCH)
        dead.dead = True
        world.engines[1], world.turns.turn = again, Turn.TRAIN
        waits = asyncio.ensure_future(world.turns.takes_in(again, joins))  # type: ignore[arg-type]
        while not again.calls:  # noqa: ASYNC110 - what it is told is a list
            await asyncio.sleep(0.01)
        world.turns.turn = Turn.AWAY
        await asyncio.sleep(0.1)
        assert joined == ["rollout"]
        await world.wake()
        assert await waits == "serves again" and joined == ["rollout"] * 2
        assert again.calls[1:] == BACK and dead.calls[-1][0] == "/release_memory_occupation"

    run(work())


def test_a_failed_update_takes_no_memory_twice() -> None:
    """A real SGLang dies on resuming what it did not release."""
    engine = FakeEngine()
    world = FakeWorld(engine)

    async def work() -> None:
        await world.turns.train(BATCH)
        for _ in range(2):
            await world.turns.room([engine], 1.0)  # type: ignore[list-item]
        await world.turns.serving([engine], 1.0)  # type: ignore[list-item]
        await world.wake()  # an update that no step came before
        engine.bytes = 100 * MB
        await world.turns.train(BATCH)

    run(work())
    resumed = [tags for path, tags in engine.calls if path.startswith("/resume")]
    assert resumed == [("weights",), ("cuda_graph", "kv_cache")]


def test_engines_that_cannot_take_their_memory_fail_in_the_update() -> None:
    """The transport around: no tensor is sent to them, and one without KV is not committed."""

    class Sends:
        async def prepare(self, *_: Any) -> dict[str, None]:
            raise AssertionError("sent to an engine without memory")

    class Short:
        async def room(self, engines: Any, _: float) -> dict[str, Exception]:
            return {engines[0].engine_id: EngineError("engine-0", "memory", "none", "no room")}

    async def work() -> dict[str, Exception | None]:
        turns = TakingTurns(Sends(), Short(), RealClock())  # type: ignore[arg-type]
        return await turns.prepare(None, tuple, [FakeEngine(), FakeEngine("engine-1")], 1.0)  # type: ignore[arg-type]

    assert list(run(work())) == ["engine-0"], "the others are asked for again"
