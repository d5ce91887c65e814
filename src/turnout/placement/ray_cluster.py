"""A run's processes on the nodes of a Ray cluster: a placement group, and an actor beside each process.

A place of the run is a bundle of the group, so the devices of an engine lie on one node, and so do the ranks of
one node of the trainer, each with an actor; bundles of one size go to the places by the number of their nodes.
Promises: what can't be placed is refused within a deadline, with what was asked and what the cluster has; the end
of a process, of its actor and of its node are all told as the end of that process; after the loss of a node Ray
moves its bundles to others, where the next start goes. A name without a bundle gets a group of its own until it
stops. Actors and groups belong to this driver: Ray removes them with it, however it ends. Without an address a
cluster of one node is started, and ended with this process.

Checked against Ray 2.60. Starters and what they tell travel as pickles, inside the cluster's own trust.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from turnout.core.errors import ConfigError, DeadlineExceeded, EngineError, Fault
from turnout.core.ports import Clock
from turnout.placement.call_threads import CallThreads
from turnout.placement.cluster import Place, Process, Starter, Told
from turnout.placement.devices import VISIBLE
from turnout.placement.processes import ChildProcess, child_environment
from turnout.placement.ray_actor import Failed, NodeProcess
from turnout.placement.ray_bundles import (
    Group,
    asked,
    groups,
    in_order,
    members,
    resources,
    there,
    trainer_places,
)
from turnout.placement.ray_node import ADDRESS
from turnout.placement.tasks import first

log = logging.getLogger(__name__)
ADDRESS_VARIABLE = "RAY_ADDRESS"
CALL_S, POLL_S, STOP_S = 60.0, 0.1, 15.0
MARGIN_S = 15.0  # a starter has a deadline of its own
Bundle = tuple[Any, int, Place]  # of a process: a placement group, the number there, what it takes of that
INSTALL = "pip install 'turnout[ray]'"


@dataclass(frozen=True)
class RayPlan:
    """`address`: of the cluster, None: RAY_ADDRESS, else one of our own, with `cpus`; `run`: names groups and the
    namespace; `places` in the order of the engines; `trainer`: its nodes and the ranks on each, which have a GPU
    each where the cluster has any; `deadline_s`: until a place is had; `folder` takes a log."""

    address: str | None
    run: str
    places: tuple[Place, ...]
    deadline_s: float
    folder: Path
    cpus: int
    trainer: tuple[int, int] = (0, 0)


class RayCluster:
    """See the module; a turnout.placement.cluster.Cluster."""

    def __init__(self, plan: RayPlan, clock: Clock) -> None:
        self._plan, self.clock = plan, clock
        self._threads = CallThreads("turnout-ray")
        self._head: ChildProcess | None = None
        self._ray: Any = None
        self._bundles: dict[str, Bundle] = {}
        self._here = ""

    async def open(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(Fault("--cluster", "ray", "Ray is not installed", INSTALL))
        given = self._plan.address if self._plan.address is not None else os.environ.get(ADDRESS_VARIABLE)
        address = given or await self._started()
        ray = importlib.import_module("ray")
        connect = partial(
            ray.init, address=address, namespace=self._plan.run, log_to_driver=False, configure_logging=False
        )
        try:
            # not on the main thread, where it would take Python's handler of SIGTERM
            await self._call(f"the Ray cluster at {address}", connect)
        except (
            ConnectionError,
            RuntimeError,
            ValueError,
            DeadlineExceeded,
            ray.exceptions.RayError,
        ) as fault:
            reason = f"can't be connected to: {_line(fault)}"
            raise ConfigError(Fault("--ray-address", address, reason, "see `ray status` there")) from fault
        signal.signal(
            signal.SIGTERM, signal.getsignal(signal.SIGTERM)
        )  # its library has put one before Python's
        self._ray = ray
        self._here = await self._call("the address of this node", ray.util.get_node_ip_address)
        trainer = trainer_places(
            *self._plan.trainer, gpus=self._plan.trainer[0] > 0 and await self._has_gpus()
        )
        for group in groups(self._plan.run, trainer, self._plan.places):
            await self._placed(group)

    async def start(self, place: Place, starter: Starter, deadline_s: float) -> tuple[Process, Told]:
        group = None  # of its own
        if place.name not in self._bundles:
            group = await self._placed(Group(f"turnout-{self._plan.run}-{place.name}", (place,)))
        actor = self._actor(place.name)
        what = f"a node for {place.name}"
        try:
            node = await self.clock.within(self._plan.deadline_s, what, _answer(actor.where.remote()))
            started = _answer(actor.start.remote(starter))
            came = await self.clock.within(deadline_s + MARGIN_S, f"{place.name} to start", started)
            if isinstance(came, Failed):
                if came.faults:
                    raise ConfigError(came.faults)
                raise EngineError(place.name, "start", "none", f"node {node}: {came.reason}")
        except BaseException as fault:
            await self.removed(place.name, actor, group)
            if isinstance(fault, self._ray.exceptions.RayError | DeadlineExceeded):
                raise EngineError(place.name, "start", "none", _line(fault)) from fault
            raise
        log.info("%s runs on node %s as process %s", place.name, node, came[0])
        return RayProcess(self, place.name, (actor, node, group), came[0]), came[1]

    async def close(self) -> list[str]:
        left: list[str] = []
        try:
            for group in {id(group): group for group, _, _ in self._bundles.values()}.values():
                left += await self._ends(
                    "a group to be removed", partial(self._ray.util.remove_placement_group, group)
                )
            if self._ray is not None:
                left += await self._ends("Ray to let go", self._ray.shutdown)
            return left
        finally:
            self._bundles, self._ray = {}, None
            self._threads.close()
            if self._head is not None:
                await self._head.stop(STOP_S)

    def _actor(self, name: str) -> Any:
        group, index, place = self._bundles[name]
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        where = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        need = resources(place)
        options = {"num_cpus": need["CPU"], "num_gpus": need.get("GPU", 0), "scheduling_strategy": where}
        return self._ray.remote(NodeProcess).options(**options).remote(str(Path.cwd()))

    async def _placed(self, wanted: Group) -> Any:
        """A placement group that stands, with the bundles of its processes noted. Raises ConfigError where it
        can't be had, EngineError where Ray does not answer."""
        util, name, bundles = self._ray.util, wanted.name, [resources(place) for place in wanted.places]
        create, group = partial(util.placement_group, bundles, strategy=wanted.strategy, name=name), None
        try:
            group = await self._call(name, create)
            for place, index in zip(wanted.places, await self._order(wanted, group), strict=True):
                self._bundles |= {one.name: (group, index, one) for one in members(place)}
            return group
        except BaseException as fault:
            if group is not None:
                await self._ends(f"{name} to be removed", partial(util.remove_placement_group, group))
            if isinstance(fault, self._ray.exceptions.RayError | DeadlineExceeded):
                raise EngineError(name, "start", "none", _line(fault)) from fault
            raise

    async def _order(self, wanted: Group, group: Any) -> list[int]:
        """Waits until the group stands; the bundle of each place."""
        name, places = wanted.name, wanted.places
        table = partial(self._ray.util.placement_group_table, group)

        async def stands() -> dict[str, Any]:
            while (told := await self._call(name, table))["state"] != "CREATED":
                await self.clock.sleep(POLL_S)
            return told

        try:
            told = await self.clock.within(self._plan.deadline_s, f"placement group {name}", stands())
        except DeadlineExceeded as fault:
            apart = ", each on a node of its own" if wanted.strategy == "STRICT_SPREAD" else ""
            need = asked(map(resources, places)) + apart
            reason = f"{fault}: it asks for {need}; the cluster has {await self._has()}"
            raise ConfigError(Fault("--cluster", "ray", reason, "ask for less, or add nodes")) from fault
        nodes = {
            node["NodeID"]: node["NodeManagerAddress"]
            for node in await self._call("its nodes", self._ray.nodes)
        }
        lies = {int(at): (nodes[node], node) for at, node in told["bundles_to_node_id"].items()}
        return in_order(places, lies)

    @property
    def here(self) -> str:
        return self._here

    async def _has_gpus(self) -> bool:
        """Whether the trainer's ranks have GPUs: not where this process should see none."""
        found = await self._call("the resources of the cluster", self._ray.cluster_resources)
        return found.get("GPU", 0) > 0 and os.environ.get(VISIBLE) != ""

    async def _has(self) -> str:
        return there(await self._call("the nodes of the cluster", self._ray.nodes))

    async def removed(self, name: str, actor: Any, group: Any) -> None:
        """Ends an actor with its process, and gives back the group of its own (None: it has none), as far as Ray
        answers: what it keeps ends with this driver. Again it does no harm."""
        await self._ends(f"the actor of {name} to be ended", partial(self._ray.kill, actor))
        if group is not None:
            if name in self._bundles and self._bundles[name][0] is group:  # not that of its next life
                del self._bundles[name]
            await self._ends(f"the bundle of {name}", partial(self._ray.util.remove_placement_group, group))

    async def _ends(self, what: str, work: Callable[[], Any]) -> list[str]:
        """Has Ray end something; why it did not, which is told and keeps nothing else from its end."""
        try:
            await self._call(what, work)
        except (self._ray.exceptions.RayError, DeadlineExceeded, OSError, RuntimeError) as fault:
            log.warning("%s: %s", what, _line(fault))
            return [f"{what}: {_line(fault)}"]
        return []

    async def _call(self, what: str, work: Callable[[], Any]) -> Any:
        """A call of Ray that blocks, on a thread."""
        return await self._threads.within(self.clock, CALL_S, what, work)

    async def _started(self) -> str:
        """The address of a cluster of our own."""
        temporary = Path(tempfile.mkdtemp(prefix="turnout-"))  # its path is short: sockets lie in it
        # Ray reads these once, when it is imported, here and there: a later cluster of this process has the same
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        guard = (sys.executable, "-m", "turnout.placement.guard", "--parent-pid", str(os.getpid()))
        node = (sys.executable, "-m", "turnout.placement.ray_node", "--cpus", str(self._plan.cpus))
        command = (*guard, "--temporary", str(temporary), "--", *node, "--temporary", str(temporary))
        environment = child_environment(1, {"RAY_USAGE_STATS_ENABLED": "0"})
        log_file, ready = self._plan.folder / "ray.log", temporary / ADDRESS
        self._head = head = await ChildProcess.start("Ray", command, environment, log_file, self.clock)

        async def answers() -> None:
            while not ready.exists():
                await self.clock.sleep(POLL_S)

        async def dies() -> None:
            raise ConfigError(Fault("--cluster", "ray", await head.ended(), f"see {log_file}"))

        await first(self.clock.within(CALL_S, "a Ray cluster of this machine", answers()), dies())
        return ready.read_text()


class RayProcess:
    """A process on a node of the cluster; used as a ChildProcess. `beside`: its actor, the address of the node, and
    the group of its own (None: its bundle is one of the run's)."""

    state = ""  # known to the kernel of another machine

    def __init__(self, cluster: RayCluster, name: str, beside: tuple[Any, str, Any], pid: int | None) -> None:
        self.pid, self._cluster, self._name = pid, cluster, name
        self._actor, self._node, self._group = beside
        self._gone = asyncio.Event()  # there is no actor to ask
        self._end = asyncio.ensure_future(self._ended())

    @property
    def alive(self) -> bool:
        return not self._end.done()

    async def ended(self) -> str:
        """Waits for the end of the process, its actor or its node."""
        return await asyncio.shield(self._end)

    async def _ended(self) -> str:
        try:
            return f"node {self._node}: {await self._actor.ended.remote()}"
        except importlib.import_module("ray.exceptions").RayError as fault:
            self._gone.set()
            return f"node {self._node}: the actor of {self._name} is gone: {_line(fault)}"

    def kill(self) -> None:
        """As ChildProcess.kill, there."""
        if not self._gone.is_set():
            self._actor.kill.remote()

    async def stop(self, grace_s: float) -> None:
        """As ChildProcess.stop, there; then the actor is ended, and with it what still lives."""
        clock, errors = self._cluster.clock, importlib.import_module("ray.exceptions")
        with contextlib.suppress(errors.RayError, DeadlineExceeded):
            if not self._gone.is_set():  # Ray takes its time to give up a call to a node that is lost
                stopped = first(_answer(self._actor.stop.remote(grace_s)), self._gone.wait())
                await clock.within(grace_s + STOP_S, f"{self._name} to stop", stopped)
        await self._cluster.removed(self._name, self._actor, self._group)
        with contextlib.suppress(DeadlineExceeded):
            await clock.within(STOP_S, f"the actor of {self._name} to end", self.ended())


async def _answer(reference: Any) -> Any:
    """What an actor answers; raises RayError where it can't."""
    return await reference


def _line(fault: BaseException) -> str:
    """Ray's texts are of many lines; the first ones that say something."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return f"{type(fault).__name__}: {' '.join(lines[:2])[:300]}"
