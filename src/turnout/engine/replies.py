"""What goes back for a request: the reply of one that ended, and the events of one that still runs.

Shapes are SGLang 0.5.23's: each event of a stream holds all text, ids and log-probs so far, `finish_reason` null
until the last, which equals the reply without streaming; with --incremental-streaming-output each holds only what
is new of the three, and `completion_tokens` and versions of all. Promises: an event costs its new tokens, plus a
copy in the first form; the text of an event is whole characters that no stop string takes back.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from turnout.core.types import Finish
from turnout.core.version import VersionSpans
from turnout.engine.calls import Call
from turnout.engine.generate_request import GenerateCall, Prompt
from turnout.engine.model import LoadedModel
from turnout.engine.request_machine import Request
from turnout.engine.text import ShownText, response_text
from turnout.protocol.sglang import GenerateReply, routed_text


def reply_row(prompt: Prompt, model: LoadedModel) -> dict[str, Any]:
    """The whole answer to one prompt whose request ended."""
    request = prompt.request
    row = GenerateReply(
        text=response_text(model.tokenizer, request) if prompt.text else "",
        output_ids=tuple(request.output),
        logprobs=tuple(request.logprobs),
        finish=request.finish if request.finish is not None else Finish.ABORT,
        message=request.message,
        spans=request.spans.runs,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached,
        kv_mixed=tuple(request.mixed_runs),
    ).to_json(request.rid)
    meta = row["meta_info"]
    if request.moved is not None:
        meta |= request.moved.to_json()
    matched = matched_stop(request, model)
    if matched is not None:
        meta["finish_reason"]["matched"] = matched
    if request.routed_from is not None:
        meta["routed_experts"] = routed_text(bytes(request.routed))
    if not prompt.return_logprob:
        del meta["output_token_logprobs"]
        return row
    meta["input_token_logprobs"] = input_rows(prompt, model)
    meta["output_token_logprobs_length"] = len(meta["output_token_logprobs"])
    if prompt.text_in_logprobs and model.tokenizer is not None:
        for triple in meta["output_token_logprobs"]:
            triple[2] = model.tokenizer.decode([triple[1]])
    return row


def input_rows(prompt: Prompt, model: LoadedModel) -> list[tuple[float | None, int, str | None]]:
    """SGLang's `input_token_logprobs`: a row per prompt token from `logprob_start_len` on, the first without a
    log-prob. [] where none were asked for."""
    request = prompt.request
    if request.logprob_start is None:
        return []
    logprobs = [None, *request.input_logprobs]
    ids = request.tokens[request.logprob_start : request.logprob_start + len(logprobs)]
    named = prompt.text_in_logprobs and model.tokenizer is not None
    texts = [model.tokenizer.decode([i]) if named else None for i in ids]  # type: ignore[union-attr]
    return list(zip(logprobs, ids, texts))


def matched_stop(request: Request, model: LoadedModel) -> int | str | None:
    """The id or stop string that ended a request; None where neither did."""
    if request.finish is not Finish.STOP:
        return None
    if request.tokens[-1] in request.end_ids:
        return request.tokens[-1]
    stops = [stop for stop in request.params.stop if stop]
    if len(stops) == 1 or model.tokenizer is None:
        return stops[0]
    text = model.tokenizer.decode(request.output, skip_special_tokens=request.params.skip_special_tokens)
    return min((stop for stop in stops if stop in text), key=text.find)


async def generate_events(
    call: Call, asked: GenerateCall, model: LoadedModel, own: bool = False
) -> AsyncIterator[str]:
    """The events of a streamed /generate; those of a list name their prompt by `index`, as SGLang's do. `own`: each
    has only what is new."""
    progress = [Progress(prompt, model, own) for prompt in asked.prompts]
    async for change in call.changes():
        if change.final:
            row = reply_row(asked.prompts[change.index], model)
            event = json.dumps(progress[change.index].untold(row) if own else row)
        else:
            event = progress[change.index].event(change.spans)
        yield f'{event[:-1]}, "index": {change.index}}}' if asked.listed else event


class Progress:
    """One request while it runs: what a stream has shown of it so far. `own`: events repeat nothing."""

    def __init__(self, prompt: Prompt, model: LoadedModel, own: bool = False) -> None:
        self.prompt, self.request, self._model, self._own = prompt, prompt.request, model, own
        params = self.request.params
        tokenizer = model.tokenizer if prompt.text else None
        self._shown = ShownText(tokenizer, params.stop, params.skip_special_tokens)
        self.text = ""
        self.count = 0
        self._ids, self._pairs, self._inputs, self._json_text = "", "", "", ""

    def advance(self, spans: VersionSpans) -> tuple[list[int], list[float], str]:
        """Takes over the tokens up to len(spans); returns the new ids, their log-probs and the new text."""
        first = self.request.prompt_tokens + self.count
        end = self.request.prompt_tokens + len(spans)
        ids, logprobs = self.request.tokens[first:end], self.request.logprobs[self.count : len(spans)]
        self.count = len(spans)
        visible = ids[:-1] if ids and ids[-1] in self.request.end_ids else ids
        text = self._shown.push(visible)
        self.text += text
        return ids, logprobs, text

    def event(self, spans: VersionSpans) -> str:
        """The JSON of an event; like `advance`, it takes the new tokens over."""
        if self._own:
            self._ids, self._pairs, self._json_text = "", "", ""
        ids, logprobs, text = self.advance(spans)
        comma = ", " if self._ids and ids else ""
        self._ids += comma + ", ".join(map(str, ids))
        self._json_text += json.dumps(text)[1:-1]
        meta = {
            "id": self.request.rid,
            "finish_reason": None,
            "prompt_tokens": self.request.prompt_tokens,
            "completion_tokens": self.count,
            "cached_tokens": self.request.cached,
            "weight_version": spans.runs[-1][1],
            "weight_versions": version_rows(spans),
        }
        if mixed := self.request.kv_mixed(self.count):
            meta["kv_mixed"] = mixed
        tail = "}"
        if self.prompt.return_logprob:
            meta["output_token_logprobs_length"] = self.count
            self._pairs += comma + json.dumps(self._triples(ids, logprobs))[1:-1]
            if not self._inputs:
                self._inputs = json.dumps(input_rows(self.prompt, self._model))
            tail = f', "input_token_logprobs": {self._inputs}, "output_token_logprobs": [{self._pairs}]}}'
        head = json.dumps(meta)[:-1]
        return f'{{"text": "{self._json_text}", "output_ids": [{self._ids}], "meta_info": {head}{tail}}}'

    def untold(self, row: dict[str, Any]) -> dict[str, Any]:
        """What is left of the whole reply for the last event, where each has only what is new."""
        row["output_ids"] = row["output_ids"][self.count :]
        row["text"] = row["text"][len(self.text) :]
        if self.prompt.return_logprob:
            row["meta_info"]["output_token_logprobs"] = row["meta_info"]["output_token_logprobs"][
                self.count :
            ]
        return row

    def _triples(self, ids: list[int], logprobs: list[float]) -> list[tuple[float, int, str | None]]:
        named = self.prompt.text_in_logprobs and self._model.tokenizer is not None
        texts = [self._model.tokenizer.decode([i]) if named else None for i in ids]  # type: ignore[union-attr]
        return list(zip(logprobs, ids, texts))


def version_rows(spans: VersionSpans) -> list[dict[str, Any]]:
    """SGLang's `weight_versions`: [{version, start, end}]."""
    rows, start = [], 0
    for tokens, label in spans.runs:
        rows.append({"version": label, "start": start, "end": start + tokens})
        start += tokens
    return rows
