"""A prompt value of a row, brought to one form: text, token ids, or chat messages with tools.

Promises: content given as a list of text parts is joined; arguments of tool calls given as JSON text become
objects, so that both spellings render alike; null fields (Parquet fills them in) are left out; absent content
beside tool calls is the empty text. Images, audio and video are refused by name, never dropped. Every other
form is a PromptFault with the reason; callers add the place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from turnout.rollout.tokenizer import Message

MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
_MEDIA_MARKS = ("<image>", "<video>", "<audio>")


class PromptFault(ValueError):
    """Why a row cannot be a prompt, and what to do."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


def refuse_media(values: dict[str, Any], keys: tuple[str, ...] = MEDIA_COLUMNS) -> None:
    """PromptFault where a row brings images, audio or video: only text is supported."""
    for column in keys:
        content = values.get(column)
        if content is not None and content not in ([], "", {}):
            raise PromptFault(f"column {column!r}: image, audio and video inputs are not supported")


def check_text(text: str) -> str:
    for mark in _MEDIA_MARKS:
        if mark in text:
            raise PromptFault(f"holds {mark}: image, audio and video inputs are not supported")
    return text


def token_ids(value: list[Any], size: int) -> tuple[int, ...]:
    """An already tokenised prompt, each id checked against the tokenizer's size."""
    for at, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise PromptFault(f"the prompt is a list of ids, but item {at} is {token!r}")
        if not 0 <= token < size:
            raise PromptFault(f"id {token} at {at} is outside the tokenizer's 0 to {size - 1}")
    return tuple(value)


def messages(value: list[Any], marks: bool = False) -> list[Message]:
    """Chat messages in the form that chat templates expect. `marks`: texts may hold <image> and its like, as what a
    model or a tool wrote may."""
    return [_message(at, item, (lambda text: text) if marks else check_text) for at, item in enumerate(value)]


def tools(value: Any) -> list[Any] | None:
    """Tools as a list; they may come as a list or as JSON text; null and an empty list are none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as fault:
            raise PromptFault(f"the tools are no JSON: {fault}") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise PromptFault("the tools are no list of objects")
    return value


def _message(at: int, item: Any, check: Callable[[str], str]) -> Message:
    if not isinstance(item, dict):
        raise PromptFault(f"message {at} is no object but {type(item).__name__}")
    message = {key: value for key, value in item.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise PromptFault(f"message {at} has no role")
    if not isinstance(message.get("tool_calls", []), list):
        raise PromptFault(f"message {at} has tool calls that are no list")
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(at, call) for call in message["tool_calls"]]
        message.setdefault("content", "")
    message["content"] = _content(at, message.get("content"), check)
    return message


def _content(at: int, content: Any, check: Callable[[str], str]) -> str:
    if isinstance(content, str):
        return check(content)
    if not isinstance(content, list):
        raise PromptFault(f"message {at} has no content that is text or a list of text parts")
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(check(part))
        elif (
            isinstance(part, dict)
            and part.get("type", "text") == "text"
            and isinstance(part.get("text"), str)
        ):
            texts.append(check(part["text"]))
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise PromptFault(f"message {at} holds a part of type {kind!r}: only text parts are supported")
    return "".join(texts)


def _tool_call(at: int, call: Any) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise PromptFault(f"message {at} holds a tool call that is no object")
    holder = call.get("function", call)
    if not isinstance(holder, dict):
        raise PromptFault(f"message {at} holds a tool call whose function is no object")
    arguments = holder.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except ValueError as fault:
        raise PromptFault(f"message {at}: the arguments of a tool call are no JSON: {fault}") from None
    if holder is call:
        return {**call, "arguments": parsed}
    return {**call, "function": {**holder, "arguments": parsed}}
