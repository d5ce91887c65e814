"""Server-sent events as they come in.

Promises: an event is whole or not given; one over EVENT_BYTES_MAX is an error, so that nothing grows without limit
(aiohttp's own limit of a line is 128 KiB, which a cumulative event soon has).
"""

from __future__ import annotations

import aiohttp

EVENT_BYTES_MAX = 64 << 20


class EventReader:
    """The data lines of a body."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content
        self._parts: list[bytes] = []  # of a line that is not whole yet
        self._size = 0
        self._lines: list[bytes] = []  # whole ones, last first

    async def next(self) -> str | None:
        """The data of the next event; None at "[DONE]" or where the body ends. Raises aiohttp.ClientPayloadError
        for an event that is too big."""
        while True:
            while self._lines:
                line = self._lines.pop().strip()
                if line.startswith(b"data:"):
                    data = line.removeprefix(b"data:").strip()
                    return None if data == b"[DONE]" else data.decode("utf-8", "replace")
            part = await self._content.readany()
            if not part:
                return None
            self._take(part)

    def _take(self, part: bytes) -> None:
        first, *rest = part.split(b"\n")
        self._parts.append(first)
        self._size += len(first)
        if rest:
            whole = b"".join(self._parts)
            self._parts, self._size = [rest[-1]], len(rest[-1])
            self._lines = [whole, *rest[:-1]][::-1]
        if self._size > EVENT_BYTES_MAX:
            raise aiohttp.ClientPayloadError(f"an event of more than {EVENT_BYTES_MAX} bytes")
