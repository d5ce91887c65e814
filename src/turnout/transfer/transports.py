"""The transport of a pair of --update-weight-mode and --update-weight-transport. torch is imported only where one
needs it."""

from __future__ import annotations

from dataclasses import dataclass

from turnout.core.ports import Clock
from turnout.serving.weights_client import OnUpdate
from turnout.transfer.delta_base import DeltaBase
from turnout.transfer.delta_disk import DeltaDiskTransport
from turnout.transfer.disk import DiskTransport
from turnout.transfer.equal import EqualityChecked
from turnout.transfer.stream import StreamTransport
from turnout.transfer.transport import Transport
from turnout.weights.store import WeightStore

ON_DISK = ("disk", "follower")  # the engines of the one are told to load it, those of the other come to it


@dataclass(frozen=True)
class TransportPlan:
    """`way` is disk, tensor, group, checkpoint-engine or follower; `keep_all` keeps every version's folder, where
    there are folders; `encoding` is that of deltas on disk; `check_equal` compares live tensors after every update;
    `on_update` says what an update does to requests in flight."""

    way: str
    bucket_bytes: int
    keep_all: bool
    encoding: str
    check_equal: bool
    on_update: OnUpdate = OnUpdate.DRAIN


def make_transport(
    plan: TransportPlan, store: WeightStore, clock: Clock, base: DeltaBase | None
) -> Transport:
    """Of deltas against `base`, of full versions where it is None."""
    made = _full(plan, store, clock) if base is None else _delta(plan, store, clock, base)
    made.on_update = plan.on_update
    return EqualityChecked(made, clock) if plan.check_equal else made


def _full(plan: TransportPlan, store: WeightStore, clock: Clock) -> DiskTransport | StreamTransport:
    if plan.way in ON_DISK:
        return DiskTransport(store, clock, plan.keep_all)
    if plan.way == "tensor":
        from turnout.transfer.tensor import TensorTransport  # noqa: PLC0415

        return TensorTransport(store, clock, plan.bucket_bytes)
    if plan.way == "checkpoint-engine":
        from turnout.transfer.checkpoint_engine import CheckpointEngineTransport  # noqa: PLC0415

        return CheckpointEngineTransport(store, clock, plan.bucket_bytes)
    from turnout.transfer.group import GroupTransport  # noqa: PLC0415

    return GroupTransport(store, clock, plan.bucket_bytes)


def _delta(
    plan: TransportPlan, store: WeightStore, clock: Clock, base: DeltaBase
) -> DiskTransport | StreamTransport:
    if plan.way in ON_DISK:
        return DeltaDiskTransport(store, clock, base, plan.encoding, plan.keep_all)
    from turnout.transfer.delta_group import DeltaGroupTransport  # noqa: PLC0415

    return DeltaGroupTransport(store, clock, plan.bucket_bytes, base)
