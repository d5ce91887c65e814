"""One engine process from start to end.

Promises: the port is bound and `ready_file` written (atomically: {"url", "pid", "engine_id"}, and the bootstrap
port of a prefill engine) only when the engine serves; SIGTERM and SIGINT end it within STOP_DEADLINE_S with
status 0; unless detached it ends when its parent does, or `linger_s` later, so that no engine outlives a run that
was killed and does not go on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from turnout.core.errors import TurnoutError
from turnout.engine.loop import ComputeThread
from turnout.engine.server import Server
from turnout.engine.settings import EngineSettings
from turnout.native.loader import path_taken
from turnout.placement.parent import Owner

log = logging.getLogger(__name__)
STOP_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Lifetime:
    """How long an engine lives. `parent_pid` is who started it, None: whoever is the parent right now; `linger_s`:
    how long it waits for another owner once that one has ended."""

    ready_file: Path | None = None
    detached: bool = False
    parent_pid: int | None = None
    linger_s: float = 0.0

    def owner(self) -> Owner:
        parent = os.getppid() if self.parent_pid is None else self.parent_pid
        return Owner(0 if self.detached else parent, self.linger_s)


def run_engine(settings: EngineSettings, lifetime: Lifetime | None = None) -> int:
    """Serves until told to stop; returns the exit status."""
    lifetime = lifetime if lifetime is not None else Lifetime()
    owner = lifetime.owner()
    try:
        asyncio.run(_serve(settings, lifetime.ready_file, owner))
    except TurnoutError as fault:
        log.error("engine %s: %s", settings.engine_id, fault)
        return fault.exit_status
    except OSError as fault:
        log.error(
            "engine %s cannot serve on %s:%d: %s", settings.engine_id, settings.host, settings.port, fault
        )
        return 1
    return 0


async def _serve(settings: EngineSettings, ready_file: Path | None, owner: Owner) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    compute = ComputeThread(settings)
    await compute.start()
    log.info("engine %s: %s", settings.engine_id, path_taken())
    server = Server(compute, owner)
    # handler_cancellation: a client that goes away cancels its handler, which aborts its request
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await server.pair.start()
        site = web.TCPSite(runner, settings.host, settings.port)
        await site.start()
        url = _url(settings.host, runner.addresses[0][1])
        log.info("engine %s serves %s at %s", settings.engine_id, compute.attested.version, url)
        if ready_file is not None:
            row: dict[str, object] = {"url": url, "pid": os.getpid(), "engine_id": settings.engine_id}
            if server.pair.bootstrap_port is not None:
                row["disaggregation_bootstrap_port"] = server.pair.bootstrap_port
            _announce(ready_file, row)
        await stop.wait()
    finally:
        await runner.cleanup()
        await server.pair.stop()
        await compute.stop(STOP_DEADLINE_S)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _announce(path: Path, row: dict[str, object]) -> None:
    staged = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    staged.write_text(json.dumps(row), encoding="utf-8")
    staged.replace(path)
