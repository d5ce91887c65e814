"""Starts a stock SGLang server as a process tree of its own and waits until it generates.

Promises: the engine is either generating when `launch_sglang` returns, or stopped and explained with the end of its
log; it listens on loopback, in a cluster on its node's address there, and nowhere else; none of its processes,
sockets or segments in shared memory outlives `stop` or this process (turnout.placement.guard); a key reaches it by
a private file, never by a command line. Checked against SGLang 0.5.23; see docs/sglang.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from turnout.core.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineBusy,
    EngineDead,
    EngineError,
    Fault,
)
from turnout.core.ports import Clock
from turnout.placement.cluster import LOOPBACK, Cluster, Place, Process, ThisMachine, Told
from turnout.placement.processes import ChildProcess, child_environment
from turnout.placement.tasks import first
from turnout.serving.access import Access
from turnout.serving.address import Address
from turnout.serving.launcher import Engine
from turnout.serving.ports import on_a_free_port
from turnout.serving.sglang_client import SglangClient
from turnout.weights.stock_checksums import stock_of

POLL_S = 0.5
PROBE_S = 25.0  # /health_generate itself waits 20 s for a token
STOP_GRACE_S = 20.0  # the guard kills at once; this is for a machine under load
LOG_LINES = 12
FIND = "import importlib.util as u, sys; sys.exit(u.find_spec('sglang') is None)"
FIND_DEADLINE_S = 60.0
TAKEN = "address already in use"

# A CPU without SGLang's compiled kernels: attention in PyTorch, no graphs.
CPU_ARGUMENTS = {
    "attention-backend": "torch_native",
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
    "mem-fraction-static": 0.1,
}


@dataclass(frozen=True)
class SglangLaunch:
    """What to start. `python` is an interpreter that has SGLang; `arguments` are further options of
    `sglang.launch_server` by name without dashes, true for a switch, a list for several words, and win over what
    is chosen here; `folder` takes the log; `key` is asked of control calls."""

    engine_id: str
    python: Path
    model: Path
    dtype: str
    folder: Path
    start_deadline_s: float
    device: str = "cuda"
    threads: int = 1
    arguments: Mapping[str, object] = field(default_factory=dict)
    key: str | None = None
    ranks: int = 1
    host: str = LOOPBACK


class SglangEngine(Engine):
    """A running SGLang server: its guard and its client."""

    async def stop(self) -> None:
        await self.client.close()
        await self.process.stop(STOP_GRACE_S)


def server_arguments(spec: SglangLaunch, port: int) -> list[str]:
    """The words after `python -m sglang.launch_server`; the key isn't among them."""
    chosen: dict[str, object] = {
        "model-path": spec.model,
        "host": spec.host,
        "port": port,
        "dtype": spec.dtype,
        "device": spec.device,
        **(CPU_ARGUMENTS if spec.device == "cpu" else {}),
        **{name.replace("_", "-"): value for name, value in spec.arguments.items()},
    }
    words: list[str] = []
    for name, value in chosen.items():
        if value is False or value is None:
            continue
        words.append(f"--{name}")
        if value is not True:
            values = value if isinstance(value, list) else [value]
            words += [json.dumps(one) if isinstance(one, dict) else str(one) for one in values]
    return words


def server_environment(spec: SglangLaunch) -> dict[str, str]:
    """/health asks no generation: while generation is paused for an update such a probe would hang. A scheduler
    that hangs is ended by SGLang's own watchdog, which ends the process."""
    extra = {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if spec.device == "cpu":
        extra["SGLANG_USE_CPU_ENGINE"] = "1"
    return child_environment(spec.threads, extra)


async def find_sglang(python: Path, clock: Clock) -> None:
    """Raises ConfigError where `python` can't be run or has no SGLang."""
    remedy = "give --sglang-python the interpreter of an environment that has it"
    try:
        process = await asyncio.create_subprocess_exec(
            str(python), "-c", FIND, stdin=asyncio.subprocess.DEVNULL, env=child_environment(1)
        )
    except OSError as fault:
        raise ConfigError(Fault("--sglang-python", str(python), f"can't be run: {fault}", remedy)) from fault
    try:
        code = await clock.within(FIND_DEADLINE_S, f"{python} to say whether it has SGLang", process.wait())
    except DeadlineExceeded:
        process.kill()
        raise
    if code != 0:
        raise ConfigError(Fault("--sglang-python", str(python), "has no package sglang", remedy))


async def launch_sglang(spec: SglangLaunch, clock: Clock, cluster: Cluster | None = None) -> SglangEngine:
    """Starts the server, here or where the cluster has a place for it; raises ConfigError, EngineDead or
    EngineError, with nothing left running, where it can't serve."""
    cluster = ThisMachine(clock) if cluster is None else cluster
    place = Place(spec.engine_id, spec.ranks, gpus=spec.device == "cuda")
    process, told = await cluster.start(place, partial(serve_sglang, spec), spec.start_deadline_s)
    client = _client(replace(spec, host=told["host"]), told["port"], clock)
    client.bootstrap_port = told["bootstrap"]
    return SglangEngine(process, client)


def _client(spec: SglangLaunch, port: int, clock: Clock) -> SglangClient:
    client = SglangClient(spec.engine_id, Address(spec.host, port), clock, Access(admin_key=spec.key))
    client.stock = stock_of(spec.dtype, spec.device)
    return client


async def serve_sglang(spec: SglangLaunch, host: str, clock: Clock) -> tuple[Process, Told]:
    """Starts the server on this machine and waits for it; where it listens. A port that somebody else took between
    its choice and its use is chosen anew."""
    await find_sglang(spec.python, clock)
    served = partial(_served, replace(spec, host=host), clock)
    return await on_a_free_port(served, lambda reason: TAKEN in reason.lower())


async def _served(spec: SglangLaunch, clock: Clock) -> tuple[Process, Told]:
    host = spec.host
    port, bootstrap = _free_port(host), None
    if spec.arguments.get("disaggregation-mode") == "prefill":
        bootstrap = _free_port(host)
        spec = replace(spec, arguments={**spec.arguments, "disaggregation-bootstrap-port": bootstrap})
    temporary = Path(tempfile.mkdtemp(prefix="turnout-"))  # its path is short: sockets lie in it
    guard = (sys.executable, "-m", "turnout.placement.guard")
    words = [*server_arguments(spec, port), *_key_file(spec, temporary)]
    command = (
        *guard, "--parent-pid", str(os.getpid()), "--temporary", str(temporary), "--",
        str(spec.python), "-m", "sglang.launch_server", *words,
    )  # fmt: skip
    log = spec.folder / f"{spec.engine_id}.log"
    process = await ChildProcess.start(
        f"engine {spec.engine_id}", command, server_environment(spec), log, clock
    )
    client = _client(spec, port, clock)
    try:
        await _generates(process, client, spec, clock)
    except BaseException:
        await process.stop(STOP_GRACE_S)
        raise
    finally:
        await client.close()
    return process, {"host": host, "port": port, "bootstrap": bootstrap}


async def _generates(process: ChildProcess, client: SglangClient, spec: SglangLaunch, clock: Clock) -> None:
    """Returns when the server has generated a token; raises when its process ends or the deadline passes."""

    async def poll() -> None:
        while True:
            with contextlib.suppress(EngineDead, EngineBusy):  # it doesn't listen yet, or still loads
                return await client.generates(PROBE_S)
            await clock.sleep(POLL_S)

    async def dies() -> None:
        how = f"{await process.ended()}\n{log_tail(process.log)}"
        raise EngineDead(spec.engine_id, "start", "none", how)

    try:
        await first(clock.within(spec.start_deadline_s, "it to generate", poll()), dies())
    except DeadlineExceeded as fault:
        how = f"{fault}; its log {process.log} ends:\n{log_tail(process.log)}"
        raise EngineError(spec.engine_id, "start", "none", how) from fault


def log_tail(log: Path) -> str:
    """The last lines of a log that tell something: the last error with what follows, else the end."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line[:300] for line in lines if line.strip() and not line.startswith((" - leaked", "nanobind"))]
    errors = [at for at, line in enumerate(lines) if "Error" in line.split(":")[0]]
    start = max(0, errors[-1] - 1) if errors else max(0, len(lines) - LOG_LINES)
    return "\n".join(f"  {line}" for line in lines[start : start + LOG_LINES])


def _key_file(spec: SglangLaunch, temporary: Path) -> list[str]:
    if spec.key is None:
        return []
    path = temporary / "server.yaml"
    path.touch(mode=0o600)
    path.write_text(f"admin-api-key: {json.dumps(spec.key)}\n", encoding="utf-8")
    return ["--config", str(path)]


def _free_port(host: str) -> int:
    """A port that was free a moment ago; SGLang can't be handed a bound socket."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
