"""A real S3 server over HTTP for tests: moto's server mode, in this process, and a proxy that loses answers."""

from __future__ import annotations

import logging
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from moto.server import ThreadedMotoServer

from tests.proxies import Proxy

logging.getLogger("werkzeug").setLevel(logging.ERROR)
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@contextmanager
def s3_server(bucket: str = "weights") -> Iterator[str]:
    """The endpoint of a server with one bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT"), timeout=30)
        yield endpoint
    finally:
        server.stop()


def environment(endpoint: str) -> dict[str, str]:
    """What a client needs to reach it."""
    return {**KEYS, "AWS_ENDPOINT_URL": endpoint}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server, and an environment in which clients find it."""
    with s3_server() as address:
        for name, value in environment(address).items():
            monkeypatch.setenv(name, value)
        yield address


class AnswerLoser(Proxy):
    """Passes whole connections on to a server, one request each. `lose`: of requests whose head holds this text,
    the next `count` are carried out and their answers dropped."""

    def __init__(self, target: str) -> None:
        self.lose, self.count, self.lost = b"", 0, 0
        super().__init__(target, self._one)

    def _one(self, client: socket.socket, server: socket.socket) -> None:
        client.settimeout(20)
        head = b""
        while b"\r\n\r\n" not in head:
            piece = client.recv(65536)
            if not piece:
                return
            head += piece
        top, _, body = head.partition(b"\r\n\r\n")
        lines = [line for line in top.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        sizes = [line.split(b":")[1] for line in lines if line.lower().startswith(b"content-length:")]
        server.sendall(b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + body)
        left = int(sizes[0]) - len(body) if sizes else 0
        while left > 0:
            piece = client.recv(65536)
            server.sendall(piece)
            left -= len(piece)
        answer = b""
        while piece := server.recv(65536):
            answer += piece
        if self.count and self.lose in top:
            self.count, self.lost = self.count - 1, self.lost + 1
            return
        client.sendall(answer)
