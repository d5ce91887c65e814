"""Who is sent to an engine first, and to which."""

from __future__ import annotations

import asyncio

import pytest

from turnout.core.errors import DeadlineExceeded
from turnout.placement.real import RealClock
from turnout.rollout.line import Line

CLOCK = RealClock()
FAR = 1e12
FULL = 2


async def waiting(line: Line, ranks: list[int], told: list[int]) -> list[asyncio.Task[None]]:
    """Tasks that wait for a place, in this order, and tell their rank when they have it."""

    async def one(rank: int) -> None:
        await line.enter(rank, CLOCK, FAR)
        told.append(rank)

    tasks = [asyncio.ensure_future(one(rank)) for rank in ranks]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def left(line: Line, times: int = 1) -> None:
    for _ in range(times):
        line.leave()
        for _ in range(3):
            await asyncio.sleep(0)


def test_the_oldest_group_is_sent_first() -> None:
    async def main() -> None:
        line, told = Line(lambda: FULL), list[int]()
        tasks = await waiting(line, [7, 8, 6, 9, 5, 6], told)
        assert told == [7, 8]  # there was room
        await left(line, 4)
        assert told == [7, 8, 5, 6, 6, 9]
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_a_place_of_one_who_has_gone_goes_to_the_next() -> None:
    async def main() -> None:
        line, told = Line(lambda: FULL), list[int]()
        tasks = await waiting(line, [1, 2, 3, 4, 5], told)
        tasks[2].cancel()  # while it waits
        line.leave()  # 4 has its place, and doesn't know of it yet
        tasks[3].cancel()
        await asyncio.gather(*tasks[2:4], return_exceptions=True)
        await left(line, 0)
        for _ in range(3):
            await asyncio.sleep(0)
        assert told == [1, 2, 5]
        await left(line, 2)
        told.clear()
        await waiting(line, [6, 7, 8], told)
        assert told == [6, 7]

    asyncio.run(main())


def test_a_wait_ends_at_its_deadline_and_takes_no_place() -> None:
    async def main() -> None:
        line = Line(lambda: 1)
        await line.enter(1, CLOCK, FAR)
        with pytest.raises(DeadlineExceeded, match="room on the engines"):
            await line.enter(2, CLOCK, CLOCK.now())
        line.leave()
        await CLOCK.within(10.0, "a place", line.enter(3, CLOCK, FAR))

    asyncio.run(main())


def test_room_that_grows_is_used_by_those_who_wait() -> None:
    async def main() -> None:
        room, told = [1.0], list[int]()
        line = Line(lambda: room[0])
        await waiting(line, [1, 2, 3, 4], told)
        room[0] = 3.0
        await waiting(line, [5], told)
        assert told == [1, 2, 3]

    asyncio.run(main())
