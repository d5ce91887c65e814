"""What an engine tells of its load: /metrics, /v1/loads and its old name /get_load. Data calls, no token needed.

Promises: fields that SGLang 0.5.23 has are there with its names and meanings; `num_total_reqs` is ours.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

from aiohttp import web

from turnout import __version__
from turnout.core.errors import Fault
from turnout.engine.core import EngineCore
from turnout.engine.loop import ComputeThread
from turnout.engine.requests import BadRequest
from turnout.observe.exposition import CONTENT_TYPE, Exposition

DEADLINE_S = 20.0
SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")


class Reports:
    """Handlers of one engine's load reports."""

    def __init__(self, compute: ComputeThread) -> None:
        self.compute, self.settings = compute, compute.settings

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/metrics", self.metrics),
            web.get("/v1/loads", self.loads),
            web.get("/get_load", self.load_of_old),
        ]

    async def metrics(self, _request: web.Request) -> web.Response:
        text = await self.compute.do(exposition, DEADLINE_S)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def loads(self, request: web.Request) -> web.Response:
        include = request.query.get("include")
        asked = set(SECTIONS) if include is None else {part.strip() for part in include.split(",")}
        if asked - set(SECTIONS):
            wrong = ", ".join(sorted(asked - set(SECTIONS)))
            raise BadRequest(Fault("include", wrong, f"known sections are {', '.join(SECTIONS)}"))
        rank = request.query.get("dp_rank", "0")
        if rank != "0":
            raise BadRequest(Fault("dp_rank", rank, "this engine has rank 0 only"))
        row = self._core_row()
        if asked & {"queues", "all"}:
            row["queues"] = {"waiting": row["num_waiting_reqs"], "grammar": 0, "paused": 0, "retracted": 0}
        return web.json_response(
            {
                "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
                "version": f"turnout-{__version__}",
                "loads": [row],
            }
        )

    async def load_of_old(self, _request: web.Request) -> web.Response:
        """As SGLang answered before it had /v1/loads."""
        row = self._core_row()
        return web.json_response(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": row["num_total_reqs"],
                    "num_waiting_reqs": row["num_waiting_reqs"],
                    "num_tokens": row["num_total_tokens"],
                }
            ]
        )

    def _core_row(self) -> dict[str, Any]:
        load, settings = self.compute.load, self.settings
        used, metrics = load.used_pages * settings.page_tokens, self.compute.core.metrics
        waiting = list(self.compute.core.scheduler.waiting)  # a copy: the compute thread goes on
        waiting_tokens = sum([len(request.tokens) for request in waiting])
        return {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_total_reqs": load.running + load.waiting,
            "num_waiting_uncached_tokens": waiting_tokens,
            "num_used_tokens": used,
            "num_total_tokens": used + waiting_tokens,
            "num_active_tokens": used + waiting_tokens,
            "max_total_num_tokens": settings.pages * settings.page_tokens,
            "max_running_requests": settings.max_running_requests,
            "token_usage": load.used_pages / settings.pages,
            "gen_throughput": metrics.generated_per_second(),
            "cache_hit_rate": metrics.hit_rate(),
            "utilization": load.running / settings.max_running_requests,
        }


def exposition(core: EngineCore) -> str:
    """All metrics as text; called on the thread that owns the core."""
    counts, load, settings, attested = core.metrics, core.load, core.settings, core.attested
    out = Exposition({"model_name": settings.model_name, "engine_id": settings.engine_id})
    gauges = (
        ("sglang:num_running_reqs", "Requests that run.", load.running),
        ("sglang:num_queue_reqs", "Requests that wait.", load.waiting),
        ("sglang:num_used_tokens", "Tokens of the KV cache in use.", load.used_pages * settings.page_tokens),
        ("sglang:token_usage", "Share of the KV cache in use.", load.used_pages / settings.pages),
        ("sglang:max_total_num_tokens", "Tokens of the KV cache.", settings.pages * settings.page_tokens),
        ("sglang:gen_throughput", "Generated tokens per second.", counts.generated_per_second()),
        ("sglang:cache_hit_rate", "Share of prompt tokens found in the prefix cache.", counts.hit_rate()),
        ("turnout:paused", "1 while generation is paused.", int(core.scheduler.paused)),
        ("turnout:fenced", "1 while nothing is served until a good update.", int(core.fenced is not None)),
    )
    for name, said, value in gauges:
        out.value(name, "gauge", said, value)
    counters = (
        ("sglang:prompt_tokens_total", "Prompt tokens of requests that got a token.", counts.prompt_tokens),
        ("sglang:generation_tokens_total", "Tokens generated.", counts.generated_tokens),
        ("sglang:num_requests_total", "Requests that ended.", counts.requests),
        ("sglang:num_aborted_requests_total", "Requests that ended as abort.", counts.aborted),
        ("sglang:num_retracted_requests_total", "Times that a request gave up its pages.", load.preempted),
        ("turnout:steps_total", "Steps computed.", load.steps),
        ("turnout:weight_updates_total", "Times that new weights were put into place.", counts.updates),
        ("turnout:weight_update_seconds_total", "Seconds that putting them took.", counts.update_s),
        ("turnout:pause_seconds_total", "Seconds of pauses by call.", counts.pause_seconds()),
    )
    for name, said, value in counters:
        out.value(name, "counter", said, value)
    said = "Prompt tokens found in the prefix cache."
    out.value("sglang:cached_tokens_total", "counter", said, counts.cached_tokens, cache_source="device")
    said = "The weights that are served: their label and root digest."
    out.value("turnout:weight_version_info", "gauge", said, 1, version=attested.version, root=attested.root)
    out.histogram("sglang:time_to_first_token_seconds", "Arrival to first token.", counts.first_token)
    out.histogram("sglang:inter_token_latency_seconds", "Between two tokens of a request.", counts.between)
    out.histogram("sglang:e2e_request_latency_seconds", "Arrival to end of a request.", counts.request)
    return out.text()
