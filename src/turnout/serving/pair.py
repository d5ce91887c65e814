"""One streamed request to whoever answers it: one engine, or the two halves of a PD pair.

A pair gets the same body twice; the decode engine's stream is the answer (docs/guides/pd.md). Promises: a room is
used once; where the prefill half refuses, ends as an abort or is gone before the first token came, the stream ends
at once, with an abort or that engine's error, and the other half is told by the closed connection; nothing is left
behind when the stream is closed, and no wait is longer than the request's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import Any

from turnout.core.errors import DeadlineExceeded, EngineError, EngineRefused
from turnout.core.record import record
from turnout.core.types import Finish, but
from turnout.protocol.pd import ROOM_BITS, Bootstrap
from turnout.protocol.sglang import GenerateReply, GenerateRequest
from turnout.protocol.stream import PartialReply
from turnout.serving.client import EngineClient

ENDS_S = 1.0
Item = PartialReply | GenerateReply


def random_room() -> int:
    """A number that names one split request. A simulator passes its own."""
    return secrets.randbits(ROOM_BITS)


@record
class Way:
    """Who answers a request: `engine`, after `first` computed the prompt and the first token where there is one."""

    engine: EngineClient
    first: EngineClient | None = None

    def begun(self, item: PartialReply) -> list[PartialReply]:
        """The first tokens of a request, parted by the engine that made them."""
        if self.first is None:
            return [item]
        head, tail = item.parted(self.first.engine_id)
        return [head, tail] if tail.output_ids else [head]

    def stream(
        self, request: GenerateRequest, deadline_s: float, room: Callable[[], int] = random_room
    ) -> AsyncGenerator[Item, None]:
        """As turnout.serving.client.EngineClient.generate_stream."""
        if self.first is None:
            return self.engine.generate_stream(request, deadline_s)
        port = self.first.bootstrap_port
        if port is None:
            raise self.first.fault(EngineRefused, "rollout", "a prefill engine without a bootstrap port")
        if self.first.address.loopback and not self.engine.address.loopback:
            how = f"{self.engine.address.place} takes its KV from {self.first.address.place}, another host there"
            raise self.first.fault(EngineRefused, "rollout", f"{how}; name it by an address of its network")
        where = Bootstrap(self.first.address.host, port, room())
        return self._split(self.first, but(request, bootstrap=where), deadline_s)

    async def _split(
        self, first: EngineClient, request: GenerateRequest, deadline_s: float
    ) -> AsyncGenerator[Item, None]:
        prompt = asyncio.ensure_future(first.prefill(request, deadline_s))
        stream = self.engine.generate_stream(request, deadline_s)
        begun = asyncio.ensure_future(anext(stream))
        for task in (prompt, begun):
            task.add_done_callback(_seen)
        try:
            await asyncio.wait({prompt, begun}, return_when=asyncio.FIRST_COMPLETED)
            if not begun.done():
                why = prompt.result()
                if why:
                    yield GenerateReply("", (), (), Finish.ABORT, why, (), len(request.input_ids), 0)
                    return
            yield await begun
            async for item in stream:
                if isinstance(item, GenerateReply):  # the other half is about to end: not by a cut connection
                    with contextlib.suppress(EngineError, DeadlineExceeded):
                        await self.engine.clock.within(ENDS_S, f"{first.engine_id} to end its half", prompt)
                yield item
        finally:
            prompt.cancel()
            if begun.done():
                await stream.aclose()
            begun.cancel()  # which ends the stream where it still waits for its first token


def _seen(task: asyncio.Future[Any]) -> None:
    """What a half that nobody waits for any more raised is no news."""
    if not task.cancelled():
        task.exception()
