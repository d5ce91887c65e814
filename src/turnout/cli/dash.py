"""`turnout dash RUN_DIR [--host H] [--port P] [--token-env NAME]`: a run as a web page, live or after its end."""

from __future__ import annotations

import asyncio
import errno
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from turnout.cli.find_run import find_run
from turnout.cli.options import Parser, token_from
from turnout.core.address import Address
from turnout.core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from turnout.dash.server import DashServer

PORT = 7860


def command(argv: list[str]) -> int:
    """Serves until it is interrupted; prints where."""
    parser = Parser(
        prog="turnout dash", description="A web page over a run's directory, live or after its end."
    )
    parser.add_argument("run", metavar="RUN_DIR", help="directory of a run")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=None, help=f"default: {PORT}, or the next one that is free; 0: any"
    )
    parser.add_argument(
        "--token-env", metavar="NAME", help="variable that holds the token, needed to listen beyond loopback"
    )
    asked = parser.parse_args(argv)
    from turnout.dash.server import DashServer, DashSettings
    from turnout.dash.source import RunSource

    settings = DashSettings(
        asked.host, PORT if asked.port is None else asked.port, token_from(asked.token_env, "--token-env")
    )
    settings.check()
    server = DashServer(RunSource(find_run(asked.run), _checkpoint), settings)
    asyncio.run(_serve(server, settings.host, _ports(asked.port)))
    return 0


def _ports(asked: int | None) -> range:
    return range(PORT, PORT + 20) if asked is None else range(asked, asked + 1)


def _checkpoint(name: str) -> Path | None:
    from turnout.train.model_zoo import at_hand

    return at_hand(name)


async def _serve(server: DashServer, host: str, ports: range) -> None:
    from aiohttp import web

    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    try:
        site = await _listens(runner, host, ports)
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        print(f"dashboard at {site} (Ctrl-C ends it)", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()


async def _listens(runner: object, host: str, ports: range) -> str:
    """The URL, on the first port that is free."""
    from aiohttp import web

    assert isinstance(runner, web.AppRunner)
    for port in ports:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as fault:
            reason = fault.strerror or str(fault)
            if fault.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError(Fault("--host", host, reason, "give an address of this machine")) from None
            if port == ports[-1]:
                raise ConfigError(Fault("--port", str(port), reason, "give another one")) from None
            continue
        bound: int = runner.addresses[-1][1]
        return f"{Address(host, bound).url}/"
    raise AssertionError("no port to try")
