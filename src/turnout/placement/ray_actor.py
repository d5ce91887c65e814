"""The actor beside one process of a run, on a node of a Ray cluster (turnout.placement.ray_cluster).

Promises: the process is this worker's child, so it ends with the actor, by whatever that ends; what a starter
raises comes back as data. Nothing here imports Ray before it runs there.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from dataclasses import dataclass

from turnout.core.errors import ConfigError, DeadlineExceeded, EngineError, Fault
from turnout.placement.cluster import Process, Starter, Told
from turnout.placement.devices import VISIBLE
from turnout.placement.real import RealClock


@dataclass(frozen=True)
class Failed:
    """Why a starter started nothing; `faults` are what a user can mend."""

    reason: str
    faults: tuple[Fault, ...] = ()


class NodeProcess:
    """The actor. `folder`: the working directory of the driver, taken where this node has it. What is started here
    sees the GPUs that Ray gave the actor."""

    def __init__(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
        ray = importlib.import_module("ray")
        os.environ[VISIBLE] = ",".join(map(str, ray.get_gpu_ids()))  # Ray hides none from who asks for none
        self._process: Process | None = None

    async def where(self) -> str:
        """The address of this node, for the others of the cluster."""
        return importlib.import_module("ray.util").get_node_ip_address()

    async def start(self, starter: Starter) -> tuple[int | None, Told] | Failed:
        try:
            self._process, told = await starter(await self.where(), RealClock())
        except ConfigError as fault:
            return Failed(str(fault), fault.faults)
        except EngineError as fault:
            return Failed(fault.reason)
        except (DeadlineExceeded, OSError) as fault:
            return Failed(str(fault))
        return self._process.pid, told

    async def ended(self) -> str:
        assert self._process is not None, "asked once it has started"
        return await self._process.ended()

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def stop(self, grace_s: float) -> None:
        if self._process is not None:
            await self._process.stop(grace_s)
