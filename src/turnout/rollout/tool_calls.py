"""Tool calls in what a model wrote. Pure.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number (Qwen, Hermes, SmolLM3)
llama3   the whole answer is {"name": ..., "parameters": {...}} (Llama 3.1 and later)

Promise: what is no call of the form stays in the text, so that a client sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

Found = tuple[
    str, list[tuple[str, str]]
]  # the text without the calls; names and arguments, a JSON object as text
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def hermes(text: str) -> Found:
    calls: list[tuple[str, str]] = []

    def taken(match: re.Match[str]) -> str:
        call = _call(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    rest = _HERMES.sub(taken, text)
    return (rest.strip(), calls) if calls else (text, [])


def llama3(text: str) -> Found:
    call = _call(text.strip().removeprefix("<|python_tag|>"))
    return (text, []) if call is None else ("", [call])


PARSERS: dict[str, Callable[[str], Found]] = {"hermes": hermes, "llama3": llama3}


def _call(text: str) -> tuple[str, str] | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        return None
    arguments = row.get("arguments", row.get("parameters", {}))
    return (row["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
