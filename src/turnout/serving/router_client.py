"""A request router (smg, sglang-router) as seen over HTTP: its workers, and requests through it.

Both have one API, checked against smg 1.13.0 and sglang-router 0.3.2 (docs/guides/router.md). Promises: every call
has a deadline and ignores proxy variables; an answer of an unknown shape is an error that shows it, never an empty
list. A worker is listed as serving when the router says that it is healthy and not draining, not when it accepted
it. What a router answers in place of an engine that it could not reach, or lost, is that engine's death here, never
a fault of the request.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from turnout.core.errors import EngineBusy, EngineDead, EngineError
from turnout.protocol.sglang import ENGINE_HEADER, GenerateReply, GenerateRequest
from turnout.protocol.stream import PartialReply, Stream
from turnout.serving.client import EngineClient
from turnout.serving.roster import WorkerType

ROUTING_KEY = "X-SMG-Routing-Key"
ROUTED = "x-smg-routed-worker-id"  # smg: the address of the worker that answers
RUN_LABEL = "turnout_run"
CALL_DEADLINE_S = 10.0
# `code` of answers that the router made itself since it did not reach a worker, or lost it.
LOST = (
    "call_upstream_",
    "read_response",
    "PD disaggregation request failed",
    "prefill_",
    "decode_",
    "stream_error",
)


@dataclass(frozen=True)
class Worker:
    """An engine as a router should know it: `bootstrap_port` is that of a prefill engine."""

    url: str
    worker_type: WorkerType = WorkerType.REGULAR
    bootstrap_port: int | None = None


@dataclass(frozen=True)
class Listed:
    """A worker as a router lists it. `serves`: it gets requests; `leaves`: it was removed, and gets none; `run`:
    the run that registered it (empty: unknown)."""

    worker_id: str
    worker: Worker
    serves: bool
    leaves: bool
    run: str


class RouterClient(EngineClient):
    """The control calls of one router."""

    async def workers(self) -> list[Listed]:
        """What it lists; raises EngineError for an unknown shape."""
        row = await self._call("/workers", None, "router", CALL_DEADLINE_S)
        try:
            return [_listed(worker) for worker in row["workers"]]
        except (KeyError, TypeError, ValueError) as fault:
            raise self.fault(EngineError, "router", f"/workers not understood: {str(row)[:200]}") from fault

    async def add(self, worker: Worker, run: str) -> None:
        """Asks for a worker; it is one when `workers` lists it. One that is known already is no fault."""
        body: dict[str, Any] = {
            "url": worker.url,
            "worker_type": worker.worker_type.value,
            "connection_mode": "http",
            "runtime_type": "sglang",
            "labels": {RUN_LABEL: run},
        }
        if worker.bootstrap_port is not None:
            body["bootstrap_port"] = worker.bootstrap_port
        await self._manage("POST", "/workers", json.dumps(body).encode(), known=409)

    async def remove(self, worker_id: str) -> None:
        """Asks for a worker's removal; one that is not known any more is no fault."""
        await self._manage("DELETE", f"/workers/{worker_id}", None, known=404)

    async def _manage(self, method: str, path: str, data: bytes | None, known: int) -> None:
        """A change of the list, which is done later than it is answered; `known`: what says that it was made."""

        async def exchange() -> tuple[int, str]:
            async with await self._send(path, data, method=method) as answer:
                return answer.status, await answer.text("utf-8", "replace")

        with self._faults(path, "router"):
            what = f"{self.engine_id} to answer {method} {path}"
            status, text = await self._clock.within(CALL_DEADLINE_S, what, exchange())
        if status not in (200, 202, known):
            raise self._refusal(status, text, path, "router")


def _listed(row: dict[str, Any]) -> Listed:
    kind, status = WorkerType(row["worker_type"]), row.get("status")
    labels = row.get("labels", row.get("metadata")) or {}
    leaves = status == "draining"
    return Listed(
        str(row["id"]),
        Worker(str(row["url"]).rstrip("/"), kind, row.get("bootstrap_port")),
        row["is_healthy"] is True and status in (None, "ready"),
        leaves,
        str(labels.get(RUN_LABEL, "")),
    )


@dataclass(frozen=True)
class Behind:
    """What is behind a router at one time: the ids of the engines by their address, the label of the weights that
    a request may ask of all of them, and the ids of all that it was `told` of, as it may ask one unseen."""

    engines: Mapping[str, str] = field(default_factory=dict)
    label: str = "none"
    pairs: bool = False
    told: tuple[str, ...] = ()


class RouterRoute(EngineClient):
    """Requests through a router to those that are behind it now; a new one is made whenever these change, so that
    who met a death waits until it was dealt with. Tokens are of the engine that the router names (smg), of the one
    that names itself (the embedded engine), else of the router."""

    def __init__(self, router: RouterClient, behind: Behind, run: str) -> None:
        super().__init__(router.engine_id, router.address, router._clock)
        self.router, self.behind, self.version, self._run = router, behind, behind.label, run
        self.work = router.work

    async def _send(
        self, path: str, data: bytes | None, extra: Mapping[str, str] | None = None, method: str = ""
    ) -> aiohttp.ClientResponse:
        """On the connections of the router's client."""
        return await self.router._send(path, data, extra, method)

    async def generate_stream(
        self, request: GenerateRequest, deadline_s: float
    ) -> AsyncGenerator[PartialReply | GenerateReply, None]:
        """As of an engine. Of a pair the router names the half that decodes: the first token is nobody's but
        its."""
        start = self.behind.pairs
        async with contextlib.aclosing(super().generate_stream(request, deadline_s)) as stream:
            async for item in stream:
                if not isinstance(item, PartialReply):
                    yield item
                    continue
                for part in item.parted(self.engine_id) if start else (item,):
                    if part.output_ids:
                        nobodys = part.engine_id == self.engine_id
                        yield replace(part, among=self.behind.told) if nobodys else part
                start = False

    def _event(self, event: str | None, told: Stream) -> list[PartialReply | GenerateReply]:
        """An event that ends in the middle is an engine's death: smg tells of it in the middle of that line."""
        try:
            return super()._event(event, told)
        except EngineError as fault:
            if isinstance(fault.__cause__, json.JSONDecodeError):
                raise self.fault(EngineDead, "rollout", fault.reason) from fault
            raise

    def _headers(self, request: GenerateRequest) -> Mapping[str, str]:
        return {ROUTING_KEY: f"{self._run}-{request.routing_key}"} if request.routing_key else {}

    def _answers(self, headers: Mapping[str, str]) -> str:
        engines = self.behind.engines
        named = engines.get(headers.get(ROUTED, "").rstrip("/"), headers.get(ENGINE_HEADER, ""))
        return named if named in engines.values() else self.engine_id

    def _kind(self, status: int, text: str) -> type[EngineError]:
        try:
            error = json.loads(text).get("error")
            code = str(error.get("code", error.get("type")))
        except (ValueError, AttributeError, RecursionError):
            return super()._kind(status, text)
        if code.startswith(LOST):
            return EngineDead
        return EngineBusy if code == "no_available_workers" else super()._kind(status, text)
