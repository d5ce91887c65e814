"""An engine process that computes nothing: the simulator's virtual engine, behind real HTTP, on real time.

    python -m benchmarks.paced_engine NAME --speed 200 --chunk 8 --running 16 --median 40 --root HEX

Speaks SGLang's /generate with streaming and the control calls of the weight plane. A request makes `speed` tokens a
second, in events of `chunk`; `running` requests run at once, the others wait; with `crowd-s` each that runs
lengthens a token of all by so much. How long a response is depends on its prompt and seed only (turnout.sim.model).
Prints its port as the first line; ends when its standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from aiohttp import web

from turnout.protocol.sglang import GenerateReply, GenerateRequest, SamplingParams
from turnout.sim.engine import VirtualEngine
from turnout.sim.model import EngineShape

ENDLESS = 1 << 40  # tokens of KV space: memory is not what these engines lack


class Timers:
    """The engine's timers on the running loop."""

    def later(self, seconds: float, call: Callable[..., object], *args: Any) -> Any:
        return asyncio.get_running_loop().call_later(seconds, call, *args)


class Events:
    """What one client reads: events of its stream, None at the end."""

    def __init__(self, rid: str) -> None:
        self.rid, self.told = rid, 0
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(self, item: Any) -> None:
        if isinstance(item, GenerateReply):
            row = item.to_json(self.rid)
        else:
            new, logprobs = item.output_ids, item.logprobs
            versions: list[dict[str, Any]] = []
            for count, label in item.spans:
                versions.append({"version": label, "start": self.told, "end": self.told + count})
                self.told += count
            row = {
                "text": "",
                "output_ids": list(new),
                "meta_info": {
                    "id": self.rid,
                    "finish_reason": None,
                    "completion_tokens": self.told,
                    "weight_version": versions[-1]["version"],
                    "weight_versions": versions,
                    "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, new)],
                },
            }
        self.queue.put_nowait(b"data: " + json.dumps(row).encode() + b"\n\n")
        if isinstance(item, GenerateReply):
            self.queue.put_nowait(None)

    def cut(self, reason: str) -> None:
        del reason
        self.queue.put_nowait(None)


class Front:
    """The HTTP side of one engine."""

    def __init__(self, engine: VirtualEngine) -> None:
        self.engine = engine

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = SamplingParams.from_json(body["sampling_params"])
        asked = GenerateRequest(
            body["rid"], tuple(body["input_ids"]), params, extra_key=body.get("extra_key")
        )
        events = Events(asked.rid)
        refused = self.engine.generate(asked, events)
        if refused is not None:
            status, why = refused
            served = {"version": self.engine.label, "root": self.engine.root}
            return web.json_response({"served": served, "error": {"message": why}}, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        ended = False
        try:
            await response.prepare(request)
            while (event := await events.queue.get()) is not None:
                await response.write(event)
            ended = True
            await response.write(b"data: [DONE]\n\n")
        finally:
            if not ended:  # the client has gone
                self.engine.abort(asked.rid, "the connection was closed")
        return response

    async def control(self, request: web.Request) -> web.Response:
        data = await request.read()
        status, row = self.engine.answer(request.path, json.loads(data) if data else None, False)
        return web.json_response(row, status=status)


async def serve(engine: VirtualEngine) -> None:
    """Until standard input ends."""
    front = Front(engine)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/generate", front.generate)
    app.router.add_route("*", "/{path:.*}", front.control)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.paced_engine")
    parser.add_argument("name")
    parser.add_argument("--speed", type=float, required=True)
    parser.add_argument("--chunk", type=int, required=True)
    parser.add_argument("--running", type=int, required=True)
    parser.add_argument("--median", type=float, required=True)
    parser.add_argument("--crowd-s", type=float, default=0.0)
    parser.add_argument("--root", required=True)
    given = parser.parse_args(words)
    shape = EngineShape(given.speed, given.chunk, given.running, ENDLESS, given.median, given.crowd_s)

    async def run() -> None:
        await serve(VirtualEngine(given.name, shape, given.root, Timers()))

    asyncio.run(run())


if __name__ == "__main__":
    main(sys.argv[1:])
