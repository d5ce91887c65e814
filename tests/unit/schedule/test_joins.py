"""An engine that comes to a run before there is a version to take."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.rollout.parts import Log
from turnout.placement.real import RealClock
from turnout.schedule.incarnation import Incarnation
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.serving.roster import EnginePlan
from turnout.transfer.updater import Updater


def test_an_engine_that_waits_long_for_the_base_version_joins_once_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    async def main() -> None:
        clock, log = RealClock(), Log()
        updater = Updater(cast("Any", None), [], log, clock)
        made = SimpleNamespace(config=SimpleNamespace(update_weight_timeout_s=0.02), _turns=None)
        written = SimpleNamespace(events=log, reporter=SimpleNamespace(say=said.append))
        around = Incarnation._around(cast("Any", made), updater, cast("Any", None), cast("Any", written))
        client = EngineClient("e0", Address("127.0.0.1", 1), clock)
        client.plan = EnginePlan("e0")

        async def joined(*_: object) -> bool:
            return True

        monkeypatch.setattr(updater, "_joined", joined)
        joins = asyncio.ensure_future(around.joins(client))
        await asyncio.sleep(0.1)
        assert not joins.done() and len(said) == 1 and "takes no part yet" in said[0]
        updater.fleet.current = cast("Any", SimpleNamespace())
        await asyncio.wait_for(joins, 10)
        assert said[1:] == ["engine e0 serves again"] and updater.fleet.engines == {"e0": client}

    asyncio.run(main())
