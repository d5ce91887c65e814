"""Broadcast groups that weights come through: this engine is one rank, the trainer is rank 0.

A group is a Gloo backend over a TCP store of the trainer, made directly: torch's default group is not needed,
so there may be several. The keys in the store are those of SGLang 0.5.23 and torch's own constructor, so either
end may be theirs. Promises: joining and receiving block the calling thread at most for the deadline; a group
whose sender died or was late is left at once and named in the error, since its ranks no longer agree.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.engine.gloo import gloo_end, group_store
from turnout.placement.route import own_address
from turnout.weights.buckets import Slot
from turnout.weights.delta_bucket import Part

log = logging.getLogger(__name__)
GROUPS_MAX = 8


@dataclass(frozen=True)
class Membership:
    """Where a group meets and which rank this process has in it. `rank` is in [1, world_size); `ranks` (ours): how
    many of this engine's ranks join, one after another from there; `timeout_s` (ours): how long the caller
    waits."""

    name: str
    host: str
    port: int
    rank: int
    world_size: int
    ranks: int = 1
    timeout_s: float | None = None


class UpdateGroups:
    """The groups that this engine is in. Its methods block: called from worker threads, one at a time."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}  # ProcessGroupGloo; torch's stubs know no methods of it

    def join(self, member: Membership, deadline_s: float) -> None:
        """Meets the other ranks; raises WeightError where that fails or the name is taken."""
        if member.name in self._groups:
            raise WeightError(f"this engine is in the group {member.name} already; destroy it first")
        if len(self._groups) >= GROUPS_MAX:
            raise WeightError(f"this engine is in {GROUPS_MAX} groups already")
        limit = timedelta(seconds=deadline_s)
        try:
            store = dist.TCPStore(
                member.host, member.port, member.world_size, False, limit, wait_for_workers=False
            )
            place, host = (member.rank, member.world_size), own_address(member.host)
            backend = gloo_end(group_store(store, member.name), place, host, limit)
        except (RuntimeError, ValueError) as fault:
            where = f"{member.host}:{member.port}"
            raise WeightError(f"group {member.name} at {where} did not come together: {fault}") from fault
        self._groups[member.name] = backend
        log.info("joined group %s as rank %d of %d", member.name, member.rank, member.world_size)

    def leave(self, name: str) -> None:
        """Raises WeightError for an unknown name."""
        if name not in self._groups:
            raise WeightError(f"this engine is in no group {name}; it is in {sorted(self._groups)}")
        del self._groups[name]  # the backend closes its connections when it goes

    @property
    def names(self) -> list[str]:
        """Those that this process is in."""
        return list(self._groups)

    def check(self, name: str) -> None:
        """Raises WeightError where `receive` could only fail."""
        if name not in self._groups:
            raise WeightError(f"this engine is in no group {name}; call /init_weights_update_group first")

    def receive(
        self, name: str, slots: Sequence[Slot | Part], flat: bool, deadline_s: float
    ) -> NDArray[np.uint8]:
        """The bytes of a bucket [last slot's end], broadcast by rank 0: as one tensor (`flat`), else one by one.
        Raises WeightError, having left the group, where they do not come in time."""
        self.check(name)
        if not slots or not slots[-1].end:
            return np.empty(0, np.uint8)
        data = torch.empty(slots[-1].end, dtype=torch.uint8)
        parts = [data] if flat else [data[slot.start : slot.end] for slot in slots]
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=deadline_s)
        self._wait(name, lambda backend: [backend.broadcast([part], options) for part in parts], deadline_s)
        return data.numpy()

    def receive_own(self, name: str, size: int, deadline_s: float) -> NDArray[np.uint8]:
        """`size` bytes that rank 0 sends to this rank alone; nothing is sent for none. Raises as `receive`."""
        self.check(name)
        data = torch.empty(size, dtype=torch.uint8)
        if size:
            self._wait(name, lambda backend: [backend.recv([data], 0, 0)], deadline_s)
        return data.numpy()

    def _wait(self, name: str, begin: Callable[[Any], list[Any]], deadline_s: float) -> None:
        limit = timedelta(seconds=deadline_s)
        try:
            for work in begin(self._groups[name]):
                work.wait(limit)
        except RuntimeError as fault:
            with contextlib.suppress(WeightError):  # left already
                self.leave(name)
            raise WeightError(
                f"nothing came through group {name} ({fault}); the group is destroyed, the weights are as before"
            ) from fault
