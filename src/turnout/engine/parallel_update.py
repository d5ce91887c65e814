"""Weights of a sharded engine by a group in which every rank is a member and gets only what it holds.

The sender's rank is 0; this engine's ranks follow one another from `Membership.rank` on. Promises: all ranks join,
receive and leave together, each within the deadline; a rank writes into staged buffers only, and only finite
values; what one rank did not get is a WeightError that names it, and the engine goes on with what it had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from turnout.core.errors import WeightError
from turnout.engine.parallel_channel import Channel, Message
from turnout.engine.parallel_storage import ShardedBuffer, ShardStorage
from turnout.engine.update_group import Membership, UpdateGroups
from turnout.weights.buckets import Slot, unpack
from turnout.weights.slices import rank_slots
from turnout.weights.tensors import converted, nonfinite_count

Answer = tuple[str | None, list[str]]  # why it failed, or what is wrong with what came


@dataclass(frozen=True)
class SliceBucket:
    """`slots` describe whole tensors. `twins`: of tied tensors, those whose other name came before."""

    group: str
    slots: Sequence[Slot]
    twins: frozenset[str]
    deadline_s: float


class SliceReceiver:
    """One rank's end. Its methods block, one at a time."""

    def __init__(self, storage: ShardStorage) -> None:
        self._storage, self.groups = storage, UpdateGroups()
        self.place = storage.place

    def answer(self, work: Callable[[], list[str]]) -> Answer:
        try:
            return None, work()
        except WeightError as fault:
            return f"rank {self.place.rank}: {fault}", []

    def join(self, member: Membership, deadline_s: float) -> list[str]:
        self.groups.join(replace(member, rank=member.rank + self.place.rank), deadline_s)
        return []

    def leave(self, name: str) -> list[str]:
        self.groups.leave(name)
        return []

    def receive(self, bucket: SliceBucket, buffers: Mapping[str, Tensor]) -> list[str]:
        """Takes this rank's part of each tensor; one without a buffer (by name) was refused already. Returns what
        is wrong with them; raises WeightError where they do not come in time."""
        placed = rank_slots(bucket.slots, self.place)
        data = self.groups.receive_own(bucket.group, placed[-1].end if placed else 0, bucket.deadline_s)
        faults = []
        for tensor in unpack(data, placed):
            if tensor.name not in buffers:
                continue
            bad = nonfinite_count(tensor)
            if bad:
                faults.append(f"{tensor.name} has {bad} values that are NaN or infinite")
                continue
            bits = converted(tensor, self._storage.specs[tensor.name].dtype).bits
            memory = self._storage.view(buffers[tensor.name], tensor.name)
            if tensor.name not in bucket.twins:
                np.copyto(memory, bits)
            elif not np.array_equal(memory, bits):
                faults.append(
                    f"{tensor.name} is tied to another tensor in this model and differs in the update"
                )
        return faults


class ShardedReceiver:
    """Rank 0's end, and the way to the others'."""

    def __init__(self, own: SliceReceiver, weights: Channel) -> None:
        self.own, self._weights = own, weights

    @property
    def slices(self) -> dict[str, int]:
        """What a sender needs to know to cut tensors for the ranks."""
        place = self.own.place
        return {"tp_size": place.tp, "ep_size": place.ep, "experts": place.experts}

    def join(self, member: Membership, deadline_s: float) -> None:
        self._all(
            ("group", "join", member, deadline_s), lambda: self.own.join(member, deadline_s), deadline_s
        )

    def leave(self, name: str) -> None:
        """Every rank that is in it; raises WeightError where one was not."""
        self._all(("group", "leave", name), lambda: self.own.leave(name), 0.0)

    def receive(self, bucket: SliceBucket, buffers: Mapping[str, ShardedBuffer]) -> list[str]:
        keys = {name: buffer.key for name, buffer in buffers.items()}
        mine = {name: buffer.local for name, buffer in buffers.items()}
        work = lambda: self.own.receive(bucket, mine)  # noqa: E731 - a thread's share of the message
        return self._all(("group", "receive", bucket, keys), work, bucket.deadline_s)

    def _all(self, message: Message, work: Callable[[], list[str]], deadline_s: float) -> list[str]:
        answers: list[Answer] = []
        others = self._weights.ask(message, lambda: answers.append(self.own.answer(work)), deadline_s)
        answers += others
        failed = [fault for fault, _ in answers if fault is not None]
        if failed:
            raise WeightError("; ".join(failed))
        return list(dict.fromkeys(fault for _, found in answers for fault in found))
