"""Text of tokens as they come: stop strings, what a stream may show, and the text of a finished response.

Promises: a stop string is found at the token that completes it, also across tokens and characters of several
tokens; a stream never shows half a character, nor text that a stop string may still cut off; each push decodes
a bounded tail, not the whole response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnout.core.types import Finish
from turnout.engine.request_machine import Request

HALF = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer shows a character whose bytes are not all there
CONTEXT_TOKENS = 4  # decoded before the new ones, since a token's text may depend on its neighbours
HELD_TOKENS = 8  # no character has more: what is still half a character then, is no character


class Decoder:
    """Turns tokens into text piece by piece; tokens that end in half a character wait for the rest."""

    def __init__(self, tokenizer: Any, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._context: list[int] = []
        self._waiting: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """The text that the next tokens add."""
        self._waiting.extend(ids)
        old = self._decode(self._context)
        for end in range(len(self._waiting), max(0, len(self._waiting) - HELD_TOKENS), -1):
            new = self._decode(self._context + self._waiting[:end])
            if not new.endswith(HALF):
                return self._take(end, new[len(old) :])
        if len(self._waiting) < HELD_TOKENS:
            return ""
        return self._take(len(self._waiting), self._decode(self._context + self._waiting)[len(old) :])

    def _take(self, count: int, text: str) -> str:
        self._context = (self._context + self._waiting[:count])[-CONTEXT_TOKENS:]
        self._waiting = self._waiting[count:]
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


class StopWatch:
    """Watches one response for its stop strings."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], skip_special: bool) -> None:
        self._decoder = Decoder(tokenizer, skip_special)
        self._stops = tuple(stop for stop in stops if stop)
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = ""

    def push(self, ids: Sequence[int]) -> bool:
        """Whether a stop string is complete with these next tokens."""
        self._tail += self._decoder.push(ids)
        found = any(stop in self._tail for stop in self._stops)
        self._tail = self._tail[-self._keep :] if self._keep else ""
        return found


class ShownText:
    """What a stream may show of a response that still grows: a beginning of every text it can end with."""

    def __init__(self, tokenizer: Any | None, stops: tuple[str, ...], skip_special: bool) -> None:
        self._decoder = None if tokenizer is None else Decoder(tokenizer, skip_special)
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._cut = False

    def push(self, ids: Sequence[int]) -> str:
        """The text that may be shown in addition, given the next tokens."""
        if self._decoder is None or self._cut:
            return ""
        text = self._held + self._decoder.push(ids)
        found = [text.find(stop) for stop in self._stops if stop in text]
        self._cut = bool(found)  # the engine ends the request at this token: nothing more will be shown
        shown = min(found) if found else len(text) - max((_begun(text, s) for s in self._stops), default=0)
        self._held = text[shown:]
        return text[:shown]


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


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
