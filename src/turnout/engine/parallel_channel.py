"""Messages from rank 0 of a sharded engine to the other ranks, over one socket pair per rank.

Owns rank 0's ends. Promises: messages of one channel arrive in the order they were sent; a rank that does not take
or answer a message within the deadline is told to `lost`; nothing blocks without a limit.
A message is a tuple (verb, arguments...), pickled; tensors follow as plain bytes.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

Lost = Callable[[int, str], NoReturn]
Message = tuple[Any, ...]


class Channel:
    """See the module. Thread-safe: one message, with its answers, at a time. `ends[i]` leads to rank i + 1; `lost`
    is told which rank and why, and does not return."""

    def __init__(self, ends: Sequence[socket.socket], deadline_s: float, lost: Lost) -> None:
        self.forgotten: list[int] = []  # keys of buffers that nobody at rank 0 holds any more
        self._sockets, self._lost = ends, lost
        self._ends = [Connection(os.dup(end.fileno())) for end in ends]
        self._lock = threading.RLock()
        self.limit(deadline_s)

    def limit(self, deadline_s: float) -> None:
        """Every later send and receive must end within so many seconds."""
        self._deadline_s = deadline_s
        value = struct.pack("ll", int(deadline_s), int(deadline_s % 1 * 1e6))
        for end in self._sockets:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)

    def tell(self, message: Message) -> None:
        """Sends to every rank; not answered."""
        for rank in range(1, len(self._ends) + 1):
            self.tell_one(rank, message)

    def tell_one(self, rank: int, message: Message, bits: NDArray[np.unsignedinteger] | None = None) -> None:
        """Sends to one rank, with the bits of a tensor (any layout) where the verb takes some."""
        with self._lock:
            if self.forgotten:
                gone = [self.forgotten.pop() for _ in range(len(self.forgotten))]
                self.tell(("forget", gone))
            end = self._ends[rank - 1]
            try:
                end.send(message)
                if bits is not None:
                    end.send_bytes(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)
            except OSError as fault:
                self._lost(rank, self._why(fault, message))

    def ask(
        self, message: Message, meanwhile: Callable[[], None] | None = None, longer_s: float = 0.0
    ) -> list[Any]:
        """Sends to every rank and returns their answers in rank order; `meanwhile` is rank 0's own share of it. An
        answer may take `longer_s` more than the limit: what a rank waits for itself."""
        with self._lock:
            self.tell(message)
            if meanwhile is not None:
                meanwhile()
            usual = self._deadline_s
            if longer_s:
                self.limit(usual + longer_s)
            found = [self._answer(rank, message, Connection.recv) for rank in range(1, len(self._ends) + 1)]
            if longer_s:
                self.limit(usual)
            return found

    def fetch(self, rank: int, message: Message, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Asks one rank for the bits of a tensor, flat."""
        with self._lock:
            self.tell_one(rank, message)
            return np.frombuffer(self._answer(rank, message, Connection.recv_bytes), dtype)

    def close(self) -> None:
        for end in (*self._ends, *self._sockets):
            end.close()

    def _answer(self, rank: int, message: Message, receive: Callable[[Connection], Any]) -> Any:
        try:
            return receive(self._ends[rank - 1])
        except (OSError, EOFError) as fault:
            self._lost(rank, self._why(fault, message))

    def _why(self, fault: Exception, message: Message) -> str:
        if isinstance(fault, BlockingIOError):
            return f"did not answer {message[0]!r} within {self._deadline_s:g} s"
        return f"cut the connection at {message[0]!r}"
