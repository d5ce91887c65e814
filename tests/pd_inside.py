"""A PD pair inside the test's own process: two engines with HTTP fronts on one event loop, for scenarios that need
to stop either side at a certain point. Kills and processes: tests.pd_pair."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from turnout.engine.loop import ComputeThread
from turnout.engine.server import Server
from turnout.engine.settings import EngineSettings

DEADLINE_S = 30.0


@dataclass
class Side:
    compute: ComputeThread
    server: Server
    client: TestClient

    async def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        async with self.client.post("/generate", json=body) as reply:
            return reply.status, await reply.json()

    async def call(self, path: str, body: Any = None) -> Any:
        async with self.client.post(path, json=body) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json()

    async def pause(self) -> None:
        await self.call("/pause_generation", {"mode": "in_place"})

    async def go_on(self) -> None:
        await self.call("/continue_generation", {})

    async def until(self, state: str) -> None:
        """Until some request of this side is in this state of the PD machine."""
        async with asyncio.timeout(DEADLINE_S):
            while state not in [c.machine.state for c in self.server.pair._companions.values()]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def idle(self) -> None:
        """Until nothing is left of any request; then the books must balance."""
        async with asyncio.timeout(DEADLINE_S):
            while self.server.pair._companions or not await self.compute.do(lambda c: c.idle(), 5):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await self.compute.do(lambda c: c.check(), 5)
        assert self.compute.load.used_pages == 0
        if self.server.pair.mode == "prefill":
            assert not self.server.pair._side.rooms

    @property
    def counters(self) -> dict[str, int]:
        return self.server.pair.info()["disaggregation"]


@dataclass
class Pair:
    prefill: Side
    decode: Side

    def body(self, ids: list[int], new: int = 8, rid: str = "", **params: Any) -> dict[str, Any]:
        row = {"max_new_tokens": new, "ignore_eos": True, "sampling_seed": 5, "temperature": 0.9} | params
        return {
            "rid": rid or f"r-{secrets.token_hex(8)}",
            "input_ids": ids,
            "sampling_params": row,
            "return_logprob": True,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.server.pair.bootstrap_port,
            "bootstrap_room": secrets.randbits(63),
        }

    def send(self, body: dict[str, Any]) -> tuple[asyncio.Task, asyncio.Task]:
        return tuple(asyncio.create_task(side.generate(body)) for side in (self.prefill, self.decode))

    async def generate(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """Both replies, which must be 200."""
        async with asyncio.timeout(DEADLINE_S):
            replies = await asyncio.gather(*self.send(body))
        assert [status for status, _ in replies] == [200, 200], replies
        return replies[0][1], replies[1][1]

    async def idle(self) -> None:
        await self.prefill.idle()
        await self.decode.idle()


@asynccontextmanager
async def side(model: Path, mode: str, **settings: Any) -> AsyncIterator[Side]:
    row = {"dtype": "float32", "max_total_tokens": 1024, "max_running_requests": 8, "max_step_tokens": 64}
    row |= {"engine_id": mode, "disaggregation_mode": mode, "disaggregation_timeout_s": 20.0}
    compute = ComputeThread(EngineSettings(model, **(row | settings)))
    await compute.start()
    server = Server(compute)
    await server.pair.start()
    client = TestClient(TestServer(server.app(), handler_cancellation=True))
    async with client:
        yield Side(compute, server, client)
    await server.pair.stop()
    await compute.stop(10)


@asynccontextmanager
async def pair(model: Path, decode: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Pair]:
    """`decode`: settings of that side alone. No file descriptor is left open in the end."""
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(side(model, "prefill", **settings))
        other = await stack.enter_async_context(side(model, "decode", **(settings | (decode or {}))))
        both = Pair(prefill, other)
        await both.generate(both.body([5, 6, 7], 2))  # whatever is opened once is open now
        await both.idle()
        before = _open_files()
        yield both
        await both.idle()
        async with asyncio.timeout(DEADLINE_S):
            while _open_files() > before + 2 * 8:  # noqa: ASYNC110 - HTTP clients keep connections
                await asyncio.sleep(0.05)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
