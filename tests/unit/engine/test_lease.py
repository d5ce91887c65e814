"""One run at a time has an engine that belongs to nobody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from turnout.core.errors import EngineBusy
from turnout.engine.lease import Lease, Leases


def test_a_lease_is_renewed_by_its_run_alone_until_it_runs_out_or_is_given_back() -> None:
    lease = Lease("e0")
    assert lease.take("a", 0, 30.0, now=100.0)
    assert not lease.take("a", 0, 30.0, now=120.0) and lease.term == 1
    with pytest.raises(EngineBusy, match=r"works for run a, incarnation 0, .* for 10 s more"):
        lease.take("b", 0, 30.0, now=140.0)
    assert lease.take("b", 0, 30.0, now=150.0), "the one before said nothing any more"
    with pytest.raises(EngineBusy, match="works for run b"):
        lease.take("a", 0, 30.0, now=151.0)
    assert not lease.take("b", 0, 0.0, now=152.0)
    assert lease.take("a", 0, 30.0, now=152.0) and lease.term == 3, "it sees that another had it"
    assert not lease.take("a", 0, 30.0, now=999.0) and lease.term == 3, "it ran out, and nobody had it"


def test_a_run_that_goes_on_has_it_at_once_and_its_earlier_incarnation_no_more() -> None:
    lease = Lease("e0")
    assert lease.take("a", 0, 30.0, now=0.0)
    assert lease.take("a", 1, 30.0, now=1.0)
    with pytest.raises(EngineBusy, match="incarnation 1"):
        lease.take("a", 0, 30.0, now=2.0)


class Compute:
    """A compute thread that is told to go on."""

    settings = SimpleNamespace(engine_id="e0", admin_token=None)

    async def do(self, command: Any, deadline_s: float) -> None: ...


def test_the_answer_tells_the_term() -> None:
    forgot: list[int] = []

    async def forget() -> None:
        forgot.append(len(forgot))

    async def main() -> list[object]:
        leases = Leases(Compute(), forget, 1.0)  # type: ignore[arg-type]
        app = web.Application()
        app.add_routes(leases.routes())
        async with TestClient(TestServer(app)) as client:
            found: list[object] = []
            for run, seconds in (("a", 9), ("a", 0), ("b", 0), ("a", 9)):
                row = {"run": run, "incarnation": 0, "seconds": seconds}
                found.append((await (await client.post("/lease", json=row)).json())["term"])
            return found

    assert asyncio.run(main()) == [1, 1, 2, 3] and len(forgot) == 3
