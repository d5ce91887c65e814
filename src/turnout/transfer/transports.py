"""The transport of a name of --update-weight-transport. torch is imported only where one needs it."""

from __future__ import annotations

from turnout.core.ports import Clock
from turnout.transfer.disk import DiskTransport
from turnout.transfer.updater import Transport
from turnout.weights.store import WeightStore


def make_transport(
    name: str, store: WeightStore, clock: Clock, bucket_bytes: int, keep_all: bool
) -> Transport:
    """disk, tensor or group; `keep_all` keeps every version's folder, where there are folders."""
    if name == "disk":
        return DiskTransport(store, clock, keep_all)
    if name == "tensor":
        from turnout.transfer.tensor import TensorTransport  # noqa: PLC0415

        return TensorTransport(store, clock, bucket_bytes)
    from turnout.transfer.group import GroupTransport  # noqa: PLC0415

    return GroupTransport(store, clock, bucket_bytes)
