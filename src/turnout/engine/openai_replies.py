"""OpenAI's shapes for requests of the engine: whole completions, and the chunks of a stream.

Promises: chunks hold what is new (text of whole characters that no stop string takes back); joined they are the
text of the whole completion. `finish_reason` is stop, length or abort, as SGLang's. `matched_stop` and `metadata`
(which weights made the tokens) are SGLang's additions.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from turnout.core.types import Finish
from turnout.core.version import VersionSpans
from turnout.engine.calls import Call
from turnout.engine.generate_request import Prompt
from turnout.engine.model import LoadedModel
from turnout.engine.openai_request import OpenAICall
from turnout.engine.replies import Progress, matched_stop, version_rows
from turnout.engine.request_machine import Request
from turnout.engine.text import HALF, response_text


def completion(call: OpenAICall, model: LoadedModel) -> dict[str, Any]:
    """The whole answer, all requests ended."""
    choices = []
    for index, prompt in enumerate(call.asked.prompts):
        request, text = prompt.request, response_text(model.tokenizer, prompt.request)
        said = {"message": {"role": "assistant", "content": text}} if call.chat else {"text": text}
        logprobs = None
        if prompt.return_logprob:
            logprobs = _logprobs(call, model, request.output, request.logprobs)
        choices.append({"index": index, **said, "logprobs": logprobs, **_ending(request, model)})
    spans = call.asked.prompts[0].request.spans
    metadata = {
        "weight_version": spans.runs[-1][1] if spans.runs else "",
        "weight_versions": version_rows(spans),
    }
    return {**_head(call, ""), "choices": choices, "usage": _usage(call), "metadata": metadata}


async def completion_events(running: Call, call: OpenAICall, model: LoadedModel) -> AsyncIterator[str]:
    """The chunks of a stream; a chat begins each choice with its role and ends it with a chunk of its own."""
    head = _head(call, ".chunk" if call.chat else "")
    streams = [_ChoiceStream(index, call, model) for index in range(len(call.asked.prompts))]
    if call.chat:
        for index in range(len(streams)):
            role = {"role": "assistant", "content": ""}
            yield json.dumps({**head, "choices": [_choice(index, {"delta": role})]})
    async for change in running.changes():
        for choice in streams[change.index].next(change.spans, change.final):
            yield json.dumps({**head, "choices": [choice]})
    if call.include_usage:
        yield json.dumps({**head, "choices": [], "usage": _usage(call)})


class _ChoiceStream:
    """The chunks of one choice."""

    def __init__(self, index: int, call: OpenAICall, model: LoadedModel) -> None:
        self._index, self._call, self._model = index, call, model
        self._prompt: Prompt = call.asked.prompts[index]
        self._progress = Progress(self._prompt, model)

    def next(self, spans: VersionSpans, final: bool) -> list[dict[str, Any]]:
        request, before = self._prompt.request, self._progress.text
        ids, values, text = self._progress.advance(spans)
        if final:
            text = response_text(self._model.tokenizer, request)[len(before) :]
        logprobs = None
        if self._prompt.return_logprob and ids:
            logprobs = _logprobs(self._call, self._model, ids, values)
        ending = _ending(request, self._model) if final else {}
        if not self._call.chat:
            if not (text or logprobs or final):
                return []
            return [_choice(self._index, {"text": text, "logprobs": logprobs, **ending})]
        chunks = []
        if text or logprobs:
            chunks.append(_choice(self._index, {"delta": {"content": text}, "logprobs": logprobs}))
        if final:
            chunks.append(_choice(self._index, {"delta": {}, **ending}))
        return chunks


def _choice(index: int, fields: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "logprobs": None, "finish_reason": None, "matched_stop": None, **fields}


def _head(call: OpenAICall, kind: str) -> dict[str, Any]:
    name = f"chat.completion{kind}" if call.chat else "text_completion"
    return {"id": call.id, "object": name, "created": int(time.time()), "model": call.model}


def _ending(request: Request, model: LoadedModel) -> dict[str, Any]:
    finish = request.finish if request.finish is not None else Finish.ABORT
    row: dict[str, Any] = {"finish_reason": finish.value, "matched_stop": matched_stop(request, model)}
    return row | {"abort_message": request.message} if finish is Finish.ABORT else row


def _logprobs(
    call: OpenAICall, model: LoadedModel, ids: Sequence[int], values: Sequence[float]
) -> dict[str, Any]:
    """Of the chosen tokens. `bytes` is null where a token is not whole characters."""
    tokenizer = model.tokenizer
    texts = ["" if tokenizer is None else tokenizer.decode([token]) for token in ids]
    if not call.chat:
        return {"tokens": texts, "token_logprobs": list(values), "top_logprobs": None, "text_offset": None}
    content = [
        {
            "token": text,
            "logprob": value,
            "bytes": None if HALF in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, value in zip(texts, values)
    ]
    return {"content": content}


def _usage(call: OpenAICall) -> dict[str, Any]:
    """Tokens of all choices; the prompt of several samples counts once."""
    requests = [prompt.request for prompt in call.asked.prompts]
    prompts = sum(request.prompt_tokens for request in requests[:: call.samples])
    generated = sum(request.generated for request in requests)
    cached = sum(request.cached for request in requests[:: call.samples])
    return {
        "prompt_tokens": prompts,
        "completion_tokens": generated,
        "total_tokens": prompts + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
