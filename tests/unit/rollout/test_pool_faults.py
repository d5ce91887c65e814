"""Rollouts whose engines, tasks and rewards misbehave: each group is accounted for, slots come back, nothing waits
for what cannot come."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.scripted_engine import HANG, ScriptedEngine
from tests.unit.rollout.parts import NO_LIMITS, TOKENS, Bench, Numbers, plan
from tests.unit.rollout.test_sampler import SEED, begun
from turnout.core.errors import InvariantBroken, TrainError, WeightError
from turnout.core.events import GroupTrained
from turnout.core.types import Finish, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.placement.real import RealClock
from turnout.rollout.cut import Cut
from turnout.rollout.pool import RolloutPool
from turnout.rollout.pool_plan import CollectLimits, PoolPlan
from turnout.rollout.rewards import RewardRunner
from turnout.rollout.sampler import Routes, Sampler
from turnout.rollout.worker import Generator, GroupFailed


def on(use: Callable[..., Awaitable[Any]], engines: int = 1, **more: Any) -> Any:
    async def main() -> Any:
        made = [ScriptedEngine(f"e{n}") for n in range(engines)]
        for engine in made:
            await engine.__aenter__()
        try:
            return await asyncio.wait_for(use(Bench(*made, **more), *made), 30)
        finally:
            for engine in made:
                await engine.__aexit__(None, None, None)

    return asyncio.run(main())


def finished(group: RolloutGroup) -> RolloutGroup:
    """Two members with different rewards, made by nobody."""
    spans, engines = VersionSpans().extended(1, "v"), Runs().extended(1, "e")
    members = tuple(
        Trajectory((1,), (-0.5,), (1,), spans, Finish.STOP, "", engines, seed, float(seed))
        for seed in range(2)
    )
    return replace(group, trajectories=members)


class Maker:
    """In a generator's place: what `answer` says becomes of each group."""

    def __init__(self, answer: Callable[[RolloutGroup], Awaitable[Any]]) -> None:
        self._answer = answer

    async def group(self, group: RolloutGroup, plan: Any, seeds: Any, members: Any, cut: Cut) -> Any:
        return await self._answer(group)


def pool_of(bench: Bench, answer: Any, **more: Any) -> RolloutPool:
    maker: Any = answer if isinstance(answer, Maker) else Maker(answer)
    made = PoolPlan(4, 4, 1, None, plan(), NO_LIMITS, 5.0)
    return RolloutPool(replace(bench.ports, generator=maker, clock=RealClock()), replace(made, **more))


def conserved(bench: Bench) -> bool:
    counts = bench.book.counts()
    return counts["lost"] == 0 and counts["taken"] == (
        counts["trained"] + counts["dropped"] + counts["requeued"] + len(bench.book.open_groups)
    )


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), WeightError("no engine"), KeyError("x")])
def test_asy_04_a_task_that_raises_ends_the_wait_with_its_fault(fault: Exception) -> None:
    async def use(bench: Bench, _engine: ScriptedEngine) -> None:
        async def answer(group: RolloutGroup) -> Any:
            if group.ordinal == 2:
                raise fault
            return finished(group)

        pool = pool_of(bench, answer)
        with pytest.raises(type(fault)):
            await pool.take(4)
        await pool.close()
        assert conserved(bench)

    on(use)


def test_asy_04_a_task_that_gives_nothing_ends_the_wait_too() -> None:
    async def use(bench: Bench, _engine: ScriptedEngine) -> None:
        async def answer(group: RolloutGroup) -> Any:
            return None if group.ordinal == 2 else finished(group)

        pool = pool_of(bench, answer)
        with pytest.raises(InvariantBroken, match=r"group g00000002.0 ended as None"):
            await pool.take(4)
        await pool.close()
        assert conserved(bench)

    on(use)


@pytest.mark.parametrize("ending", ["a member failed", "cancelled"])
def test_a_group_that_was_cut_goes_on_from_what_was_journalled_of_members_that_it_lacks(ending: str) -> None:
    """Else their tokens would be journalled twice, which stops the run."""

    async def use(bench: Bench, _engine: ScriptedEngine) -> None:
        begins: list[RolloutGroup] = []

        class Failing(Maker):
            def __init__(self) -> None: ...

            async def group(self, group: RolloutGroup, plan: Any, seeds: Any, members: Any, cut: Cut) -> Any:
                begins.append(group)
                have = sum(len(t.response_ids) for t in group.trajectories if t.seed == SEED)
                members.tokens(0, begun(have + 4))
                if len(begins) > 1:
                    return finished(group)
                if ending == "cancelled":
                    raise asyncio.CancelledError
                return replace(group, trajectories=(replace(begun(3), seed=SEED + 1),))

        pool = pool_of(bench, Failing(), per_step=1, slots=1)
        await pool.take(1)
        await pool.close()
        (known,) = (t for t in begins[1].trajectories if t.seed == SEED)
        assert known.response_ids == begun(4).response_ids

    on(use)


def test_asy_04_a_task_that_is_cancelled_by_itself_is_begun_again() -> None:
    async def use(bench: Bench, _engine: ScriptedEngine) -> None:
        tries: list[str] = []

        async def answer(group: RolloutGroup) -> Any:
            tries.append(group.group_id)
            if tries.count(group.group_id) < 3 and group.ordinal == 2:
                raise asyncio.CancelledError
            return finished(group)

        pool = pool_of(bench, answer)
        got = await pool.take(4)
        assert [group.ordinal for group in got.groups] == [0, 1, 2, 3]
        assert tries.count("g00000002.0") == 3
        await pool.close()
        assert conserved(bench)

    on(use)


@pytest.mark.parametrize("seed", range(3))
def test_asy_10_slots_come_back_whatever_order_things_end_in(seed: int) -> None:
    """About a thousand events: groups finish, fail, are filtered, cut, sent back and dropped, steps are committed
    late or together. At the end of the data no slot is taken, and no group is lost."""
    rng = random.Random(seed)

    async def use(bench: Bench, _engine: ScriptedEngine) -> int:
        async def answer(group: RolloutGroup) -> Any:
            for _ in range(rng.choice((0, 0, 1, 3, 9))):
                await asyncio.sleep(0)
            if rng.random() < 0.15:
                raise GroupFailed("failed")
            return finished(group)

        limits = CollectLimits(10_000)
        pool = pool_of(bench, answer, slots=12, window=3, limits=limits)
        step = committed = events = 0
        while True:
            while step - committed >= 2 or (committed < step and rng.random() < 0.5):
                committed += 1
                pool.committed(committed)
            got = await pool.take(4)
            for group in got.groups:
                chance = rng.random()
                if chance < 0.05 and group.attempt < 2:
                    pool.send_back(group, "too old")
                elif chance < 0.1:
                    pool.drop(group, "too old")
                else:
                    bench.book.take(step, [group])
                    bench.book.train([GroupTrained(group.group_id, step, [], 0)])
                events += 1
            pool.end_step()
            step += 1
            if rng.random() < 0.1:
                await pool.cut()
            if got.last and not pool.in_flight and not bench.book.open_groups:
                break
        pool.committed(step)
        assert pool._open.charged == 0
        assert bench.book.counts()["lost"] == 0
        return events + bench.book.dropped.total()

    assert on(use, rows=900) >= 900


def test_asy_11_nothing_is_asked_of_an_engine_before_the_first_groups_are_asked_for() -> None:
    """The order of a start is: restore, publish, attest, take. A pool that exists, and even one that was given what
    a resume brought back, has sent nothing."""

    async def use(bench: Bench, engine: ScriptedEngine) -> None:
        pool = RolloutPool(bench.ports, PoolPlan(4, 4, 1, None, plan(), NO_LIMITS, 20.0))
        await asyncio.sleep(0.05)
        assert engine.calls == []
        assert bench.source.position == 0
        await pool.take(4)
        assert len(engine.sent("/generate")) == 8
        await pool.close()

    on(use)


def test_rol_10_a_cut_ends_what_is_in_flight_though_an_engine_is_gone() -> None:
    """One of three engines has just gone: the other two are let go of, nothing raises, and the rollout goes on."""

    async def use(bench: Bench, *engines: ScriptedEngine) -> None:
        for engine in engines:
            engine.on_generate = lambda body: HANG if body["input_ids"][0] != 0 else reply_of(body)
        reply_of = engines[0].generated
        made = PoolPlan(1, 6, 7, None, plan(), NO_LIMITS, 20.0, surplus=5)
        pool = RolloutPool(bench.ports, made)
        taking = asyncio.ensure_future(pool.take(1))
        await engines[2].__aexit__(None, None, None)
        got = await taking
        assert [group.ordinal for group in got.groups] == [0]
        for engine in engines[:2]:
            await engine.until_running(0)
        assert pool.in_flight == 0
        await pool.close()
        assert conserved(bench)

    on(use, engines=3)


def limited(engine: ScriptedEngine, slow: Any, limits: CollectLimits) -> tuple[Bench, RolloutPool]:
    """A pool whose samples have half a second; prompts for which `slow` holds get no answer."""
    bench = Bench(engine, clock=RealClock())
    engine.on_generate = lambda body: HANG if slow(body["input_ids"][0]) else engine.generated(body)
    return bench, RolloutPool(bench.ports, PoolPlan(4, 4, 1, None, plan(deadline_s=0.5), limits, 20.0))


def test_rol_19_one_sample_past_its_deadline_costs_its_group_and_no_more() -> None:
    async def use(_bench: Bench, engine: ScriptedEngine) -> None:
        bench, pool = limited(engine, lambda n: n == 1, NO_LIMITS)
        got = await pool.take(4)
        assert [group.ordinal for group in got.groups] == [0, 2, 3, 4]
        assert got.failed == 1
        await engine.until_running(0)
        await pool.close()
        assert conserved(bench)

    on(use)


def test_rol_19_where_every_engine_hangs_the_run_ends_bounded_and_says_why() -> None:
    async def use(_bench: Bench, engine: ScriptedEngine) -> None:
        bench, pool = limited(engine, lambda n: True, CollectLimits(3))
        with pytest.raises(
            TrainError, match=r"4 groups failed \(--max-failed-groups 3\), \d of them with: .*0\.5"
        ):
            await pool.take(4)
        await pool.close()
        assert conserved(bench)

    on(use)


def test_rol_22_a_reward_that_blocks_does_not_block_the_loop() -> None:
    """64 samples whose reward waits for something that only the event loop can do: to answer the 64th request."""
    answered = threading.Event()

    def reward(prompt: str, response: str, label: Any) -> float:
        return float(answered.wait(10))

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        seen: list[Any] = []

        def told(body: Any) -> Any:
            seen.append(body)
            if len(seen) == 64:
                answered.set()
            return engine.generated(body)

        engine.on_generate = told
        rewards = RewardRunner(reward, RealClock(), workers=2)
        sampler = Sampler(Routes(lambda: [engine.client(bench.clock)]), Numbers(), RealClock())
        ports = replace(bench.ports, generator=Generator(sampler, rewards))
        pool = RolloutPool(ports, PoolPlan(32, 32, 1, None, plan(2), NO_LIMITS, 20.0))
        got = await pool.take(32)
        await pool.close()
        return got

    got = on(use)
    assert [group.rewards for group in got.groups] == [[1.0, 1.0]] * 32
    assert all(len(t.response_ids) == TOKENS for group in got.groups for t in group.trajectories)
