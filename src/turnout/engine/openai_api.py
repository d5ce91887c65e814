"""OpenAI's endpoints over the engine: /v1/completions, /v1/chat/completions, /v1/models.

Promises: the same requests, limits and errors as /generate; a client that goes away takes its requests with it.
"""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from turnout.engine.events import send_events
from turnout.engine.loop import ComputeThread
from turnout.engine.openai_replies import completion, completion_events
from turnout.engine.openai_request import OpenAICall, parse_chat, parse_completion
from turnout.engine.pd import Disaggregation
from turnout.engine.requests import parse_object


class OpenAIApi:
    """Handlers of one engine's OpenAI endpoints."""

    def __init__(self, compute: ComputeThread, pair: Disaggregation) -> None:
        self.compute, self.settings, self.pair = compute, compute.settings, pair
        self._started = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat_completions),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name:.+}", self.model),
        ]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        row = parse_object(await request.read())
        await self.compute.model.text_ready()
        asked = parse_completion(row, self.compute.model, self.settings.model_name)
        return await self._answer(request, row, asked)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        row = parse_object(await request.read())
        await self.compute.model.text_ready()
        asked = parse_chat(row, self.compute.model, self.settings.model_name)
        return await self._answer(request, row, asked)

    async def _answer(
        self, request: web.Request, row: dict[str, Any], asked: OpenAICall
    ) -> web.StreamResponse:
        requests = [prompt.request for prompt in asked.asked.prompts]
        stream = asked.asked.stream
        async with (
            self.pair.attend(row, requests),
            self.compute.call(requests, self.settings.request_timeout_s, stream) as call,
        ):
            if stream:
                return await send_events(request, completion_events(call, asked, self.compute.model))
            await call.ended()
        return web.json_response(completion(asked, self.compute.model))

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name == self.settings.model_name:
            return web.json_response(self._card())
        fault = {
            "message": f"The model {name!r} does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return web.json_response({"error": fault}, status=404)

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.settings.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "turnout",
            "root": self.settings.model_name,
            "parent": None,
            "max_model_len": self.compute.model.shape.context_length,
        }
