"""Server-sent events of one call, written as the client reads them.

Promises: a client that reads slowly holds up its own stream only, and at most one event plus the transport's buffer
is kept for it; whoever holds the call aborts its requests when this returns or is cancelled before their end. A
stream that can't be finished is cut, so that no client takes half of it for the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

DONE = "[DONE]"


async def send_events(request: web.Request, events: AsyncIterator[str]) -> web.StreamResponse:
    """Sends each text as one event, then [DONE]; returns early when the client is gone."""
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await answer.prepare(request)
    try:
        async for event in events:
            await answer.write(f"data: {event}\n\n".encode())
        await answer.write(f"data: {DONE}\n\n".encode())
        await answer.write_eof()
    except ConnectionResetError:
        return answer
    except asyncio.CancelledError:  # the client went away, or did not read within its deadline
        if request.transport is not None:
            request.transport.abort()
        raise
    return answer
