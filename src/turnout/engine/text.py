"""Stop strings over tokens as they come, and the text of a finished response.

Promises: a stop string is found at the token that completes it, also across tokens and characters of several
tokens; each push decodes a bounded tail, not the whole response.
"""

from __future__ import annotations

from typing import Any

from turnout.core.types import Finish
from turnout.engine.scheduler_machine import Request

HELD_BACK = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer shows a character whose bytes are not all there
CONTEXT_TOKENS = 4  # decoded before the new ones, since a token's text may depend on its neighbours


class StopWatch:
    """Watches one response for its stop strings."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._stops = tuple(stop for stop in stops if stop)
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        self._read = 0
        self._tail = ""

    def push(self, output: list[int]) -> bool:
        """Whether a stop string is complete now, given all tokens of the response so far."""
        start = max(0, self._read - CONTEXT_TOKENS)
        old = self._decode(output[start : self._read])
        new = self._decode(output[start:])
        if new.endswith(HELD_BACK) and len(output) - self._read < 2 * CONTEXT_TOKENS:
            return False
        self._read = len(output)
        self._tail += new[len(old) :]
        found = any(stop in self._tail for stop in self._stops)
        self._tail = self._tail[-self._keep :] if self._keep else ""
        return found

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


def response_text(tokenizer: Any | None, request: Request) -> str:
    """The response as text: without the id that ended it, and cut before the first stop string."""
    if tokenizer is None:
        return ""
    ids = request.output
    if request.finish is Finish.STOP and ids and ids[-1] in request.end_ids:
        ids = ids[:-1]
    text = tokenizer.decode(ids, skip_special_tokens=request.params.skip_special_tokens)
    cuts = [text.find(stop) for stop in request.params.stop if stop and stop in text]
    return text[: min(cuts)] if cuts and request.finish is Finish.STOP else text
