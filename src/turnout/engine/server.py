"""The engine's HTTP front: SGLang's API, checked against SGLang 0.5.23 (turnout.protocol.sglang).

Promises: the event loop never computes; a refused request is a 400 with all faults, a full queue a 429, a
fenced engine a 503; a client that goes away takes its request with it. Errors are
{"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import asdict
from typing import Any

from aiohttp import web

from turnout import __version__
from turnout.core.errors import EngineBusy, TurnoutError, UserError, VersionUnmet
from turnout.engine.control import Adoption, Control, ControlCalls
from turnout.engine.events import send_events
from turnout.engine.folder_probe import FolderProbe
from turnout.engine.generate_request import needs_text, parse_generate
from turnout.engine.lease import Leases
from turnout.engine.loop import ComputeThread
from turnout.engine.openai_api import OpenAIApi
from turnout.engine.parallel import ParallelRunner
from turnout.engine.pd import Disaggregation
from turnout.engine.replies import generate_events, reply_row
from turnout.engine.reports import Reports
from turnout.engine.request_machine import Request
from turnout.engine.requests import parse_object
from turnout.engine.update_calls import UpdateCalls
from turnout.engine.weight_calls import WeightCalls
from turnout.native.loader import path_taken
from turnout.placement.parent import Owner
from turnout.protocol.sglang import ENGINE_HEADER, SamplingParams
from turnout.weights.delta_bucket import DELTA_BUCKET
from turnout.weights.manifest import FORMAT, FORMAT_VERSION

BODY_MAX = 64 << 20
HEALTH_DEADLINE_S = 20.0
BEAT_LIMIT_S = 60.0
ERROR_TYPES = {401: "authentication_error", 409: "version_unmet", 429: "rate_limit_error"}


class Server:
    """Handlers of one engine's data and information calls."""

    def __init__(self, compute: ComputeThread, owner: Owner | None = None) -> None:
        self.compute, self.settings = compute, compute.settings
        self.pair = Disaggregation(compute)
        self.updates = UpdateCalls(compute)
        weights = WeightCalls(compute, self.updates.updates)
        adoption = Adoption(compute, Owner(0) if owner is None else owner, self.updates.forget)
        self.started = time.time()
        leases = Leases(compute, self.updates.forget, self.started)
        self.controls = (Control(compute), self.updates, weights, FolderProbe(compute), adoption, leases)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_MAX, middlewares=[self._guard])
        app.on_cleanup.append(self._stop_audits)
        info = (("/server_info", self.server_info), ("/model_info", self.model_info))
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.get("/health", self.health),
                web.get("/health_generate", self.health_generate),
                *[web.get(path, handler) for path, handler in info],
                *[web.get(f"/get_{path[1:]}", handler) for path, handler in info],
                web.get("/get_weight_version", self.label),
                web.get("/weight_version", self.weight_version),
                web.get("/ready", self.health),
                web.get("/ping", self.health),
                *Reports(self.compute).routes(),
                *OpenAIApi(self.compute, self.pair).routes(),
                *[route for calls in self.controls for route in calls.routes()],
            ]
        )
        app.on_response_prepare.append(self._sign)
        return app

    async def _sign(self, _request: web.Request, answer: web.StreamResponse) -> None:
        """Ours: who answers, for a client that asked through a router."""
        answer.headers[ENGINE_HEADER] = self.settings.engine_id

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Checks the admin token of control calls and turns our errors into answers."""
        calls = getattr(handler, "__self__", None)
        if isinstance(calls, ControlCalls) and not calls.authorised(request):
            return _error("control calls need the admin token", 401)
        try:
            return await handler(request)
        except UserError as fault:
            return _error(str(fault), 400, fault.faults[0].where)
        except VersionUnmet as fault:
            served = {"version": fault.last_version, "root": fault.root}
            return web.json_response({**_error_row(str(fault), 409), "served": served}, status=409)
        except EngineBusy as fault:
            return _error(str(fault), 503 if fault.phase == "fenced" else 429)
        except TurnoutError as fault:
            return _error(str(fault), 500)
        except TimeoutError:
            return _error("the engine did not answer within its deadline", 503)

    async def _stop_audits(self, _app: web.Application) -> None:
        await self.updates.updates.audits.stop()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        row = parse_object(await request.read())
        if needs_text(row):
            await self.compute.model.text_ready()
        asked = parse_generate(row, self.compute.model)
        requests = [prompt.request for prompt in asked.prompts]
        async with (
            self.pair.attend(row, requests),
            self.compute.call(requests, self.settings.request_timeout_s, asked.stream) as call,
        ):
            if asked.stream:
                own = self.settings.incremental_streaming_output
                return await send_events(request, generate_events(call, asked, self.compute.model, own))
            await call.ended()
        rows = [reply_row(prompt, self.compute.model) for prompt in asked.prompts]
        return web.json_response(rows if asked.listed else rows[0])

    async def health(self, _request: web.Request) -> web.Response:
        """200 while the compute thread moves."""
        idle_s = time.monotonic() - self.compute.beat
        if idle_s > BEAT_LIMIT_S:
            return _error(f"the compute thread has not moved for {idle_s:.0f} s", 503)
        return web.Response()

    async def health_generate(self, _request: web.Request) -> web.Response:
        """200 when one token was really generated. An engine that is paused, has given its memory back or waits
        for weights was told to generate nothing: there it is /health."""
        if self.compute.core.fenced is not None or self.compute.core.scheduler.paused:
            return await self.health(_request)
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        probe = Request(f"health-{secrets.token_hex(12)}", [0], params, seed=0)
        ended = await self.compute.generate(probe, HEALTH_DEADLINE_S)
        if ended.generated != 1:
            return _error(f"the probe ended without a token: {ended.message}", 503)
        return web.Response()

    async def server_info(self, _request: web.Request) -> web.Response:
        settings, load = self.settings, self.compute.load
        return web.json_response(
            {
                **self._model_row(),
                "engine": "turnout",
                "engine_id": settings.engine_id,
                "pid": os.getpid(),
                "version": f"turnout-{__version__}",
                "native": path_taken(),
                "status": "fenced" if self.compute.core.fenced else "ready",
                "device": "cpu",
                "dtype": settings.dtype,
                "quantization": settings.quantization,
                "tp_size": settings.tp_size,
                "dp_size": 1,
                "pp_size": 1,
                "ep_size": settings.ep_size,
                "ranks": [asdict(report) for report in self.compute.core.reports],
                "delta_formats": self._delta_formats(),
                **self._weight_slices(),
                **self.pair.info(),
                "max_total_num_tokens": settings.pages * settings.page_tokens,
                "max_running_requests": settings.max_running_requests,
                "chunked_prefill_size": settings.max_step_tokens,
                "page_size": settings.page_tokens,
                "context_length": self.compute.model.shape.context_length,
                "started_at": self.started,
                "internal_states": [
                    {
                        "steps": load.steps,
                        "used_pages": load.used_pages,
                        "running": load.running,
                        "waiting": load.waiting,
                        "generated_tokens": load.tokens,
                        "preempted": load.preempted,
                        "prompt_rows": load.prompt_rows,
                    }
                ],
            }
        )

    async def model_info(self, _request: web.Request) -> web.Response:
        return web.json_response({**self._model_row(), "is_generation": True})

    async def label(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.compute.attested.version})

    async def weight_version(self, _request: web.Request) -> web.Response:
        """Ours: what is served, its root digest computed from the live tensors, how verified, and when. 503
        where what it holds is unknown."""
        if (unknown := self.compute.core.memory.unknown) is not None:
            return _error(unknown, 503)
        attested = self.compute.attested
        return web.json_response(
            {
                "version": attested.version,
                "root": attested.root,
                "level": attested.level,
                "verified": attested.verified,
                "at": attested.at,
            }
        )

    def _weight_slices(self) -> dict[str, Any]:
        """Ours: how to cut tensors for the ranks, of which each can be a member of a group."""
        runner = self.compute.core.runner
        return {"weight_slices": runner.receiver.slices} if isinstance(runner, ParallelRunner) else {}

    def _delta_formats(self) -> list[str]:
        """Ours: versions of a store that need not be full, and buckets of changes through a group."""
        takes = self.compute.core.weights.storage.takes_changes
        return [f"{FORMAT}/{FORMAT_VERSION}", DELTA_BUCKET] if takes else []

    def _model_row(self) -> dict[str, Any]:
        path, config = str(self.settings.model_path), self.compute.model.config
        return {
            "model_type": config.model_type,
            "architectures": config.architectures,
            "vocab_size": self.compute.model.shape.vocab_size,
            "model_path": path,
            "tokenizer_path": path,
            "served_model_name": self.settings.model_name,
            "weight_version": self.compute.attested.version,
        }


def _error(message: str, status: int, param: str | None = None) -> web.Response:
    return web.json_response(_error_row(message, status, param), status=status)


def _error_row(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """SGLang's shape for its own endpoints, with the fields that OpenAI's clients read."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
