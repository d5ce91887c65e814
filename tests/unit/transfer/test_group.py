"""Which engines are told to leave a group; what goes through one is in tests/process/test_group_by_rank.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.scripted_engine import Answer, ScriptedEngine
from turnout.placement.real import DiskStore, RealClock
from turnout.serving.weights_client import EngineWeights
from turnout.transfer import group
from turnout.transfer.group import GroupTransport
from turnout.weights.store import WeightStore

JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
FINE = Answer(body={"success": True, "message": ""})


def names(engine: ScriptedEngine, path: str) -> list[str]:
    return [body["group_name"] for body in engine.sent(path)]


def test_every_member_leaves_when_others_take_part_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_backend", lambda *_: object())

    async def main() -> None:
        clock = RealClock()
        made = GroupTransport(WeightStore(tmp_path, DiskStore(), tmp_path, 0), clock, 40)
        async with ScriptedEngine("e0") as one, ScriptedEngine("e1") as two:
            for engine in (one, two):
                engine.script(JOIN, FINE, FINE)
            first, second = (EngineWeights(engine.client(clock)) for engine in (one, two))
            await made.open([first, second], 10.0)
            await second.client.close()  # it left the run
            await made.open([first], 10.0)
            assert names(one, LEAVE) == names(two, LEAVE) == names(two, JOIN)
            assert second.client.closed and not first.client.closed
            await made.close()
            assert names(one, LEAVE) == names(one, JOIN) and len(names(one, JOIN)) == 2
            await made.close()
            assert len(names(one, LEAVE)) == 2 and not made.place

    asyncio.run(main())
