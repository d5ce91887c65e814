"""Checks of updates through a process group: the kit is rank 0 of a Gloo group, the engine the other ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from turnout.bench.checks.swaps import serves, unchanged, wanted
from turnout.bench.checks.tensors import DIES, session
from turnout.bench.registry import check, expect
from turnout.bench.replies import lacks, must, refused
from turnout.bench.senders import FLATTENED, TORCH_DTYPES, GroupSender, packed
from turnout.bench.target import Target
from turnout.bench.versions import ModelVersion
from turnout.core.rng import random_id
from turnout.serving.exchange import Answer
from turnout.weights.tensors import HostTensor


@asynccontextmanager
async def group(t: Target) -> AsyncIterator[GroupSender]:
    """A group with the engine; it is destroyed on both sides when the block ends."""
    probe = await t.wire.post("/destroy_weights_update_group", {"group_name": "kit-nothing"})
    if lacks(probe):
        must(probe)  # before a thread waits for an engine that won't come
    sender = GroupSender(f"kit-{random_id()}", t.facts.tp)
    body = {
        "master_address": "127.0.0.1",
        "master_port": sender.port,
        "rank_offset": 1,
        "world_size": sender.world,
        "group_name": sender.name,
        "backend": "gloo",
    }
    joining = asyncio.ensure_future(t.wire.post("/init_weights_update_group", body))
    meeting = asyncio.ensure_future(sender.join())
    done, _ = await asyncio.wait({joining, meeting}, return_when=asyncio.FIRST_COMPLETED)
    if joining in done and joining.result().status != 200:
        meeting.cancel()
        must(joining.result())
    must(await joining)
    await meeting
    try:
        yield sender
    finally:
        await t.wire.post("/destroy_weights_update_group", {"group_name": sender.name})
        sender.close()


def call(
    sender: GroupSender, tensors: Sequence[HostTensor], flat: bool, label: str | None
) -> dict[str, object]:
    """The body of one /update_weights_from_distributed."""
    return {
        "names": [tensor.name for tensor in tensors],
        "dtypes": [TORCH_DTYPES[tensor.dtype] for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
        "group_name": sender.name,
        "load_format": FLATTENED if flat else None,
        "flush_cache": label is not None,
        "abort_all_requests": False,
        "weight_version": label,
    }


async def _served(
    t: Target, version: ModelVersion, buckets: Sequence[Sequence[HostTensor]], flat: bool
) -> str:
    await wanted(t, version)
    try:
        async with group(t) as sender:
            async with session(t) as held:
                for at, bucket in enumerate(buckets):
                    label = version.label if at == len(buckets) - 1 else None
                    answer = await _broadcast(t, sender, bucket, flat, label)
                    must(answer)
            if held.ended is not None:
                must(held.ended)
        told = await serves(t, version)
    finally:
        await t.load_version(t.versions[0])
    return f"{sum(len(b) for b in buckets)} tensors in {len(buckets)} broadcast calls; {told}"


async def _broadcast(
    t: Target, sender: GroupSender, bucket: Sequence[HostTensor], flat: bool, label: str | None
) -> Answer:
    """The call and the broadcast it waits for, side by side; a refusal ends both."""
    body = call(sender, bucket, flat, label)
    asked = asyncio.ensure_future(t.wire.post("/update_weights_from_distributed", body))
    sent = asyncio.ensure_future(sender.send(bucket, flat))
    done, _ = await asyncio.wait({asked, sent}, return_when=asyncio.FIRST_COMPLETED)
    if asked in done and asked.result().status != 200:
        sent.cancel()
        return asked.result()
    await sent
    return await asked


@check("groups")
async def update_by_group(t: Target) -> str:
    """Tensors broadcast one by one are served as by a fresh engine on that version."""
    return await _served(t, t.versions[1], [t.versions[1].tensors()], flat=False)


@check("groups")
async def update_by_group_in_buckets(t: Target) -> str:
    """The same with tensors broadcast as flattened buckets, several of them."""
    tensors = t.versions[2].tensors()
    limit = sum(tensor.nbytes for tensor in tensors) // 4
    return await _served(t, t.versions[2], packed(tensors, limit), flat=True)


@check("groups")
async def group_calls_in_a_wrong_order(t: Target) -> str:
    """An update through a group that nobody made, and the end of one, are refused."""
    unknown = {"group_name": "kit-nothing"}
    told = refused(await t.wire.post("/destroy_weights_update_group", unknown))
    if t.facts.ours:
        body = {"names": [], "dtypes": [], "shapes": []} | unknown
        async with session(t):
            refused(await t.wire.post("/update_weights_from_distributed", body))
    return f"{told[:120]}; {await unchanged(t)}"


@check("groups", risky=DIES)
async def group_whose_sender_leaves(t: Target) -> str:
    """A sender that leaves in the middle of an update: the call fails, the old weights answer."""
    tensors = t.versions[1].tensors()
    await wanted(t, t.versions[0])
    async with group(t) as sender, session(t):
        body = call(sender, tensors, True, "kit-broken")
        asked = asyncio.ensure_future(t.wire.post("/update_weights_from_distributed", body))
        await t.clock.sleep(0.3)
        expect(not asked.done(), "the call ended before anything was sent")
        sender.close()
        answer = await asked
    expect(answer.status >= 400, f"the call answered {answer.status}")
    return f"{answer.status} {answer.message[:120]}; {await unchanged(t)}"
