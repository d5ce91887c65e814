"""Who waits for the engines of a fleet hears of every change that can help them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from turnout.core.version import WeightVersion
from turnout.placement.real import RealClock
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.transfer.fleet import Fleet
from turnout.weights.routing import Held

HELD = Held(WeightVersion(0, 1, "ab" * 32), 1)


class Log:
    def emit(self, event: Any) -> None: ...


@pytest.mark.parametrize(
    "change",
    [
        lambda fleet: fleet.hold("e0", HELD),
        lambda fleet: fleet.fence("e0", "", "gone"),
        lambda fleet: fleet.activate("e0"),
        lambda fleet: fleet.add(fleet.engines["e0"]),
        lambda fleet: setattr(fleet, "current", HELD),
    ],
)
def test_every_change_wakes_who_waits_and_wakes_once(change: Callable[[Fleet], None]) -> None:
    async def main() -> None:
        clock = RealClock()
        fleet = Fleet([EngineClient("e0", Address("127.0.0.1", 1), clock)], Log(), None, 0)
        waiting = [asyncio.ensure_future(fleet.changed()) for _ in range(2)]
        await asyncio.sleep(0)
        change(fleet)
        await clock.within(5.0, "the change", asyncio.gather(*waiting))
        again = asyncio.ensure_future(fleet.changed())
        await asyncio.sleep(0)
        assert not again.done(), "what was before is no news"
        again.cancel()

    asyncio.run(main())


def test_one_that_is_gone_is_asked_in_no_update_until_it_joins_anew() -> None:
    fleet = Fleet(
        [EngineClient(name, Address("127.0.0.1", 1), RealClock()) for name in ("a", "b")], Log(), 1, 0
    )
    fleet.lost("a", "its process ended")
    assert fleet.required() == ("b",) and "a" in fleet.fenced
    fleet.add(fleet.engines["a"])
    assert fleet.required() == ("a", "b") and "a" in fleet.fenced
