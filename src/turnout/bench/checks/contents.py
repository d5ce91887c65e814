"""Checks of reading what an engine holds: tensors by name, digests, and giving memory back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from turnout.bench.checks.swaps import serves, unchanged, wanted
from turnout.bench.registry import CapabilityAbsent, check, expect
from turnout.bench.replies import must, refused, rows
from turnout.bench.target import Target
from turnout.weights.tensors import HostTensor

DIES = "an engine without the guard asserts, and ends"
VALUES = 6
PROMPTS, PROMPT_TOKENS = 6, 800


def _floats(tensor: HostTensor) -> Any:
    """float32 values [shape]."""
    if tensor.dtype == "F16":
        return tensor.bits.view(np.float16).astype(np.float32).reshape(tensor.shape)
    wide = tensor.bits if tensor.dtype == "F32" else tensor.bits.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32).reshape(tensor.shape)


async def _by_name(t: Target, name: str) -> Any:
    answer = must(await t.wire.post("/get_weights_by_name", {"name": name, "truncate_size": VALUES}))
    return np.array(answer.row, np.float32)


@check("contents")
async def weights_by_name(t: Target) -> str:
    """/get_weights_by_name tells the first values of a tensor as they lie in the checkpoint, before and after an
    update; an unknown name is refused."""
    told = []
    for version in t.versions[:2]:
        await t.load_version(version)
        try:
            for tensor in version.tensors():
                if tensor.name.endswith(("embed_tokens.weight", "layernorm.weight")):
                    seen, want = await _by_name(t, tensor.name), _floats(tensor)[:VALUES]
                    expect(np.array_equal(seen, want), f"{tensor.name} of {version.label} differs")
                    told.append(tensor.name)
        finally:
            await t.load_version(t.versions[0])
    refused(await t.wire.post("/get_weights_by_name", {"name": "model.stranger.weight"}))
    return f"{len(told)} tensors equal to the folders' of two versions"


async def _checksum(t: Target) -> str:
    row = rows(await t.wire.post("/weights_checker", {"action": "checksum"}))
    expect(bool(row["ranks"]), "no rank tells a checksum")
    return json.dumps([rank["checksums"] for rank in row["ranks"]], sort_keys=True)


@check("contents")
async def checksums_tell_versions_apart(t: Target) -> str:
    """/weights_checker gives one checksum per tensor: the same twice, others after an update, the first again
    after going back."""
    first, again = await _checksum(t), await _checksum(t)
    async with t.on(t.versions[1]):
        other = await _checksum(t)
    back = await _checksum(t)
    expect(first == again == back, "the checksums of one version differ")
    one, two = json.loads(first)[0], json.loads(other)[0]
    same = [name for name in one if two.get(name) == one[name]]
    expect(not same, f"{len(same)} checksums are those of the other version: {same[:3]}")
    return f"{len(one)} checksums, all of them others after the update"


@check("contents")
async def snapshot_and_compare(t: Target) -> str:
    """A snapshot compares as equal until an update, and as different after it."""
    must(await t.wire.post("/weights_checker", {"action": "snapshot"}))
    same = await t.wire.post("/weights_checker", {"action": "compare"})
    if same.status != 200 and not t.facts.ours:
        raise CapabilityAbsent(f"compare answered {same.status}: {same.message}")
    must(same)
    must(await t.wire.post("/weights_checker", {"action": "snapshot"}))
    async with t.on(t.versions[1]):
        other = await t.wire.post("/weights_checker", {"action": "compare"})
    told = refused(other)
    return f"equal, then: {told[:120]}"


def _resident(pid: int) -> int:
    """RssAnon + RssShmem of a process of this host, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(found[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def _cache_bytes(t: Target, tokens: int) -> int:
    """What the KV of this many tokens takes on one rank, by the model's configuration."""
    row = json.loads((t.versions[0].folder / "config.json").read_text(encoding="utf-8"))
    heads = row.get("num_key_value_heads") or row["num_attention_heads"]
    size = row.get("head_dim") or row["hidden_size"] // row["num_attention_heads"]
    width = 4 if t.facts.dtype == "float32" else 2
    return 2 * row["num_hidden_layers"] * heads * size * width * tokens // t.facts.tp


async def _release(t: Target, tag: str, least: int) -> str:
    """Releases a tag; how much the process shrank, at least `least` bytes where that can be seen here."""
    pid = t.facts.pid
    before = _resident(pid) if pid else 0
    must(await t.wire.post("/release_memory_occupation", {"tags": [tag]}))
    fell = before - _resident(pid) if pid else 0
    if pid:
        expect(fell >= least, f"{tag}: the process shrank by {fell} bytes, {least} were expected")
    return f"{tag}: {fell} bytes less, at least {least} expected" if pid else f"{tag}: size not visible here"


@check("memory")
async def release_and_resume_cache(t: Target) -> str:
    """Releasing kv_cache gives its memory back and forgets prefixes; after resuming the engine answers as
    before."""
    length = min(PROMPT_TOKENS, t.facts.context // 2)
    await t.together([t.generate(t.prompt(900 + at, length), 2) for at in range(PROMPTS)])
    told = ""
    try:
        told = await _release(t, "kv_cache", _cache_bytes(t, PROMPTS * length) * 7 // 10)
        if t.facts.ours:
            held = await t.ask(t.prompt(1), 2)
            expect(held.status in (429, 503), f"a generation without a cache answered {held.status}")
    finally:
        must(await t.wire.post("/resume_memory_occupation", {"tags": ["kv_cache"]}))
    again = await t.generate(t.prompt(900, length), 2)
    expect(again.cached_tokens == 0, f"{again.cached_tokens} tokens cached after the release")
    return f"{told}; {await unchanged(t)}"


@check("memory")
async def release_and_resume_weights(t: Target) -> str:
    """Released weights are stale until an update brings them: nothing is served from them, and the update is
    served as by a fresh engine."""
    await wanted(t, t.versions[1])
    size = sum(tensor.nbytes for tensor in t.versions[0].tensors())
    try:
        told = await _release(t, "weights", size * 7 // 10 if size > 1 << 24 else 0)
        must(await t.wire.post("/resume_memory_occupation", {"tags": ["weights"]}))
        if t.facts.ours:
            stale = await t.ask(t.prompt(1), 2)
            expect(stale.status == 503, f"a generation from stale weights answered {stale.status}")
        await t.load_version(t.versions[1])
        served = await serves(t, t.versions[1])
    finally:
        await t.load_version(t.versions[0])
    return f"{told}; {served}"


@check("memory", risky=DIES)
async def release_while_requests_run(t: Target) -> str:
    """A release is refused while a request runs, and the request goes on."""
    async with t.flight(t.prompt(1), t.facts.lasting) as flight:
        await t.until_running(1)
        answer = await t.wire.post("/release_memory_occupation", {"tags": ["kv_cache"]})
        reply = await flight.reply()
    told = refused(answer)
    expect(
        (reply.finish, len(reply.tokens)) == ("length", t.facts.lasting),
        f"the request ended as {reply.finish}",
    )
    return told[:160]


@check("memory", risky=DIES)
async def resume_of_what_is_not_released(t: Target) -> str:
    """Resuming a tag that is not released, and releasing an unknown one, are refused."""
    told = refused(await t.wire.post("/resume_memory_occupation", {"tags": ["kv_cache"]}))
    refused(await t.wire.post("/release_memory_occupation", {"tags": ["kit_nothing"]}))
    return f"{told[:120]}; {await unchanged(t)}"
