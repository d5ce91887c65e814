"""Versions through a process group: the trainer is rank 0. Every rank of a stock engine, and our engine of one
rank, gets every tensor by broadcast; each rank of our engine of several gets its part only, from rank 0 to it.

The backend is Gloo, made directly over a TCP store of the trainer under the keys that SGLang 0.5.23 looks for.
Promises: the group is made at the first update and kept until `close`; after any failure, and when other engines
take part, all its members are told to leave it and another is made, under another name; a broadcast ends with the
update's deadline.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from turnout.core.address import Address
from turnout.core.errors import WeightError
from turnout.core.ports import Clock
from turnout.engine.gloo import gloo_end, group_store
from turnout.placement.route import own_address
from turnout.placement.tasks import together
from turnout.serving.client import EngineClient
from turnout.serving.weights_client import BucketFlags, EngineWeights, Meeting
from turnout.transfer.stream import DROP_DEADLINE_S, Bucket, StreamTransport
from turnout.weights.buckets import Slot, pack, slots
from turnout.weights.map_rules import Place
from turnout.weights.slices import rank_bytes
from turnout.weights.store import WeightStore

log = logging.getLogger(__name__)


@dataclass
class _Group:
    """One group that stands. `store` holds the meeting point open."""

    name: str
    members: tuple[EngineWeights, ...]
    store: dist.TCPStore
    places: list[tuple[int, Place]]  # group rank and part of every receiver; empty: all get everything
    backend: Any  # ProcessGroupGloo; torch's stubs know no methods of it


class GroupTransport(StreamTransport):
    """See the module."""

    by_rank = True  # whether engines of several ranks are sent what each of them needs

    def __init__(self, store: WeightStore, clock: Clock, bucket_bytes: int) -> None:
        super().__init__(store, clock, bucket_bytes)
        self._group: _Group | None = None
        self._tag, self._made = (
            secrets.token_hex(4),
            0,
        )  # engines may still be in a group of an earlier trainer

    @property
    def place(self) -> str:
        """Host and port where the group meets; empty where there is none."""
        return "" if self._group is None else f"{self._group.store.host}:{self._group.store.port}"

    async def open(self, engines: Sequence[EngineWeights], deadline_s: float) -> None:
        known = all(engine.client.holds is not None for engine in engines)
        if self._group is not None and _clients(self._group.members) == _clients(engines) and known:
            return
        await self.close()
        self._made += 1
        name = f"turnout-{self._tag}-{self._made}"
        places = [await engine.places() if self.by_rank else [] for engine in engines]
        if not all(places):
            places = [[] for _ in engines]
        ranks = [len(part) if part else await engine.ranks() for engine, part in zip(engines, places)]
        world = 1 + sum(ranks)
        limit = timedelta(seconds=deadline_s)
        host = meeting_host([engine.client.address for engine in engines])
        try:
            store = dist.TCPStore(host, 0, world, True, limit, wait_for_workers=False)
        except RuntimeError as fault:
            raise WeightError(f"no meeting point for a group can be opened on {host}: {fault}") from fault
        offsets = [1 + sum(ranks[:at]) for at in range(len(ranks))]
        members_of = [max(1, len(part)) for part in places]
        meetings = [
            Meeting(name, host, store.port, offset, world, count)
            for offset, count in zip(offsets, members_of)
        ]
        joins = [engine.join(meeting, deadline_s) for engine, meeting in zip(engines, meetings)]
        mine = asyncio.to_thread(_backend, store, name, (world, host), limit)
        mine_of = [(offset + place.rank, place) for offset, part in zip(offsets, places) for place in part]
        log.info(
            "group %s: %s", name, f"{len(mine_of)} ranks get their parts" if mine_of else "all get everything"
        )
        self._group = _Group(
            name, tuple(engines), store, mine_of, None
        )  # from here on `close` tells the engines to leave it
        *_, backend = await together([*joins, mine])
        self._group.backend = backend

    async def send(self, bucket: Bucket, engines: Sequence[EngineWeights], flags: BucketFlags) -> None:
        if self._group is not None and self._group.places:
            await self._send_parts(self._group, bucket, engines, flags)
            return
        data = torch.empty(sum(tensor.nbytes for tensor in bucket), dtype=torch.uint8)
        placed: list[Slot] = await asyncio.to_thread(pack, bucket, np.asarray(data))
        await self.broadcast(data, flags, lambda each, name: each.through_group(name, placed, flags), engines)

    async def _send_parts(
        self, group: _Group, bucket: Bucket, engines: Sequence[EngineWeights], flags: BucketFlags
    ) -> None:
        whole = slots((tensor.name, tensor.dtype, tensor.shape) for tensor in bucket)
        parts = await asyncio.to_thread(_parts, bucket, group.places)
        limit = timedelta(seconds=flags.deadline_s)
        mine = asyncio.to_thread(_send_each, group.backend, parts, limit)
        calls = [engine.through_group(group.name, whole, flags, by_rank=True) for engine in engines]
        await together([*calls, mine])

    async def broadcast(
        self,
        data: torch.Tensor,
        flags: BucketFlags,
        call: Callable[[EngineWeights, str], Awaitable[None]],
        engines: Sequence[EngineWeights],
    ) -> None:
        """Sends `data` [bytes] while `call`, given an engine and the group's name, has each engine receive it."""
        assert self._group is not None
        limit = timedelta(seconds=flags.deadline_s)
        mine = asyncio.to_thread(_broadcast, self._group.backend, data, limit)
        await together([*(call(engine, self._group.name) for engine in engines), mine])

    async def close(self) -> None:
        if self._group is None:
            return
        group, self._group = self._group, None
        await asyncio.gather(*(_leaves(engine, group.name) for engine in group.members))


async def _leaves(engine: EngineWeights, name: str) -> None:
    """Also of an engine that has left the run, or started again: its client may be closed, and is so afterwards."""
    closed = engine.client.closed
    await engine.leave(name, DROP_DEADLINE_S)
    if closed:
        await engine.client.close()


def _clients(engines: Sequence[EngineWeights]) -> list[EngineClient]:
    return [engine.client for engine in engines]


def _parts(bucket: Bucket, places: Sequence[tuple[int, Place]]) -> list[tuple[int, torch.Tensor]]:
    """By group rank, its bytes of the bucket. Ranks of different engines that hold the same share them."""
    made = {place: torch.from_numpy(rank_bytes(bucket, place)) for place in {place for _, place in places}}
    return [(rank, made[place]) for rank, place in places if made[place].numel()]


def _send_each(backend: Any, parts: Sequence[tuple[int, torch.Tensor]], limit: timedelta) -> None:
    try:
        for work in [backend.send([data], rank, 0) for rank, data in parts]:
            work.wait(limit)
    except RuntimeError as fault:
        raise WeightError(f"sending to the ranks failed: {fault}") from fault


def meeting_host(engines: Sequence[Address]) -> str:
    """The address of this host that all engines reach: that of the route to one on another host, where there is
    one, since loopback means another place there."""
    return own_address(min(engines, key=lambda address: address.loopback).host)


def _backend(store: dist.Store, name: str, place: tuple[int, str], limit: timedelta) -> Any:
    """The trainer's end; `place`: how many meet, and the address at which the others reach this host."""
    world, host = place
    try:
        return gloo_end(group_store(store, name), (0, world), host, limit)
    except RuntimeError as fault:
        raise WeightError(f"group {name} did not come together: {fault}") from fault


def _broadcast(backend: Any, data: torch.Tensor, limit: timedelta) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, limit
    try:
        backend.broadcast([data], options).wait(limit)
    except RuntimeError as fault:
        raise WeightError(f"the broadcast failed: {fault}") from fault
