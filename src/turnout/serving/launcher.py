"""Starts one embedded engine as a process of its own and waits until it serves.

Promises: the engine is either serving when `launch` returns, or stopped and explained; it chooses its own
port (bind and hold, no race) and tells it through its ready file.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from turnout.core.errors import DeadlineExceeded, EngineDead, EngineError
from turnout.core.ports import Clock
from turnout.placement.cluster import LOOPBACK, Cluster, Place, Process, ThisMachine, Told
from turnout.placement.processes import ChildProcess, child_environment
from turnout.placement.tasks import first
from turnout.serving.access import Access
from turnout.serving.address import parse_address
from turnout.serving.client import EngineClient

POLL_S = 0.05
STOP_GRACE_S = 5.0
TOKEN_VARIABLE = "TURNOUT_ENGINE_ADMIN_TOKEN"  # noqa: S105 - the variable's name, not a secret
READY = ".ready.json"  # the end of a ready file's name; before it stands the engine's id


@dataclass(frozen=True)
class EngineLaunch:
    """What to start: `arguments` are those of `python -m turnout.engine`, the launcher adds the ready file, where
    to listen and who started it. `folder` takes the log and the ready file; `ranks` is its number of devices."""

    engine_id: str
    arguments: tuple[str, ...]
    threads: int
    folder: Path
    start_deadline_s: float
    token: str | None = None
    ranks: int = 1


class Engine:
    """A running engine: its process and its client. `kept`: the controller before this one started it."""

    def __init__(self, process: Process, client: EngineClient, kept: bool = False) -> None:
        self.process, self.client, self.kept = process, client, kept

    @property
    def engine_id(self) -> str:
        return self.client.engine_id

    async def probe(self, timeout_s: float) -> None:
        """Returns when it answers well; raises EngineReplaced where something else does, EngineError or
        DeadlineExceeded as every call."""
        await self.client.health(timeout_s)

    async def keep(self, timeout_s: float) -> None:
        """What goes on in place of probes while it may be late to answer; raises EngineReplaced alone."""

    async def stop(self) -> None:
        await self.client.close()
        await self.process.stop(STOP_GRACE_S)


def command_of(spec: EngineLaunch, host: str = LOOPBACK) -> tuple[Path, tuple[str, ...]]:
    """The ready file of an engine, and the command with which this process starts it."""
    ready = spec.folder / f"{spec.engine_id}{READY}"
    where = ("--host", host, "--ready-file", str(ready), "--parent-pid", str(os.getpid()))
    return ready, (sys.executable, "-m", "turnout.engine", *spec.arguments, *where)


def client_of(spec: EngineLaunch, told: Told, clock: Clock) -> EngineClient:
    """Of an engine that serves, by what its ready file tells."""
    address = parse_address(told["url"], "engine")
    client = EngineClient(spec.engine_id, address, clock, Access(admin_key=spec.token))
    client.bootstrap_port = told.get("disaggregation_bootstrap_port")
    return client


async def launch(spec: EngineLaunch, clock: Clock, cluster: Cluster | None = None) -> Engine:
    """Starts the engine, here or where the cluster has a place for it; raises EngineDead or EngineError, with
    nothing left running, where it can't serve."""
    cluster = ThisMachine(clock) if cluster is None else cluster
    place = Place(spec.engine_id, spec.ranks)
    process, told = await cluster.start(place, partial(serve, spec), spec.start_deadline_s)
    return Engine(process, client_of(spec, told, clock))


async def serve(spec: EngineLaunch, host: str, clock: Clock) -> tuple[Process, Told]:
    """Starts the engine on this machine and waits for it; what its ready file tells."""
    ready, command = command_of(spec, host)
    ready.unlink(missing_ok=True)
    process = await ChildProcess.start(
        f"engine {spec.engine_id}",
        command,
        child_environment(spec.threads, {TOKEN_VARIABLE: spec.token} if spec.token else {}),
        spec.folder / f"{spec.engine_id}.log",
        clock,
    )
    try:
        await _appears(process, ready, spec, clock)
        return process, json.loads(ready.read_text())
    except BaseException:
        await process.stop(STOP_GRACE_S)
        raise


def _told(ready: Path) -> int | None:
    """The process that a ready file tells of; None: there is none."""
    try:
        return int(json.loads(ready.read_text())["pid"])
    except FileNotFoundError:
        return None


async def _appears(process: ChildProcess, ready: Path, spec: EngineLaunch, clock: Clock) -> None:
    async def poll() -> None:
        while _told(ready) != process.pid:  # an engine of a controller before this one may write it as well
            await clock.sleep(POLL_S)

    async def dies() -> None:
        raise EngineDead(spec.engine_id, "start", "none", await process.ended())

    try:
        await first(clock.within(spec.start_deadline_s, "it to serve", poll()), dies())
    except DeadlineExceeded as fault:
        raise EngineError(spec.engine_id, "start", "none", f"{fault}; see {process.log}") from fault
