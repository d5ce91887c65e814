"""The client of one engine: SGLang's HTTP API over aiohttp.

Promises: proxy variables of the environment never touch these calls; every call has a deadline; a body over
1 MiB never goes out on a control call; a 4xx is the request's fault (EngineRefused, never retried), a 429 or
503 is busy (EngineBusy), a refused or cut connection is the engine's death (EngineDead), every other answer
but a 200 is an EngineError with status and body. Each error names the engine, the phase and the last version
that the engine attested. Nothing is retried here: who calls knows what a retry would mean.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import aiohttp

from turnout.core.errors import (
    DeadlineExceeded,
    EngineBusy,
    EngineDead,
    EngineError,
    EngineRefused,
    VersionUnmet,
)
from turnout.core.ports import Clock
from turnout.core.types import Finish
from turnout.protocol.sglang import (
    GenerateReply,
    GenerateRequest,
    finish_of,
    load_parts,
    load_total,
    parse_reply,
    prompt_logprobs,
)
from turnout.protocol.stream import PartialReply, Stream
from turnout.serving.access import OPEN, Access
from turnout.serving.address import KEPT_ALIVE_S, Address
from turnout.serving.events import EventReader
from turnout.serving.roster import EnginePlan
from turnout.weights.routing import Held
from turnout.weights.stock_checksums import StockEngine

CONTROL_BODY_BYTES_MAX = 1 << 20
CONTROL_DEADLINE_S = 30.0
MISREAD = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError)  # of an unknown shape


@dataclass(frozen=True)
class Attestation:
    """What an engine says it has loaded. `root` is empty where the engine has no digest to offer; `checksums` is
    what a stock SGLang reports instead, by its own names of the parameters."""

    label: str
    root: str
    level: str
    checksums: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Traffic:
    """What went to the engines besides samples, counted over all clients that share it: the largest body of a
    control call, in bytes."""

    control_bytes_max: int = 0


class EngineClient:
    """One engine's API. Owns one connection pool; `plan` is what it was started as, `version` the last label that
    the engine attested, `holds` the committed version that it is known to serve (None: unknown; set by
    turnout.transfer.fleet only). `stages`: the engine takes new weights beside those it serves and puts them into
    place when told to. `stock`: what decides its checksums where it is a stock engine of known dtype and device."""

    stages: ClassVar[bool] = True

    def __init__(self, engine_id: str, address: Address, clock: Clock, access: Access = OPEN) -> None:
        self.engine_id, self.address = engine_id, address
        self.version = "none"
        self.plan, self.traffic = EnginePlan(engine_id), Traffic()
        self.holds: Held | None = None
        self.stock: StockEngine | None = None
        self.bootstrap_port: int | None = None
        self.pending: dict[str, float] = {}  # by path, since when a control call is not answered
        self.work: contextlib.AbstractContextManager[object] = (
            contextlib.nullcontext()
        )  # each request enters it
        self._clock, self._access = clock, access
        self._session: aiohttp.ClientSession | None = None

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def closed(self) -> bool:
        """Whether it has no connections, or had none yet."""
        return self._session is None

    async def close(self) -> None:
        """Cuts what is under way, as the engine's death would."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, request: GenerateRequest, deadline_s: float) -> GenerateReply:
        """One /generate; an answer of an unknown shape is an EngineError."""
        if not request.rid:
            raise ValueError("a request id is never empty: engines match it against running requests")
        row = await self._call("/generate", request.to_json(), "rollout", deadline_s)
        try:
            return parse_reply(row, request.params.max_new_tokens)
        except MISREAD as fault:
            raise self.fault(EngineError, "rollout", f"reply not understood: {fault}") from fault

    async def prefill(self, request: GenerateRequest, deadline_s: float) -> str:
        """Sends a request to the prefill half of a pair. Why it was aborted; empty where its first token went on to
        the other half."""
        row = await self._call("/generate", request.to_json(), "rollout", deadline_s)
        try:
            finish, message = finish_of(row["meta_info"]["finish_reason"])
        except MISREAD as fault:
            raise self.fault(EngineError, "rollout", f"reply not understood: {fault}") from fault
        return (message or "aborted by the prefill engine") if finish is Finish.ABORT else ""

    async def score(self, ids: tuple[int, ...], start: int, deadline_s: float) -> tuple[float, ...]:
        """Log-probs of the known tokens `ids[start + 1:]`, each given what precedes it, at temperature 1: one
        /generate that makes no token. Raises as `generate` does."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": start,
        }
        row = await self._call("/generate", body, "rollout", deadline_s)
        try:
            return prompt_logprobs(row, ids, start)
        except MISREAD as fault:
            raise self.fault(EngineError, "rollout", f"reply not understood: {fault}") from fault

    async def generate_stream(
        self, request: GenerateRequest, deadline_s: float
    ) -> AsyncGenerator[PartialReply | GenerateReply, None]:
        """One streamed /generate: what is new, as it comes; the last item is the whole reply. Raises as
        `generate` does, at any item; what was yielded before stays true. Closing it early (contextlib.aclosing)
        closes the connection, upon which the engine aborts the request."""
        if not request.rid:
            raise ValueError("a request id is never empty: engines match it against running requests")
        what, began = f"engine {self.engine_id} to end a stream of /generate", self._clock.now()

        def left() -> float:
            return deadline_s - (self._clock.now() - began)

        data = json.dumps({**request.to_json(), "stream": True}).encode()
        with self._faults("/generate", "rollout"):
            answer = await self._clock.within(
                deadline_s, what, self._send("/generate", data, self._headers(request))
            )
            told = Stream(request.params.max_new_tokens, self.version, self._answers(answer.headers))
            try:
                if answer.status != 200:
                    text = await self._clock.within(left(), what, answer.text("utf-8", "replace"))
                    raise self._refusal(answer.status, text, "/generate", "rollout")
                reader = EventReader(answer.content)
                while True:
                    event = await self._clock.within(left(), what, reader.next())
                    for item in self._event(event, told):
                        yield item
                        if isinstance(item, GenerateReply):
                            return
            finally:
                answer.close()

    def _headers(self, _request: GenerateRequest) -> Mapping[str, str]:
        """What goes with a request besides its body."""
        return {}

    def _answers(self, _headers: Mapping[str, str]) -> str:
        """The id of the engine that answers."""
        return self.engine_id

    def _event(self, event: str | None, told: Stream) -> list[PartialReply | GenerateReply]:
        if event is None:
            raise self.fault(EngineDead, "rollout", "a stream of /generate ended before its last event")
        try:
            row = json.loads(event)
            if isinstance(row, dict) and "error" in row:
                refused = isinstance(row["error"], dict) and row["error"].get("code") == 400
                kind = EngineRefused if refused else self._kind(500, event)
                raise self.fault(kind, "rollout", f"/generate answered in its stream: {_message(event)}")
            return told.take(row)
        except MISREAD as fault:
            raise self.fault(EngineError, "rollout", f"event not understood: {fault}") from fault

    async def health(self, deadline_s: float) -> None:
        """Returns when the engine answers /health with 200; raises as every call does."""
        await self._call("/health", None, "health", deadline_s)

    async def server_info(self, deadline_s: float = CONTROL_DEADLINE_S) -> dict[str, Any]:
        """The info object, under its new or its old name."""
        return await self._info("server_info", deadline_s)

    async def model_info(self, deadline_s: float = CONTROL_DEADLINE_S) -> dict[str, Any]:
        """What it serves, under its new or its old name."""
        return await self._info("model_info", deadline_s)

    async def _info(self, name: str, deadline_s: float) -> dict[str, Any]:
        try:
            return await self._call(f"/{name}", None, "discovery", deadline_s)
        except EngineRefused:
            return await self._call(f"/get_{name}", None, "discovery", deadline_s)

    async def adopt(self, pid: int, deadline_s: float) -> None:
        """Has an engine of ours belong to that process, and end what another one had asked for."""
        await self.control("/adopt", {"pid": pid}, deadline_s)

    async def attest(self, deadline_s: float) -> Attestation:
        """What the engine's live weights are (GET /weight_version, ours)."""
        row = await self._call("/weight_version", None, "attest", deadline_s)
        try:
            return Attestation(str(row["version"]), str(row["root"]), str(row["level"]))
        except (KeyError, TypeError) as fault:
            raise self.fault(EngineError, "attest", f"answer not understood: {row!r}") from fault

    async def set_version_label(self, label: str) -> None:
        """Names what the engine already holds, without touching requests or weights."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._call("/update_weight_version", body, "update", CONTROL_DEADLINE_S)

    async def load(self) -> int:
        """Requests running or waiting; an unknown shape is an error, never idle."""
        row = await self._call("/v1/loads", None, "load", CONTROL_DEADLINE_S)
        total = load_total(row)
        if total is None:
            raise self.fault(EngineError, "load", f"load report not understood: {str(row)[:200]}")
        return total

    async def load_report(self, deadline_s: float) -> tuple[int, int, float]:
        """Requests running, requests waiting, share of the KV cache in use; an unknown shape is an error."""
        row = await self._call("/v1/loads", None, "load", deadline_s)
        found = load_parts(row)
        if found is None:
            raise self.fault(EngineError, "load", f"load report not understood: {str(row)[:200]}")
        return found

    async def update_from_disk(
        self, folder: str, label: str, deadline_s: float, load_format: str = "auto"
    ) -> Attestation:
        """Loads a checkpoint folder and returns what the engine then attests; raises as `load_from_disk`."""
        await self.load_from_disk(folder, label, deadline_s, load_format)
        return await self.attest(deadline_s)

    async def served_label(self, deadline_s: float) -> str:
        """The label that the engine answers with now: a name, no proof."""
        return (await self.attest(deadline_s)).label

    async def load_from_disk(
        self, folder: str, label: str, deadline_s: float, load_format: str = "auto", flush: bool = True
    ) -> None:
        """Loads a checkpoint folder; `load_format` "delta" (ours): a version of a store, by the cheapest route that
        leads to it from what the engine holds. `flush`: KV of older weights goes. All behaviour flags are sent:
        engines differ in their defaults.
        After an EngineError the engine may hold any weights."""
        body = {
            "model_path": folder,
            "load_format": load_format,
            "weight_version": label,
            "abort_all_requests": False,
            "flush_cache": flush,
        }
        row = await self._call("/update_weights_from_disk", body, "update", deadline_s)
        if not isinstance(row, dict) or row.get("success") is not True:
            message = row.get("message", row) if isinstance(row, dict) else row
            raise self.fault(EngineError, "update", f"the weights were not loaded: {message}")

    async def control(self, path: str, body: dict[str, Any], deadline_s: float) -> Any:
        """One call of the weight plane (turnout.serving.weights_client) and the JSON that it answers."""
        return await self._call(path, body, "update", deadline_s)

    async def _call(self, path: str, body: Any, phase: str, deadline_s: float) -> Any:
        """GET without a body, POST with one. Only the phase "rollout" is the data plane."""
        data = None if body is None else json.dumps(body).encode()
        if data is not None and phase != "rollout":
            if len(data) > CONTROL_BODY_BYTES_MAX:
                raise ValueError(
                    f"{path}: a control body of {len(data)} bytes; tensors never travel in these"
                )
            self.traffic.control_bytes_max = max(self.traffic.control_bytes_max, len(data))
        what = f"engine {self.engine_id} to answer {path}"
        self.pending[path] = self._clock.now()
        try:
            with self._faults(path, phase):
                status, text = await self._clock.within(deadline_s, what, self._exchange(path, data))
        finally:
            self.pending.pop(path, None)
        if status != 200:
            raise self._refusal(status, text, path, phase)
        try:
            return json.loads(text) if text else {}
        except (ValueError, RecursionError) as fault:
            raise self.fault(EngineError, phase, f"{path} answered no JSON: {text[:200]!r}") from fault

    async def _exchange(self, path: str, data: bytes | None) -> tuple[int, str]:
        async with await self._send(path, data) as answer:
            return answer.status, await answer.text("utf-8", "replace")

    async def _send(
        self, path: str, data: bytes | None, extra: Mapping[str, str] | None = None, method: str = ""
    ) -> aiohttp.ClientResponse:
        """The open answer; the caller closes it. GET without data, POST with it, or the method that is given."""
        if self._session is None:
            tls = True if self._access.tls is None else self._access.tls
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE_S, ssl=tls),
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=False,
            )
        usual, headers = ("GET", {}) if data is None else ("POST", {"Content-Type": "application/json"})
        headers |= self._access.headers(path)
        return await self._session.request(
            method or usual,
            self.address.url + path,
            data=data,
            headers={**headers, **(extra or {})},
            allow_redirects=False,
        )

    @contextlib.contextmanager
    def _faults(self, path: str, phase: str) -> Iterator[None]:
        """Turns what a connection can do wrong into our errors; what samples is counted as the engine's work."""
        try:
            with self.work if phase == "rollout" else contextlib.nullcontext():
                yield
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as fault:
            raise self.fault(EngineDead, phase, f"{path}: {str(fault) or type(fault).__name__}") from fault
        except aiohttp.ClientError as fault:
            raise self.fault(EngineError, phase, f"{path} answered no HTTP: {fault}") from fault
        except DeadlineExceeded as fault:
            raise self.fault(EngineError, phase, str(fault)) from fault

    def _refusal(self, status: int, text: str, path: str, phase: str) -> EngineError:
        kind = self._kind(status, text)
        if status == 409:
            served = _served(text)
            if served is not None:
                return VersionUnmet(self.engine_id, *served, f"{path} answered 409: {_message(text)}")
        return self.fault(kind, phase, f"{path} answered {status}: {_message(text)}")

    def _kind(self, status: int, _text: str) -> type[EngineError]:
        """What an answer other than a 200 means."""
        return EngineBusy if status in (429, 503) else EngineRefused if 400 <= status < 500 else EngineError

    def fault(self, kind: type[EngineError], phase: str, reason: str) -> EngineError:
        """An error that names this engine and the last version it attested."""
        return kind(self.engine_id, phase, self.version, reason)


def _message(text: str) -> str:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return text[:300]
    if isinstance(row, dict):
        error = row.get("error")
        found = error.get("message") if isinstance(error, dict) else row.get("message", error)
        return str(found if found is not None else row)[:300]
    return str(row)[:300]


def _served(text: str) -> tuple[str, str] | None:
    """Version and root of a 409 that says what is served instead (ours)."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    served = row.get("served") if isinstance(row, dict) else None
    return (str(served.get("version")), str(served.get("root"))) if isinstance(served, dict) else None
