"""Tool calls in what a model wrote. Pure.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number (Qwen, Hermes, SmolLM3)
llama3   the whole answer is {"name": ..., "parameters": {...}} (Llama 3.1 and later)

Promise: what is no call of the form stays in the text, so that a client sees it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

Found = tuple[
    str, list[tuple[str, str]]
]  # the text without the calls; names and arguments, a JSON object as text
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def hermes(text: str) -> Found:
    calls: list[tuple[str, str]] = []
    rest: list[str] = []
    at = 0
    while (first := text.find(_OPEN, at)) >= 0 and (last := text.find(_CLOSE, first)) >= 0:
        call = _call(text[first + len(_OPEN) : last].strip())
        end = last + len(_CLOSE)
        rest.append(text[at : end if call is None else first])
        calls += [] if call is None else [call]
        at = end
    return ("".join((*rest, text[at:])).strip(), calls) if calls else (text, [])


def llama3(text: str) -> Found:
    call = _call(text.strip().removeprefix("<|python_tag|>"))
    return (text, []) if call is None else ("", [call])


PARSERS: dict[str, Callable[[str], Found]] = {"hermes": hermes, "llama3": llama3}


def _call(text: str) -> tuple[str, str] | None:
    try:
        row = json.loads(text)
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            return None
        arguments = row.get("arguments", row.get("parameters", {}))
        told = json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return (row["name"], told) if isinstance(arguments, dict) else None
