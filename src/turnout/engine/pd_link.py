"""One TCP connection between the halves of a PD pair, as messages of turnout.protocol.pd.

Promises: nothing larger than a frame's limit is read into memory; a peer that vanished is noticed within
KEEPALIVE_S even while nobody speaks; what goes wrong is PeerLost or LinkError. Deadlines are the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import TypeVar

from turnout.core.errors import TurnoutError
from turnout.protocol.pd import (
    CHUNK_MAX,
    HEADER,
    Abort,
    Kind,
    LinkError,
    Message,
    chunk_header,
    pack,
    unpack,
    unpack_header,
)

KEEPALIVE_S = (5, 5, 3)  # idle, between probes, probes: dead after 20 s of silence
CLOSE_DEADLINE_S = 2.0
M = TypeVar("M", bound=Message)


class PeerLost(TurnoutError):
    """The other engine can't be reached, or closed the connection."""


class Link:
    """See the module. One coroutine reads, one writes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        peer = writer.get_extra_info("socket")
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            for option, value in zip(options, KEEPALIVE_S):
                peer.setsockopt(socket.IPPROTO_TCP, option, value)

    @staticmethod
    async def connect(host: str, port: int) -> Link:
        """Raises PeerLost."""
        try:
            return Link(*await asyncio.open_connection(host, port))
        except OSError as fault:
            raise PeerLost(f"no bootstrap server at {host}:{port}: {fault}") from fault

    async def send(self, message: Message) -> None:
        await self._write(pack(message))

    async def send_bytes(self, data: memoryview) -> None:
        """All bytes as CHUNK frames."""
        for at in range(0, len(data), CHUNK_MAX):
            part = data[at : at + CHUNK_MAX]
            await self._write(chunk_header(len(part)) + part)

    async def receive(self) -> Message:
        """The next message; an ABORT is raised as LinkError."""
        kind, length = unpack_header(await self._read(HEADER.size))
        if kind is Kind.CHUNK:
            raise LinkError("bytes came where a message was due")
        message = unpack(kind, await self._read(length))
        if isinstance(message, Abort):
            raise LinkError(message.message)
        return message

    async def expect(self, kind: type[M]) -> M:
        return expected(await self.receive(), kind)

    async def receive_bytes(self, size: int) -> bytearray:
        """Exactly `size` bytes from CHUNK frames."""
        data, at = bytearray(size), 0
        while at < size:
            kind, length = unpack_header(await self._read(HEADER.size))
            if kind is Kind.ABORT:
                message = unpack(kind, await self._read(length))
                raise LinkError(message.message if isinstance(message, Abort) else "")
            if kind is not Kind.CHUNK or not 0 < length <= size - at:
                raise LinkError(f"a frame of kind {kind.name} with {length} bytes, {size - at} are due")
            data[at : at + length] = await self._read(length)
            at += length
        return data

    async def close(self, message: str = "") -> None:
        """Says ABORT first where there is a message. Never raises, waits at most CLOSE_DEADLINE_S."""
        with contextlib.suppress(OSError, TimeoutError, PeerLost):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                if message:
                    await self.send(Abort(message))
                self._writer.close()
                await self._writer.wait_closed()
        self._writer.transport.abort()

    async def _read(self, count: int) -> bytes:
        try:
            return await self._reader.readexactly(count)
        except (asyncio.IncompleteReadError, OSError) as fault:
            raise PeerLost("the other engine closed the connection") from fault

    async def _write(self, frame: bytes) -> None:
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except OSError as fault:
            raise PeerLost("the other engine closed the connection") from fault


def expected(message: Message, kind: type[M]) -> M:
    """The message as the kind that is due; raises LinkError for any other."""
    if not isinstance(message, kind):
        raise LinkError(f"{type(message).__name__} came where {kind.__name__} was due")
    return message
