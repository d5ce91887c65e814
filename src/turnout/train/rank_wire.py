"""Messages between the controller and a trainer rank: JSON objects in frames over one TCP connection per rank.

    frame             4 bytes length (big endian), then UTF-8 JSON
    a rank at first              HELLO_BYTES: the secret of this run, then its number
    controller -> rank           {"id": n, "call": name, ...}, or {"call": "where"}
    rank -> controller           {"id": n, "result": {...}} or {"id": n, "fault": {...}}, or {"where": "..."}

Tensors and batches never travel here. Where rank 0 is on another machine its tensors come back by a connection of
their own (Back), which says at first that it is number BACK: bytes, as many as the answer before them tells.
Promises: nothing that comes in is run; errors of core.errors and OSError come out as what they were, any other as
its text; a peer that stops in the middle of a frame is a closed one.
"""

from __future__ import annotations

import hmac
import json
import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from turnout.core import errors
from turnout.core.errors import Fault, TurnoutError, UserError

Message = dict[str, Any]
HELLO_BYTES = 70
BACK = 999_999
FRAME_S = 10  # within one frame
FRAME_BYTES = 1 << 24  # a control message; a peer that announces more is none of ours


def hello(rank: int, token: str) -> bytes:
    """What a rank says first; `token` is 64 characters."""
    return f"{token}{rank:06d}".encode()


def rank_of(said: bytes, token: str) -> int | None:
    """Which rank says so; None: none of this run."""
    known = hmac.compare_digest(said[:-6], token.encode()) and said[-6:].isdigit()
    return int(said[-6:]) if known else None


def listening(host: str, backlog: int) -> socket.socket:
    """At a port that was free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)


class WireClosed(Exception):
    """The other end is gone, or speaks another language."""


class Wire:
    """One end of a connection. Several threads may send; one receives. `asked` end: it receives only when something
    is there, so that waiting for the rest of a frame has an end too."""

    def __init__(self, connection: socket.socket, asked: bool = False) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit = struct.pack("ll", FRAME_S, 0)  # by the kernel: Python's would be the same for both directions
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if asked:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises WireClosed."""
        data = json.dumps(message).encode()
        try:
            with self._lock:
                self._socket.sendall(struct.pack(">I", len(data)) + data)
        except OSError as fault:
            raise WireClosed(str(fault)) from fault

    def receive(self) -> Message:
        """Blocks until a message begins to come. Raises WireClosed."""
        try:
            (length,) = struct.unpack(">I", self._exactly(4))
            if length > FRAME_BYTES:
                raise WireClosed(f"a frame of {length} bytes")
            return json.loads(self._exactly(length))
        except (OSError, ValueError) as fault:
            raise WireClosed(str(fault)) from fault

    def close(self) -> None:
        self._socket.close()

    def cut(self) -> None:
        """From any thread: whoever waits there finds it closed."""
        _cut(self._socket)

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise WireClosed("closed")
            data += piece
        return bytes(data)


class Back:
    """The controller's end of the connection by which tensors come back."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._poll = connection, select.poll()
        connection.setblocking(False)
        self._poll.register(connection, select.POLLIN)

    def read(self, into: memoryview, end: float, now: Callable[[], float]) -> None:
        """Fills `into`, of bytes. Raises WireClosed, and TimeoutError where that takes longer than `end`."""
        while into:
            if (left := end - now()) <= 0:
                raise TimeoutError
            try:
                got = self._socket.recv_into(into) if self._poll.poll(left * 1000) else -1
            except OSError as fault:
                raise WireClosed(str(fault)) from fault
            if got == 0:
                raise WireClosed("closed")
            into = into[max(got, 0) :]

    def close(self) -> None:
        self._socket.close()

    def cut(self) -> None:
        """As Wire's."""
        _cut(self._socket)


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):  # it is closed
        connection.shutdown(socket.SHUT_RDWR)


def fault_row(error: BaseException) -> Message:
    """An error as a message; `kind` is empty where it is none of ours."""
    kind = type(error).__name__
    if isinstance(error, UserError):
        return {"kind": kind, "faults": [asdict(fault) for fault in error.faults]}
    if isinstance(error, OSError) and error.errno is not None:
        return {"kind": "OSError", "errno": error.errno, "text": error.strerror, "path": error.filename}
    ours = isinstance(error, errors.TrainError | errors.WeightError | errors.InvariantBroken)
    return {"kind": kind if ours else "", "text": str(error) if ours else repr(error)}


def error_of(row: Message) -> TurnoutError | OSError | None:
    """The error of a row; None where it was none of ours."""
    if not row["kind"]:
        return None
    if row["kind"] == "OSError":
        return OSError(row["errno"], row["text"], row["path"])
    made = getattr(errors, row["kind"])
    return made([Fault(**fault) for fault in row["faults"]]) if "faults" in row else made(row["text"])
