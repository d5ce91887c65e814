"""Who is sent to an engine first, and to which."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

import pytest

from turnout.core.errors import DeadlineExceeded
from turnout.placement.real import RealClock
from turnout.rollout.line import Line
from turnout.serving.address import Address
from turnout.serving.client import EngineClient

CLOCK = RealClock()
FAR = 1e12
FULL = 2


def clients(count: int) -> list[EngineClient]:
    return [EngineClient(f"e{at}", Address("127.0.0.1", 1), CLOCK) for at in range(count)]


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


def test_a_group_stays_on_one_engine_and_groups_go_where_less_was_sent() -> None:
    line, engines = Line(lambda: 100), clients(2)
    on: Counter[Any] = Counter()
    held = []
    for rank in (0, 2, 4, 1):  # by their number alone three of them would go to e0
        for _ in range(3):
            engine = line.choose(rank, engines, None)
            held.append(line.sent(rank, engine.engine_id))
            held[-1].__enter__()
            on[rank, engine.engine_id] += 1
    assert sorted(on.values()) == [3, 3, 3, 3]
    assert Counter(engine for _, engine in on) == {"e0": 2, "e1": 2}
    for one in held:
        one.__exit__(None, None, None)
    assert line.choose(2, engines, None) is engines[0]  # nothing is remembered of groups that have ended


def test_the_next_try_goes_to_another_engine_where_there_is_one() -> None:
    line, engines = Line(lambda: 100), clients(3)
    for last in engines:
        assert line.choose(0, engines, last) is not last
    assert line.choose(0, engines[:1], engines[0]) is engines[0]
    assert line.choose(4, engines[1:], engines[0]) in engines[1:]


def test_two_of_many_are_compared_whatever_their_number() -> None:
    line, engines = Line(lambda: 1e9), clients(7)
    asked: set[str] = set()
    for rank in range(300):
        pair = set[str]()
        for loaded in (0, 1):
            engine = line.choose(rank, engines, None)
            pair.add(engine.engine_id)
            if not loaded:
                cast("Counter[str]", line._load)[engine.engine_id] += 1000
        assert len(pair) == 2
        asked |= pair
        line._load.clear()
    assert asked == {engine.engine_id for engine in engines}
