"""A TCP proxy that makes a near server a far one: each answer comes late, no faster than a rate, or not for now."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from tests.proxies import Proxy

PIECE = 65536


class ThrottledProxy(Proxy):
    """Passes connections on to a server; `delay_s` before each answer, `rate` bytes per second over all of them.
    `passed` counts bytes of answers. While the network is `split` nothing passes, and no connection ends."""

    def __init__(self, target: str, delay_s: float = 0.0, rate: float = 1e12) -> None:
        self._delay_s, self._rate = delay_s, rate
        self.passed, self._free_at, self._lock = 0, 0.0, threading.Lock()
        self._whole = threading.Event()
        self._whole.set()
        super().__init__(target, self._both)

    def split(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    def _both(self, client: socket.socket, server: socket.socket) -> None:
        threading.Thread(target=self._up, args=(client, server), daemon=True).start()
        self._down(client, server)

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := client.recv(PIECE):
                self._whole.wait()
                server.sendall(piece)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := server.recv(PIECE):
                time.sleep(self._delay_s + self._turn(len(piece)))
                self._whole.wait()
                client.sendall(piece)

    def _turn(self, count: int) -> float:
        """How long this piece waits for those before it."""
        with self._lock:
            now = time.monotonic()
            self.passed += count
            self._free_at = max(now, self._free_at) + count / self._rate
            return self._free_at - now
