"""Checks of updates by tensor: handles of shared memory and flattened buckets, between begin and end calls.

After each the engine answers as a fresh one on the exported version does. What must be refused may be refused by
the call itself or by the end call; the old weights then answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnout.bench.checks.swaps import answers, serves, unchanged, wanted
from turnout.bench.compare import equal
from turnout.bench.registry import CapabilityAbsent, CheckFailed, check, expect
from turnout.bench.replies import lacks, must, refused
from turnout.bench.senders import FLATTENED, HandleSender, packed
from turnout.bench.target import Target
from turnout.bench.versions import ModelVersion, mixture, poisoned, replaced
from turnout.serving.exchange import Answer
from turnout.weights.tensors import HostTensor

DIES = "a loader that fails half-way may end the engine"


@dataclass
class Session:
    """What lies between begin and end. `ended` holds the answer of the end call."""

    ended: Answer | None = None


@asynccontextmanager
async def session(t: Target) -> AsyncIterator[Session]:
    """The block's calls stand between /begin_weight_update and /end_weight_update, where the engine has them."""
    begun = await t.wire.post("/begin_weight_update", {})
    has = not lacks(begun)
    if has:
        must(begun)
    held = Session()
    try:
        yield held
    finally:
        if has:
            held.ended = await t.wire.post("/end_weight_update", {})


async def send(t: Target, payload: str, load_format: str | None, last: bool, label: str) -> Answer:
    """One /update_weights_from_tensor."""
    body = {
        "serialized_named_tensors": [payload] * t.facts.tp,
        "load_format": load_format,
        "flush_cache": last,
        "abort_all_requests": False,
        "weight_version": label if last else None,
    }
    return await t.wire.post("/update_weights_from_tensor", body)


async def send_all(
    t: Target, version: ModelVersion, buckets: Sequence[Sequence[HostTensor]], flat: bool
) -> None:
    """A whole update that must succeed."""
    sender = HandleSender()
    async with session(t) as held:
        for at, bucket in enumerate(buckets):
            payload = sender.bucket(bucket) if flat else sender.named(bucket)
            last = at == len(buckets) - 1
            must(await send(t, payload, FLATTENED if flat else None, last, version.label))
    if held.ended is not None:
        must(held.ended)


async def _served(
    t: Target, version: ModelVersion, buckets: Sequence[Sequence[HostTensor]], flat: bool
) -> str:
    """Sends the update and proves it; the first version is loaded again in every case."""
    await wanted(t, version)
    try:
        await send_all(t, version, buckets, flat)
        told = await serves(t, version)
    finally:
        await t.load_version(t.versions[0])
    return f"{sum(len(bucket) for bucket in buckets)} tensors in {len(buckets)} calls; {told}"


@check("tensors")
async def update_by_handles(t: Target) -> str:
    """Tensors handed over as handles of shared memory are served as by a fresh engine on that version."""
    return await _served(t, t.versions[1], [t.versions[1].tensors()], flat=False)


@check("tensors")
async def update_by_one_bucket(t: Target) -> str:
    """The same as one flattened bucket."""
    return await _served(t, t.versions[1], [t.versions[1].tensors()], flat=True)


@check("tensors")
async def update_by_a_bucket_each(t: Target) -> str:
    """The same with every tensor in a bucket of its own."""
    return await _served(t, t.versions[1], [[tensor] for tensor in t.versions[1].tensors()], flat=True)


@check("tensors")
async def update_by_buckets_at_their_edges(t: Target) -> str:
    """The same where a bucket is filled to its last byte, and where one byte is missing for that."""
    tensors = t.versions[1].tensors()
    edge = sum(tensor.nbytes for tensor in tensors[: len(tensors) // 2])
    told = ""
    for limit in (edge, edge - 1, max(tensor.nbytes for tensor in tensors)):
        told = await _served(t, t.versions[1], packed(tensors, limit), flat=True)
    return f"limits {edge}, {edge - 1} and the largest tensor; the last: {told}"


@check("tensors")
async def update_in_another_order(t: Target) -> str:
    """The same with the tensors in reverse order, as handles in several calls."""
    tensors = t.versions[2].tensors()[::-1]
    third = -(-len(tensors) // 3)
    return await _served(
        t, t.versions[2], [tensors[at : at + third] for at in range(0, len(tensors), third)], flat=False
    )


@check("tensors")
async def tied_embeddings(t: Target) -> str:
    """Of two tied names an update may carry either one; the other follows."""
    version = t.versions[1]
    tensors = version.tensors()
    names = {tensor.name for tensor in tensors}
    embed = next((tensor for tensor in tensors if tensor.name.endswith("embed_tokens.weight")), None)
    if embed is None or "lm_head.weight" in names:
        raise CapabilityAbsent("the model's embeddings are not tied")
    first = await _served(t, version, [tensors], flat=True)
    head = HostTensor("lm_head.weight", embed.dtype, embed.shape, embed.bits)
    by_head = ModelVersion(version.folder, "kit-by-lm-head", version.root)
    try:
        await send_all(t, by_head, [replaced(tensors, head, embed.name)], flat=True)
        want, seen = await wanted(t, version), await answers(t)
        equal(want, seen, t.facts.repeat_tolerance, "by lm_head.weight")
    except CheckFailed as fault:
        if t.facts.ours:
            raise
        raise CapabilityAbsent(f"only embed_tokens.weight moves both: {fault}") from fault
    finally:
        await t.load_version(t.versions[0])
    return f"by embed_tokens.weight and by lm_head.weight alone; {first}"


@check("tensors")
async def begin_and_end_calls(t: Target) -> str:
    """begin and end stand in pairs: a second begin and an end without one are refused; an empty pair changes
    nothing."""
    refused(await t.wire.post("/end_weight_update", {}))
    must(await t.wire.post("/begin_weight_update", {}))
    second = await t.wire.post("/begin_weight_update", {})
    must(await t.wire.post("/end_weight_update", {}))
    told = refused(second)
    return f"{told[:100]}; {await unchanged(t)}"


async def _refused(t: Target, tensors: list[HostTensor], *mentions: str, **more: Any) -> str:
    """Sends the tensors as one bucket; evidence that call or end refuse them and that nothing changed."""
    await wanted(t, t.versions[0])
    sender = HandleSender()
    payload = more.get("payload", "") or sender.bucket(tensors)
    async with session(t) as held:
        answer = await send(t, payload, FLATTENED, True, "kit-broken")
    if answer.status in (404, 405, 501):
        must(answer)
    answers = [got for got in (answer, held.ended) if got is not None and got.status != 200]
    if not answers:
        await t.load_version(t.versions[0])
        expect(not t.facts.ours, "the update was taken")
        raise CapabilityAbsent("the update was taken: this engine does not validate what it loads")
    message = refused(answers[0], *(mentions if t.facts.ours else ()))
    if not t.facts.ours:
        await t.load_version(t.versions[0])
    return f"{message[:160]}; {await unchanged(t)}"


def _norm(t: Target) -> HostTensor:
    return next(tensor for tensor in t.versions[1].tensors() if tensor.name.endswith("norm.weight"))


@check("tensors")
async def tensors_of_an_unknown_name(t: Target) -> str:
    """A name that the model does not have is refused by name."""
    norm = _norm(t)
    stranger = HostTensor("model.stranger.weight", norm.dtype, norm.shape, norm.bits)
    return await _refused(t, [*t.versions[1].tensors(), stranger], "model.stranger.weight")


@check("tensors", risky=DIES)
async def tensors_of_a_wrong_shape(t: Target) -> str:
    """A tensor of another shape is refused by name."""
    norm = _norm(t)
    half = HostTensor(norm.name, norm.dtype, (norm.shape[0] // 2,), norm.bits[: norm.shape[0] // 2].copy())
    return await _refused(t, replaced(t.versions[1].tensors(), half, norm.name), norm.name)


@check("tensors", risky=DIES)
async def tensors_of_a_wrong_dtype(t: Target) -> str:
    """A tensor of integers is refused by name."""
    norm = _norm(t)
    whole = HostTensor(norm.name, "I32", norm.shape, np.ones(norm.shape[0], np.uint32))
    return await _refused(t, replaced(t.versions[1].tensors(), whole, norm.name), norm.name)


@check("tensors")
async def tensors_with_nan(t: Target) -> str:
    """A NaN is refused by its tensor's name."""
    norm = _norm(t)
    return await _refused(t, replaced(t.versions[1].tensors(), poisoned(norm), norm.name), norm.name)


@check("tensors")
async def update_of_some_tensors(t: Target) -> str:
    """Tensors that an update does not carry stay as they are: it is served as the mixture of both versions."""
    norm = _norm(t)
    old = next(tensor for tensor in t.versions[0].tensors() if tensor.name == norm.name)
    mixed = mixture(t.versions[1], t.work / "mixture", 3, old)
    if mixed.root not in t.wanted:
        async with t.on(mixed):
            t.wanted[mixed.root] = await answers(t)
    rest = [tensor for tensor in t.versions[1].tensors() if tensor.name != norm.name]
    told = await _served(t, mixed, [rest[: len(rest) // 2], rest[len(rest) // 2 :]], flat=True)
    return f"all but {norm.name}, compared with a disk update to the mixture: {told}"


@check("tensors", risky=DIES)
async def tensors_that_are_no_pickle(t: Target) -> str:
    """A payload that is no base64, or holds no tensors, is refused."""
    told = [
        await _refused(t, [], payload=payload)
        for payload in ("%%%", "aGVsbG8=", "gASVCwAAAAAAAACMB2J1aWx0aW5z")
    ]
    return told[-1]
