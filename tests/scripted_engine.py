"""An engine without a model: SGLang's HTTP API with answers that the test chooses.

Without a script it behaves: tokens derive from the seed, a version loaded from disk is digested and attested,
flags that are left out get SGLang's defaults. `script(path, ...)` puts answers in line for a path, one per call;
`on_generate` decides each /generate by its body, at once or later; a list of rows is a stream of events. `calls` is
what came in. The port is bound and held from the start.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from turnout.core.types import Finish
from turnout.placement.real import RealClock
from turnout.protocol.sglang import ENGINE_HEADER, GenerateReply
from turnout.serving.access import OPEN, Access
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of


@dataclass(frozen=True)
class Answer:
    """`body` is sent as JSON, bytes as they are. `ending`: "whole"; "cut" closes the connection in the middle
    of the body; "reset" closes it before a byte; "hang" answers when the engine stops; "stall" sends the body and
    then nothing more until then."""

    status: int = 200
    body: Any = None
    ending: str = "whole"
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def data(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def as_stream(answer: Answer) -> Answer:
    """The answer as events, one for each row of a list; errors and bytes as they are."""
    if answer.status != 200 or not isinstance(answer.body, dict | list):
        return answer
    rows = answer.body if isinstance(answer.body, list) else [answer.body]
    events = [f"data: {json.dumps(row)}\n\n" for row in rows] + ["data: [DONE]\n\n"]
    return replace(answer, body="".join(events).encode())


CUT = Answer(body={"text": "a" * 4096}, ending="cut")
RESET = Answer(ending="reset")
HANG = Answer(ending="hang")


@dataclass(frozen=True)
class Call:
    path: str
    body: Any
    headers: dict[str, str]
    peer: Any


def reply(
    count: int, label: str = "v000000-0000000000000000", seed: int = 0, finish: Finish = Finish.LENGTH
) -> Any:
    """A good /generate answer of `count` tokens that depend on the seed only."""
    ids = tuple((seed + 7 * at) % 1000 for at in range(count))
    spans = ((count, label),) if count else ()
    return GenerateReply("text", ids, (-0.5,) * count, finish, "", spans, 1, 0).to_json("rid")


class ScriptedEngine:
    """`async with ScriptedEngine() as engine:`; `engine.client()` speaks to it."""

    def __init__(self, engine_id: str = "e0", host: str = "127.0.0.1") -> None:
        self.engine_id, self.host = engine_id, host
        self.label, self.root, self.level = "default", "0" * 32, "memory"
        self.load: Any = {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}
        self.calls: list[Call] = []
        self.prepared: dict[str, Any] | None = None
        self.aborted_by_default = 0
        self.on_generate: Callable[[dict[str, Any]], Any] = self.generated
        self.running = 0
        self.port = 0
        self._lines: dict[str, deque[Answer]] = defaultdict(deque)
        self._stopping, self._changed = asyncio.Event(), asyncio.Event()
        self._clients: list[EngineClient] = []

    async def __aenter__(self) -> ScriptedEngine:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        for client in self._clients:
            await client.close()
        await self._runner.cleanup()

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)

    def client(self, clock: Any = None, token: str | None = None) -> EngineClient:
        access = OPEN if token is None else Access(admin_key=token)
        made = EngineClient(self.engine_id, self.address, clock or RealClock(), access)
        self._clients.append(made)
        return made

    def script(self, path: str, *answers: Answer) -> None:
        self._lines[path].extend(answers)

    def sent(self, path: str) -> list[Any]:
        """Bodies that came to a path, in order."""
        return [call.body for call in self.calls if call.path == path]

    async def until_running(self, count: int) -> None:
        """Returns when this many calls wait for their answer; a test's own deadline bounds it."""
        while self.running != count:
            self._changed.clear()
            await self._changed.wait()

    def _count(self, change: int) -> None:
        self.running += change
        self._changed.set()

    def generated(self, body: dict[str, Any]) -> Any:
        params = body["sampling_params"]
        return reply(params["max_new_tokens"], self.label, params.get("sampling_seed") or 0)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        path = request.path
        body = json.loads(data) if data else None
        peer = request.transport.get_extra_info("peername") if request.transport else None
        self.calls.append(Call(path, body, dict(request.headers), peer))
        answer = self._lines[path].popleft() if self._lines[path] else self._behave(path, body or {})
        self._count(1)
        try:
            if inspect.isawaitable(answer):
                answer = await answer
            whole = answer if isinstance(answer, Answer) else Answer(body=answer)
            streams = path == "/generate" and isinstance(body, dict) and body.get("stream") is True
            return await self._send(request, as_stream(whole) if streams else whole)
        finally:
            self._count(-1)

    async def _send(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        if answer.ending == "hang":
            await self._stopping.wait()
        if answer.ending == "reset":
            assert request.transport is not None
            request.transport.abort()
        if answer.ending == "stall":
            response = web.StreamResponse(status=answer.status)
            await response.prepare(request)
            await response.write(answer.data)
            await self._stopping.wait()
            return response
        if answer.ending == "cut":
            response = web.StreamResponse(status=answer.status, headers=answer.headers)
            response.content_length = len(answer.data)
            await response.prepare(request)
            await response.write(answer.data[: len(answer.data) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        headers = {"Content-Type": "application/json", ENGINE_HEADER: self.engine_id} | answer.headers
        return web.Response(status=answer.status, body=answer.data, headers=headers)

    def _behave(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/generate":
            return self.on_generate(body)
        if path == "/weight_version":
            return {"version": self.label, "root": self.root, "level": self.level}
        if path == "/v1/loads":
            return self.load
        if path == "/server_info":
            return {"version": "scripted", "tp_size": 1}
        if path == "/update_weights_from_disk":
            return self._load_from_disk(body)
        if path == "/prepare_weights":
            self.prepared = body
            return {"success": True, "message": "prepared", "prepared_id": f"set-{body['weight_version']}"}
        if path == "/activate_weights":
            return self._activate(body)
        if path == "/update_weight_version":
            self.aborted_by_default += body.get("abort_all_requests", True)
            self.label = body["new_version"]
            return {"success": True, "message": ""}
        if path in ("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache", "/health"):
            return Answer(body=b"")
        return Answer(404, {"error": {"message": f"no {path} here"}})

    def _activate(self, body: dict[str, Any]) -> Any:
        held, self.prepared = self.prepared, None
        if held is None or body["prepared_id"] != f"set-{held['weight_version']}":
            return Answer(400, {"success": False, "message": f"no set {body['prepared_id']} is prepared"})
        return self._load_from_disk(held | body)

    def _load_from_disk(self, body: dict[str, Any]) -> Any:
        self.aborted_by_default += body.get("abort_all_requests", True)
        self.root = root_of(read_checkpoint(Path(body["model_path"])))
        self.label = body["weight_version"]
        return {"success": True, "message": "loaded"}
