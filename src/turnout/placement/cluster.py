"""Where the processes of a run lie: one interface for this machine and for a Ray cluster (ray_cluster.py).

Promises: `start` runs a starter on the machine that the name has a place on, and returns what it started and what
it told of it; whatever ends there, the process, what watches it or its machine, is told as the end of that process;
after `close` nothing of the run is left anywhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from turnout.core.errors import DeadlineExceeded
from turnout.core.ports import Clock

LOOPBACK = "127.0.0.1"


class Process(Protocol):
    """What a run asks of the process of an engine (turnout.placement.processes.ChildProcess)."""

    @property
    def pid(self) -> int | None:
        """On its own machine. None: a process that is not ours."""
        ...

    @property
    def alive(self) -> bool: ...

    @property
    def state(self) -> str:
        """The letter of proc(5); empty where nothing is known."""
        ...

    async def ended(self) -> str: ...

    def kill(self) -> None:
        """SIGKILL to its group, from any thread; it is reaped by `stop`."""
        ...

    async def stop(self, grace_s: float) -> None: ...


# Runs where the process is to be: the address that it should serve at, and that machine's clock. What it returns
# besides the process is plain data: it travels. It raises EngineError, ConfigError or DeadlineExceeded.
Told = dict[str, Any]
Starter = Callable[[str, Clock], Awaitable[tuple[Process, Told]]]


@dataclass(frozen=True)
class Place:
    """What the process of this name needs: `devices` on one machine, GPUs or processes. `shared` by these names,
    with a device each, it is a place for several processes."""

    name: str
    devices: int = 1
    gpus: bool = False
    shared: tuple[str, ...] = ()


class Cluster(Protocol):
    @property
    def here(self) -> str:
        """The address at which what it starts reaches this process. Known once it is open."""
        ...

    async def open(self) -> None:
        """Takes the places of the run. Raises ConfigError where they can't be had."""
        ...

    async def start(self, place: Place, starter: Starter, deadline_s: float) -> tuple[Process, Told]:
        """Raises what the starter raises, and EngineError where it could not run."""
        ...

    async def close(self) -> list[str]:
        """What is left."""
        ...


class ThisMachine:
    """All processes are children of this one, and serve on loopback."""

    here = LOOPBACK

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def open(self) -> None:
        """There is nothing to take."""

    async def start(self, place: Place, starter: Starter, deadline_s: float) -> tuple[Process, Told]:
        del place, deadline_s  # the starter has its own deadline
        return await starter(LOOPBACK, self._clock)

    async def close(self) -> list[str]:
        """Processes are stopped one by one."""
        return []


async def closed(cluster: Cluster) -> list[str]:
    """Closes it; what is left of it."""
    try:
        return await cluster.close()
    except (DeadlineExceeded, OSError, RuntimeError) as fault:
        return [str(fault)]
