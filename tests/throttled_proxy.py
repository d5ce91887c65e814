"""A TCP proxy that makes a near server a far one: each answer comes late, no faster than a rate, or not for now."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

PIECE = 65536


class ThrottledProxy:
    """Passes connections on to a server; `delay_s` before each answer, `rate` bytes per second over all of them.
    `passed` counts bytes of answers. While the network is `split` nothing passes, and no connection ends."""

    def __init__(self, target: str, delay_s: float = 0.0, rate: float = 1e12) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target, self._delay_s, self._rate = (host, int(port)), delay_s, rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed, self._free_at, self._lock = 0, 0.0, threading.Lock()
        self._whole = threading.Event()
        self._whole.set()
        threading.Thread(target=self._serve, daemon=True).start()

    def split(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target, timeout=60)
            except OSError:
                return
            for body in (self._up, self._down):
                threading.Thread(target=body, args=(client, server), daemon=True).start()

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
        for end in (client, server):
            end.close()

    def _turn(self, count: int) -> float:
        """How long this piece waits for those before it."""
        with self._lock:
            now = time.monotonic()
            self.passed += count
            self._free_at = max(now, self._free_at) + count / self._rate
            return self._free_at - now
