"""The requests of one HTTP call while they run, as the event loop sees them.

Promises: nothing is buffered per token. The compute thread says that there is news, once per step for all calls;
the reader of a call then takes what its requests have by that time, so a slow reader gets fewer, larger pieces and
never holds up the engine. What is taken is whole: as many tokens as log-probs and versions. A token that ends its
request is told with the end only: whoever has tokens without an end may go on from them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from turnout.core.version import VersionSpans
from turnout.engine.request_machine import Request

SHOWN_S = 1.0


@dataclass(frozen=True)
class Change:
    """Request `index` of the call has len(spans) output tokens now; `final`: it ended."""

    index: int
    spans: VersionSpans
    final: bool


class Call:
    """See the module. Lives on the event loop; `tell` and `over` are for the compute thread's messenger."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self._news = asyncio.Event()
        self._running = {request.rid for request in requests}

    @property
    def running(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return sorted(self._running)

    def tell(self) -> None:
        """A step was computed."""
        self._news.set()

    def over(self, request: Request) -> None:
        """This request ended; from here on nobody changes it."""
        self._running.discard(request.rid)
        self._news.set()

    async def ended(self) -> None:
        """Returns when every request has ended."""
        while self._running:
            await self._news.wait()
            self._news.clear()

    async def changes(self) -> AsyncIterator[Change]:
        """What is new, until every request's final change was told."""
        told, since = [0] * len(self.requests), [0.0] * len(self.requests)
        left = set(range(len(self.requests)))
        while left:
            for index in sorted(left):
                request = self.requests[index]
                final = request.rid not in self._running
                # `spans` is replaced after token and log-prob were appended: what it counts is there
                spans = request.spans
                if final:
                    left.discard(index)
                if final or _due(request, len(spans), told[index], since[index]):
                    told[index], since[index] = len(spans), time.monotonic()
                    yield Change(index, spans, final)
            if left:
                await self._news.wait()
                self._news.clear()


def _due(request: Request, made: int, told: int, since: float) -> bool:
    """Whether tokens are shown now: the first at once, others by `stream_interval`, but at least every second."""
    if made <= told or request.tokens[request.prompt_tokens + made - 1] in request.end_ids:
        return False
    interval = request.params.stream_interval
    if interval is None or not told or made - told >= interval:
        return True
    return time.monotonic() - since >= SHOWN_S
