"""OpenAI's chat completions as the endpoint of one trajectory speaks them (docs/guides/agents.md). Pure.

Promises: what would change the answer and is not served (several choices, structured output, a forced tool,
log-probs, images, parameters that are not known) is refused by name; sampling is the run's: other values are told
in `ignored`, and not used. A refusal has OpenAI's shape, and a code that clients know: `context_length_exceeded`
where the sample's tokens are used up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias",
)  # fmt: skip
REFUSED = (
    "functions",
    "function_call",
    "audio",
    "prediction",
    "logprobs",
    "top_logprobs",
    "web_search_options",
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "tool_choice": ("auto", "none"), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "parallel_tool_calls": (True,), "skip_special_tokens": (True,), "add_generation_prompt": (True,),
    "ignore_eos": (False,), "echo": (False,), "include_stop_str_in_output": (False,), "min_tokens": (0,),
}  # fmt: skip
READ = (
    "messages",
    "model",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stream",
    "stream_options",
    "tools",
)
NO_MATTER = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "priority", "request_id", "cache_salt", "usage",
)  # fmt: skip
KNOWN = {*SAMPLING, *REFUSED, *NEUTRAL, *READ, *NO_MATTER}


class ChatRefused(Exception):
    """A request that is not answered: an HTTP status, a text and OpenAI's code."""

    def __init__(self, text: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(text)
        self.code, self.status = code, status

    @property
    def row(self) -> dict[str, Any]:
        fault = {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}
        return {"error": fault}


@dataclass(frozen=True)
class ChatRequest:
    """`tools` is as it came, `calls` whether the answer may call them; `most` the tokens of this answer (None:
    what the sample has left); `ignored` the sampling parameters that it brought; `again` whether the client sends
    it once more by itself."""

    messages: list[Any]
    tools: Any
    calls: bool
    most: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    model: str
    ignored: dict[str, Any]
    again: bool = False


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is a JSON object as text."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatAnswer:
    """`finish`: stop, length or tool_calls. `prompt_tokens` counts all before the answer."""

    answer_id: str
    model: str
    content: str
    calls: tuple[ToolCall, ...]
    finish: str
    prompt_tokens: int
    tokens: int

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message, as the client sends it back."""
        if not self.calls:
            return {"role": "assistant", "content": self.content}
        rows = [
            {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in self.calls
        ]
        return {"role": "assistant", "content": self.content or None, "tool_calls": rows}

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens, "total_tokens": total}


def parse_chat(row: Any, again: bool) -> ChatRequest:
    """A body; raises ChatRefused."""
    if not isinstance(row, dict):
        raise ChatRefused("the body is no JSON object")
    for name in REFUSED:
        if row.get(name):
            raise ChatRefused(f"{name} is not served here", "unsupported_parameter")
    for name in sorted(name for name, value in row.items() if value is not None and name not in KNOWN):
        raise ChatRefused(f"{name} is not known here", "unsupported_parameter")
    for name, values in NEUTRAL.items():
        if row.get(name) is not None and row[name] not in values:
            raise ChatRefused(f"{name} {row[name]!r} is not served here", "unsupported_value")
    messages, most = row.get("messages"), row.get("max_completion_tokens")
    most = row.get("max_tokens") if most is None else most
    if not isinstance(messages, list) or not messages:
        raise ChatRefused("messages is no list of at least one message")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ChatRefused(f"max_tokens {most!r} is no whole number of at least 1")
    stop = row.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise ChatRefused("stop is no text and no list of texts")
    options = row.get("stream_options") or {}
    return ChatRequest(
        messages=messages,
        tools=row.get("tools"),
        calls=bool(row.get("tools")) and row.get("tool_choice") != "none",
        most=most,
        stop=tuple(stops),
        stream=row.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        model=str(row.get("model", "")),
        ignored={name: row[name] for name in SAMPLING if row.get(name) is not None},
        again=again,
    )


def completion(answer: ChatAnswer) -> dict[str, Any]:
    """The whole answer."""
    choice = {"index": 0, "message": answer.message, "logprobs": None, "finish_reason": answer.finish}
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": answer.usage}


def chunks(answer: ChatAnswer, include_usage: bool) -> Iterator[str]:
    """The answer as the events of a stream: role, what was said, how it ended, and usage where it is asked for."""
    head = _head(answer, "chat.completion.chunk")
    delta = {key: value for key, value in answer.message.items() if key != "role" and value is not None}
    if answer.calls:
        delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
    for part, finish in (({"role": "assistant", "content": ""}, None), (delta, None), ({}, answer.finish)):
        choice = {"index": 0, "delta": part, "logprobs": None, "finish_reason": finish}
        yield json.dumps({**head, "choices": [choice]})
    if include_usage:
        yield json.dumps({**head, "choices": [], "usage": answer.usage})


def _head(answer: ChatAnswer, kind: str) -> dict[str, Any]:
    return {"id": answer.answer_id, "object": kind, "created": int(time.time()), "model": answer.model}
