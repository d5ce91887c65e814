"""The accept loop of the proxies that tests put before a server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Proxy:
    """Takes connections at `endpoint` until `close`, each served by `serve` on a thread of its own, with a
    connection to the server."""

    def __init__(self, target: str, serve: Callable[[socket.socket, socket.socket], None]) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target, self._serve = (host, int(port)), serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection(self._target, timeout=60) as server,
        ):
            self._serve(client, server)
