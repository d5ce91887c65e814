"""The virtual event loop: time by timers only, one run for one seed, and processes that are killed at an await."""

from __future__ import annotations

import asyncio
import time

import pytest

from turnout.core.errors import DeadlineExceeded
from turnout.sim.loop import EPOCH_S, LIFE, Life, Stuck, VirtualClock, VirtualLoop


def run(work, loop=None, **limits):
    loop = VirtualLoop(0, **limits) if loop is None else loop
    try:
        return loop.run_until_complete(work)
    finally:
        loop.discard()


def begun(life, work):
    token = LIFE.set(life)
    try:
        return asyncio.ensure_future(work)
    finally:
        LIFE.reset(token)


def test_an_hour_passes_at_once_and_in_order():
    loop = VirtualLoop(0)
    clock = VirtualClock(loop)

    async def main():
        order = []

        async def wait(seconds):
            await clock.sleep(seconds)
            order.append((seconds, round(clock.now(), 3)))

        await asyncio.gather(wait(3600), wait(1), wait(60))
        return order, clock.wall()

    began = time.monotonic()
    order, wall = run(main(), loop)
    assert order == [(1, 1.0), (60, 60.0), (3600, 3600.0)]
    assert wall == pytest.approx(EPOCH_S + 3600)
    assert time.monotonic() - began < 60


def test_a_deadline_cancels_what_it_waits_for():
    loop = VirtualLoop(0)
    clock = VirtualClock(loop)

    async def main():
        with pytest.raises(DeadlineExceeded, match="waited 2 s for an answer"):
            await clock.within(2, "an answer", clock.sleep(10))
        return clock.now()

    assert run(main(), loop) == pytest.approx(2)


def timers_of_one_instant(seed):
    loop = VirtualLoop(seed)
    clock = VirtualClock(loop)

    async def main():
        order = []

        async def wait(name):
            await clock.sleep(5)
            order.append(name)

        await asyncio.gather(*map(wait, range(8)))
        return order

    return run(main(), loop)


def test_timers_of_one_instant_fire_in_an_order_of_the_seed():
    assert timers_of_one_instant(1) == timers_of_one_instant(1)
    assert len({tuple(timers_of_one_instant(seed)) for seed in range(5)}) > 1


def test_what_nothing_can_end_is_stuck_at_once():
    with pytest.raises(Stuck, match="no timer"):
        run(asyncio.Event().wait())


def test_a_world_without_end_is_stuck():
    loop = VirtualLoop(0, seconds_max=100)
    clock = VirtualClock(loop)

    async def forever():
        while True:
            await clock.sleep(1)

    async def spin():
        while True:  # noqa: ASYNC110 - that is the point
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="virtual seconds"):
        run(forever(), loop)
    with pytest.raises(Stuck, match="callbacks"):
        run(spin(), callbacks_max=1000)


def test_a_killed_life_runs_nothing_more_not_even_finally():
    loop = VirtualLoop(0)
    clock = VirtualClock(loop)
    seen = []

    async def victim():
        try:
            await clock.sleep(10)
        finally:
            seen.append("finally")

    async def main():
        life = Life("controller")
        task = begun(life, victim())
        await clock.sleep(1)
        life.kill()
        await clock.sleep(100)
        return task.done()

    assert loop.run_until_complete(main()) is False
    assert seen == []
    loop.discard()


def test_a_life_dies_before_its_nth_callback_wherever_that_is():
    def steps_done(crash_at):
        done, loop = [], VirtualLoop(0)
        clock = VirtualClock(loop)

        async def work():
            for step in range(10):
                await clock.sleep(1)
                done.append(step)

        async def main():
            life = Life("controller", crash_at)
            begun(life, work())
            await clock.sleep(100)
            return life.alive

        alive = run(main(), loop)
        return len(done), alive

    found = [steps_done(crash_at) for crash_at in range(1, 30)]
    assert {count for count, _ in found} == set(range(11))
    assert (0, False) in found and (10, True) in found


def test_what_a_task_raised_unseen_is_kept_for_the_checkers():
    async def main():
        async def fails():
            raise ValueError("unseen")

        task = asyncio.ensure_future(fails())
        await asyncio.sleep(1)
        del task

    loop = VirtualLoop(0)
    loop.run_until_complete(main())
    loop.discard()
    assert [str(fault) for fault in loop.faults] == ["unseen"]


def test_threads_are_work_between_two_callbacks():
    async def main():
        with pytest.raises(OSError, match="full"):
            await asyncio.to_thread(raises)
        return await asyncio.to_thread(lambda: 7)

    def raises():
        raise OSError("full")

    assert run(main()) == 7
