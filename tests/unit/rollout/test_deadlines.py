"""Waits that share one timer, and groups whose ends are told together."""

from __future__ import annotations

import asyncio

from turnout.core.types import Prompt, RolloutGroup
from turnout.placement.real import RealClock
from turnout.rollout.cut import Cut
from turnout.rollout.deadlines import Deadlines
from turnout.rollout.in_flight import Ends, InFlight


def test_each_wait_ends_at_its_own_deadline_or_with_its_work() -> None:
    async def main() -> None:
        deadlines, loop = Deadlines(RealClock()), asyncio.get_running_loop()
        never, soon = loop.create_future(), loop.create_future()
        long = asyncio.ensure_future(deadlines.ended(never, 60.0))
        await asyncio.sleep(0.01)  # the timer waits for that one now
        assert not await deadlines.ended(never, 0.01) and not never.done()
        with_work = asyncio.ensure_future(deadlines.ended(soon, 60.0))
        await asyncio.sleep(0)
        soon.set_result(1)
        assert await with_work and not long.done()
        never.set_result(2)
        assert await long

    asyncio.run(asyncio.wait_for(main(), 20))


def test_groups_that_end_in_one_round_are_told_together_and_count_until_then() -> None:
    async def main() -> None:
        told: list[list[str]] = []
        go = asyncio.Event()

        def ended(ends: Ends) -> None:
            told.append([group.group_id for group, _ in ends])

        flight = InFlight(ended)

        def make(group: RolloutGroup) -> None:
            async def made(_cut: Cut) -> RolloutGroup:
                await go.wait()
                return group

            flight.begin(group, made)

        for at in range(3):
            make(RolloutGroup(f"g{at}", at, 0, Prompt("p", (1,), "")))
        await asyncio.sleep(0)
        go.set()
        while not told:
            assert len(flight) == 3, "one that has ended and was not told is in flight"
            await asyncio.sleep(0)
        assert told == [["g0", "g1", "g2"]] and not len(flight)

    asyncio.run(asyncio.wait_for(main(), 20))
