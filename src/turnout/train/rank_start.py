"""One rank of the trainer, on the machine where it is to be: what turnout.train.rank_launch hands to the cluster.

Promises: the rank is a child of this process with its own log, and ends with it; where the controller is elsewhere,
the folders that both write were seen from here, and written to, before anything is started.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from turnout.core.errors import ConfigError, DeadlineExceeded, Fault
from turnout.core.ports import Clock
from turnout.placement.cluster import Process, Told
from turnout.placement.devices import VISIBLE, visible_gpus
from turnout.placement.processes import ChildProcess, child_environment
from turnout.protocol.folder_probe import probe_file
from turnout.train.rank import TOKEN_VARIABLE

LATE_S = 10.0  # a network file system may show a new file this late
POLL_S = 0.1
Shared = tuple[tuple[str, Path], ...]  # option and folder


@dataclass(frozen=True)
class RankStart:
    """`controller`: address and port to connect to; `folder` takes the log. `device`: "cpu:1" or "cuda:1", of this
    machine; empty: what it has for whoever starts the rank. `shared`: folders with a file that `probe` names; empty
    for a rank beside its controller."""

    rank: int
    controller: tuple[str, int]
    token: str
    threads: int
    folder: Path
    device: str
    shared: Shared = ()
    probe: str = ""


async def start_rank(start: RankStart, host: str, clock: Clock) -> tuple[Process, Told]:
    """Tells the rank's `name`, for people, and its `host`. Raises ConfigError where a folder is not shared."""
    await _sees(start, host, clock)
    device = start.device or _given(start.rank)
    name = f"trainer rank {start.rank} ({device}{'' if start.device else f' of {host}'})"
    environment = child_environment(start.threads, {TOKEN_VARIABLE: start.token, **_visible(start.device)})
    log = log_of(start.folder, start.rank)
    return await ChildProcess.start(name, command_of(start, host), environment, log, clock), {
        "name": name,
        "host": host,
    }


def command_of(start: RankStart, host: str) -> list[str]:
    address, port = start.controller
    words = [
        "--rank",
        start.rank,
        "--controller",
        f"{address}:{port}",
        "--folder",
        start.folder,
        "--host",
        host,
    ]
    words += ["--give-back"] if start.rank == 0 and start.probe else []
    return [sys.executable, "-m", "turnout.train.rank", *map(str, words), "--parent-pid", str(os.getpid())]


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def answer_file(folder: Path, probe: str, rank: int) -> Path:
    """Written by the rank's machine, read by the controller."""
    return probe_file(folder, f"{probe}-{rank}")


async def appears(path: Path, clock: Clock) -> bool:
    """Whether a file that another machine writes shows here within LATE_S."""

    async def poll() -> None:
        while not path.exists():
            await clock.sleep(POLL_S)

    try:
        await clock.within(LATE_S, path.name, poll())
    except DeadlineExceeded:
        return False
    return True


def not_shared(option: str, folder: Path, host: str, why: str) -> Fault:
    """`why`: what was found; the rest of it is the same both ways."""
    reason = f"is not shared with the trainer's node {host}: {why}"
    return Fault(option, str(folder), reason, "put it on a file system that all nodes mount under this path")


async def _sees(start: RankStart, host: str, clock: Clock) -> None:
    faults: list[Fault] = []
    for option, folder in start.shared:
        if not await appears(probe_file(folder, start.probe), clock):
            why = "a file that the controller wrote does not show there"
        else:
            try:
                answer_file(folder, start.probe, start.rank).touch()
                continue
            except OSError as fault:
                why = f"nothing can be written there: {fault.strerror}"
        faults.append(not_shared(option, folder, host, why))
    if faults:
        raise ConfigError(faults)


def _given(rank: int) -> str:
    """VISIBLE has what the cluster gives."""
    return f"cuda:{os.environ.get(VISIBLE, '')}" if visible_gpus() else f"cpu:{rank}"


def _visible(device: str) -> dict[str, str]:
    """A rank sees its own device only, as the first one."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return {VISIBLE: ""} if kind else {}
    named = os.environ.get(VISIBLE)
    return {VISIBLE: index if named is None else named.split(",")[int(index)].strip()}
