"""Starts a request router from PyPI (smg, sglang-router) as a process of its own and waits until it answers.

Promises: what a run says of its router is checked against the router's own arguments before anything is started;
it listens on loopback, its metrics too, each on a port that nobody else has (one that is taken between choice
and use costs another try); it retries nothing, opens no circuit breaker and removes no worker: the run alone
decides who is behind it. Nothing of it is left after `stop`, nor after the death of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from turnout.core.errors import ConfigError, DeadlineExceeded, EngineBusy, EngineDead, EngineError, Fault
from turnout.core.ports import Clock
from turnout.placement.processes import ChildProcess, child_environment
from turnout.placement.tasks import first
from turnout.serving.access import OPEN, Access
from turnout.serving.address import Address
from turnout.serving.ports import on_a_free_port
from turnout.serving.router_client import RouterClient

MODULES = {"smg": "smg.launch_router", "sglang-router": "sglang_router.launch_router"}
HOST = "127.0.0.1"
START_DEADLINE_S = 30.0
HELP_DEADLINE_S = 60.0
POLL_S = 0.05
STOP_GRACE_S = 5.0
TAKEN = "Address already in use"


@dataclass(frozen=True)
class RouterLaunch:
    """What to start. `name` is what it is called in events and logs; `arguments` are further ones of the router by
    name without dashes, true for a switch; `pairs`: for prefill and decode engines; `folder` takes the log."""

    name: str
    kind: str
    policy: str
    arguments: Mapping[str, Any]
    request_timeout_s: float
    folder: Path
    pairs: bool = False


@dataclass(frozen=True)
class Router:
    """A router that answers: a process of ours, or somebody else's (None)."""

    client: RouterClient
    process: ChildProcess | None

    async def ended(self) -> str:
        """Waits for the end of the process and says how it ended; for ever where it is somebody else's."""
        if self.process is None:
            await asyncio.Event().wait()
        assert self.process is not None, "the wait above has no end"
        return await self.process.ended()

    async def stop(self) -> None:
        await self.client.close()
        if self.process is not None:
            await self.process.stop(STOP_GRACE_S)


async def check_arguments(spec: RouterLaunch, clock: Clock) -> None:
    """Raises ConfigError where the router is not installed, or doesn't know an argument or the policy."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", MODULES[spec.kind], "--help",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=child_environment(1),
    )  # fmt: skip
    try:
        what = f"{spec.kind} to list its arguments"
        out, err = await clock.within(HELP_DEADLINE_S, what, process.communicate())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        remedy = "pip install 'turnout[router]'" if spec.kind == "smg" else f"pip install {spec.kind}"
        raise ConfigError(Fault("--router", spec.kind, f"can't be run: {''.join(last)}", remedy))
    text = out.decode(errors="replace")
    known = set(re.findall(r"--([a-z][a-z0-9-]+)", text))
    faults = [
        Fault(
            f"--router-{name}",
            str(value),
            f"{spec.kind} has no such argument",
            f"see python -m {MODULES[spec.kind]} --help",
        )
        for name, value in spec.arguments.items()
        if name not in known
    ]
    found = re.search(r"--policy \{([a-z_,]+)\}", text)
    policies = found[1].split(",") if found else [spec.policy]
    if spec.policy not in policies:
        faults.append(
            Fault(
                "--router-policy",
                spec.policy,
                f"{spec.kind} has no such policy",
                f"one of {', '.join(policies)}",
            )
        )
    if faults:
        raise ConfigError(faults)


def router_words(spec: RouterLaunch, port: int, metrics_port: int) -> list[str]:
    """The router's arguments."""
    chosen: dict[str, Any] = {
        "host": HOST,
        "port": port,
        "prometheus-host": HOST,
        "prometheus-port": metrics_port,
        "policy": spec.policy,
        "disable-retries": True,
        "disable-circuit-breaker": True,
        "disable-health-check": True,
        "pd-disaggregation": spec.pairs,
        # the lines that tell something: at the default each request is two
        "log-level": "warn",
        "worker-startup-check-interval": 1,
        "shutdown-grace-period-secs": 1,
        "request-timeout-secs": int(spec.request_timeout_s) + 60,
        # smg takes a bound of its own from the machine where it is told "none" as sglang-router is
        "max-concurrent-requests": 0 if spec.kind == "smg" else -1,
        **({"assignment-mode": "min_load"} if spec.policy == "manual" else {}),
        **spec.arguments,
    }
    words: list[str] = []
    for name, value in chosen.items():
        if value is False or value is None:
            continue
        words.append(f"--{name}")
        if value is not True:
            words += [str(one) for one in value] if isinstance(value, list) else [str(value)]
    return words


async def launch_router(spec: RouterLaunch, clock: Clock, access: Access = OPEN) -> Router:
    """Starts it; `access` is what engines ask of requests. Raises EngineDead or EngineError, with nothing left
    running, where it does not answer."""
    return await on_a_free_port(partial(_launched, spec, clock, access), lambda reason: TAKEN in reason)


async def _launched(spec: RouterLaunch, clock: Clock, access: Access) -> Router:
    port, metrics_port = _free_ports()
    temporary = Path(tempfile.mkdtemp(prefix="turnout-"))
    command = (
        sys.executable, "-m", "turnout.placement.guard", "--parent-pid", str(os.getpid()),
        "--temporary", str(temporary), "--",
        sys.executable, "-m", MODULES[spec.kind], *router_words(spec, port, metrics_port),
    )  # fmt: skip
    log = spec.folder / f"{spec.name}.log"
    process = await ChildProcess.start(spec.name, command, child_environment(1), log, clock)
    router = Router(RouterClient(spec.name, Address(HOST, port), clock, access), process)
    try:
        await _answers(router, spec.name, clock)
    except BaseException:
        await router.stop()
        raise
    return router


async def _answers(router: Router, name: str, clock: Clock) -> None:
    async def poll() -> None:
        while True:
            with contextlib.suppress(EngineDead, EngineBusy):  # it doesn't listen yet
                await router.client.workers()
                return
            await clock.sleep(POLL_S)

    async def dies() -> None:
        raise EngineDead(name, "start", "none", await router.ended())

    try:
        await first(clock.within(START_DEADLINE_S, "it to answer", poll()), dies())
    except DeadlineExceeded as fault:
        raise EngineError(name, "start", "none", str(fault)) from fault


def _free_ports() -> tuple[int, int]:
    """Two ports that were free a moment ago; a router can't be handed a bound socket."""
    with socket.socket() as one, socket.socket() as other:
        one.bind((HOST, 0))
        other.bind((HOST, 0))
        return one.getsockname()[1], other.getsockname()[1]
