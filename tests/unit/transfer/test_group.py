"""Which engines are told to leave a group; what goes through one is in tests/process/test_group_by_rank.py."""

from __future__ import annotations

import asyncio
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.scripted_engine import Answer, ScriptedEngine
from turnout.core.address import Address
from turnout.core.errors import WeightError
from turnout.engine.update_group import Membership, UpdateGroups
from turnout.placement.real import DiskStore, RealClock
from turnout.placement.route import own_address
from turnout.serving.weights_client import EngineWeights
from turnout.transfer import group
from turnout.transfer.group import GroupTransport
from turnout.weights.store import WeightStore

JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
FINE = Answer(body={"success": True, "message": ""})


def test_rtr_04_the_group_meets_where_engines_on_other_hosts_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with one on this host before them; and no name of this host is asked for, which is often loopback."""
    hosts = ["127.0.0.1", "localhost", "10.0.0.2"]
    monkeypatch.setattr(group, "own_address", lambda peer: f"to {peer}")
    assert group.meeting_host([Address(host, 1) for host in hosts]) == "to 10.0.0.2"
    assert group.meeting_host([Address(host, 1) for host in hosts[:2]]) == "to 127.0.0.1"


@pytest.mark.parametrize("end", ["trainer", "engine"])
def test_rtr_04_both_ends_listen_at_the_address_of_the_route(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> str:
        raise AssertionError("the name of a host says nothing of its address")

    class Gloo:
        _Options = SimpleNamespace

        @staticmethod
        def create_device(hostname: str) -> str:
            return hostname

        def __init__(self, _store: object, _rank: int, _world: int, options: Any) -> None:
            assert options._devices == [own_address("127.0.0.1")] == ["127.0.0.1"]
            assert options._timeout == timedelta(seconds=9)

    for name in ("gethostname", "getfqdn", "gethostbyname"):
        monkeypatch.setattr(socket, name, none)
    monkeypatch.setattr(dist, "ProcessGroupGloo", Gloo)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: dist.HashStore())
    if end == "trainer":
        group._backend(dist.HashStore(), "g", (2, own_address("127.0.0.1")), timedelta(seconds=9))
    else:
        UpdateGroups().join(Membership("g", "127.0.0.1", 1, 1, 2), 9.0)


def test_rtr_04_a_host_that_no_route_leads_to_is_told() -> None:
    with pytest.raises(WeightError, match=r"no route to no\.such"):
        own_address("no.such.host.invalid")


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
