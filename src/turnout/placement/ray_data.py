"""Rollout data in the object store of a Ray cluster: put once by the controller, mapped by every rank that reads.

A handle names the cluster, the run's namespace there, an actor and the data. References can't travel in a control
message, so the actor hands them out; it needs no resources and lies on the controller's node, so the loss of
another one is nothing to it. Promises: what was put stays until it is dropped, or the actor or the controller
ends; where the actor has ended, the next data get a new one; the bytes are in the store once on each node, and a
reader on that node gets a view of them.
"""

from __future__ import annotations

import importlib
import logging
from itertools import count
from typing import Any

import numpy as np

from turnout.core.errors import TrainError

log = logging.getLogger(__name__)
KEEPER = "rollout-data"
CALL_S = 60.0


class Keeper:
    """The actor. A reference in a list is not looked up on its way."""

    def __init__(self) -> None:
        self._held: dict[str, list[Any]] = {}

    def hold(self, key: str, reference: list[Any]) -> None:
        self._held[key] = reference

    def get(self, key: str) -> list[Any]:
        return self._held[key]

    def drop(self, key: str) -> None:
        self._held.pop(key, None)


class ObjectStoreData:
    """`object-store`: the controller's half, a turnout.train.data_transport.DataTransport. It is connected to the
    cluster before anything is put (turnout.placement.ray_cluster)."""

    def __init__(self) -> None:
        self._keeper: Any = None
        self._name = ""
        self._keys = count()

    def put(self, data: bytes) -> str:
        try:
            return self._put(data)
        except _ray().exceptions.RayActorError as fault:
            log.warning("what handed out the rollout data is gone, another does it now: %s", fault)
            self._keeper = None
            return self._put(data, last=True)

    def _put(self, data: bytes, last: bool = False) -> str:
        ray, key = _ray(), str(next(self._keys))
        try:
            if self._keeper is None:
                self._name = f"{KEEPER}-{key}"  # the name of one that is gone may be taken for a while
                self._keeper = self._new(ray, self._name)
            reference = ray.put(np.frombuffer(data, np.uint8))
            ray.get(self._keeper.hold.remote(key, [reference]), timeout=CALL_S)
        except ray.exceptions.RayError as fault:
            if isinstance(fault, ray.exceptions.RayActorError) and not last:
                raise
            reason = (
                f"{len(data)} bytes of rollout data in Ray's object store: {type(fault).__name__}: {fault}"
            )
            raise TrainError(reason) from fault
        context = ray.get_runtime_context()
        return f"ray:{context.gcs_address}/{context.namespace}/{self._name}/{key}"

    def _new(self, ray: Any, name: str) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        here = ray.get_runtime_context().get_node_id()
        where = strategies.NodeAffinitySchedulingStrategy(node_id=here, soft=False)
        return ray.remote(Keeper).options(name=name, num_cpus=0, scheduling_strategy=where).remote()

    def drop(self, handle: str) -> None:
        """Where its actor is gone, so are the data."""
        ray = _ray()
        try:
            ray.get(self._keeper.drop.remote(handle.rpartition("/")[2]), timeout=CALL_S)
        except ray.exceptions.RayError as fault:
            log.warning("%s is not dropped: %s: %s", handle, type(fault).__name__, fault)


def read(rest: str) -> memoryview:
    """In a rank, which becomes a client of the cluster at its first call: what is under the handle `ray:<rest>`."""
    ray = _ray()
    address, namespace, keeper, key = rest.split("/")
    if not ray.is_initialized():
        ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
        log.info("rollout data come from the object store of the Ray cluster at %s", address)
    [reference] = ray.get(ray.get_actor(keeper).get.remote(key), timeout=CALL_S)
    return memoryview(ray.get(reference, timeout=CALL_S))


def _ray() -> Any:
    return importlib.import_module("ray")
