"""Where the dashboard listens."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from turnout.cli.dash import _listens
from turnout.core.errors import ConfigError


def listens(host: str, ports: range) -> str:
    async def body() -> str:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        try:
            return await _listens(runner, host, ports)
        finally:
            await runner.cleanup()

    return asyncio.run(body())


def test_the_next_port_that_is_free_or_the_reason() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port = {port}: "):
            listens("127.0.0.1", range(port, port + 1))
        assert int(listens("127.0.0.1", range(port, port + 20)).rpartition(":")[2][:-1]) > port


def test_a_host_that_is_none_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def refused(host: str) -> None:
        with pytest.raises(ConfigError, match=f"--host = {host}: .*this machine"):
            listens(host, range(7860, 7880))

    refused("192.0.2.1")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    refused("nowhere.invalid")
