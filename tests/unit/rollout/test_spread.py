"""Which engine a request goes to: homes of groups and sessions, load, another one after a failure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from turnout.placement.real import RealClock
from turnout.rollout.spread import Spread
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.serving.roster import WorkerType

CLOCK = RealClock()


def clients(count: int, kind: WorkerType = WorkerType.REGULAR) -> list[EngineClient]:
    made = [EngineClient(f"e{at}", Address("127.0.0.1", 1), CLOCK) for at in range(count)]
    for one in made:
        one.plan = replace(one.plan, worker_type=kind)
    return made


def test_a_group_stays_on_one_engine_and_groups_go_where_less_was_sent() -> None:
    spread, engines = Spread(lambda: 100), clients(2)
    on: Counter[Any] = Counter()
    held: list[tuple[int, str]] = []
    for rank in (0, 2, 4, 1):  # by their number alone three of them would go to e0
        for _ in range(3):
            engine = spread.choose(rank, engines, None)
            held.append((rank, engine.engine_id))
            spread.begin(*held[-1])
            on[rank, engine.engine_id] += 1
    assert sorted(on.values()) == [3, 3, 3, 3]
    assert Counter(engine for _, engine in on) == {"e0": 2, "e1": 2}
    for one in held:
        spread.end(*one)
    assert spread.choose(2, engines, None) is engines[0]  # nothing is remembered of groups that have ended


def test_a_large_engine_gets_more_than_a_small_one() -> None:
    spread, (small, large) = Spread(lambda: 100), clients(2)
    small.plan, large.plan = replace(small.plan, running=8), replace(large.plan, running=24)
    on: Counter[str] = Counter()
    for rank in range(32):
        engine = spread.choose(rank, [small, large], None)
        spread.begin(rank, engine.engine_id)
        on[engine.engine_id] += 1
    assert on == {"e0": 8, "e1": 24}


def test_rtr_11_the_next_try_goes_to_another_engine_where_there_is_one() -> None:
    spread, engines = Spread(lambda: 100), clients(3)
    for last in engines:
        assert spread.choose(0, engines, last) is not last
    assert spread.choose(0, engines[:1], engines[0]) is engines[0]
    assert spread.choose(4, engines[1:], engines[0]) in engines[1:]


def test_two_of_many_are_compared_whatever_their_number() -> None:
    spread, engines = Spread(lambda: 1e9), clients(7)
    asked: set[str] = set()
    for rank in range(300):
        pair = set[str]()
        for loaded in (0, 1):
            engine = spread.choose(rank, engines, None)
            pair.add(engine.engine_id)
            if not loaded:
                spread._load[engine.engine_id] += 1000
        assert len(pair) == 2
        asked |= pair
        spread._load.clear()
    assert asked == {engine.engine_id for engine in engines}


def test_rtr_11_the_turns_of_a_session_stay_on_their_engine_while_it_may_be_asked() -> None:
    spread, engines = Spread(lambda: 100), clients(5, WorkerType.PREFILL)
    spread.begin(3, "e4", "s")
    spread.end(3, "e4")
    spread._load["e4"] += 50
    for rank in range(12):
        assert spread.choose(rank, engines, None, "s") is engines[4]
        assert spread.choose(rank, engines[:4], None, "s") in engines[:4]
    assert spread.choose(3, engines, engines[4], "s") is not engines[4], "it failed"
    spread.forget("s")
    assert spread.choose(0, engines, None, "s") is not engines[4]


def test_a_decode_engine_keeps_no_prefix_and_is_the_less_loaded_of_two() -> None:
    spread, engines = Spread(lambda: 100), clients(2, WorkerType.DECODE)
    for _ in range(6):
        spread.begin(1, spread.choose(1, engines, None).engine_id)
    assert spread._load == {"e0": 3, "e1": 3}


def test_with_room_for_every_request_only_the_group_chooses() -> None:
    spread, engines = Spread(), clients(3, WorkerType.PREFILL)
    spread.begin(1, "e2", "s")
    chosen = [spread.choose(rank, engines, None, "s").engine_id for rank in range(4)]
    assert chosen == ["e0", "e1", "e2", "e0"]
