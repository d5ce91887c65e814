"""What update checks share: what each version answers, and the proof that an engine serves one.

What a version answers is taken from a fresh engine started on its folder where one can be started; for an
engine that was given by URL it is taken after an update from disk, which is itself compared with the reference
forward of that folder.
"""

from __future__ import annotations

from turnout.bench.checks.logprobs import against_reference
from turnout.bench.compare import difference, equal
from turnout.bench.reference import Reference
from turnout.bench.registry import CheckFailed, expect
from turnout.bench.replies import Reply, lacks, must, reply_of
from turnout.bench.target import Target, request_body
from turnout.bench.versions import ModelVersion
from turnout.serving.exchange import Exchange

TOKENS = 12


async def answers(t: Target, wire: Exchange | None = None) -> list[Reply]:
    """What an engine (the one under test by default) answers to the eight prompts."""
    engine = wire if wire is not None else t.wire

    async def one(ids: list[int]) -> Reply:
        return reply_of(must(await engine.post("/generate", request_body(ids, TOKENS, {}))).row)

    return await t.together([one(ids) for ids in t.prompts()])


async def wanted(t: Target, version: ModelVersion) -> list[Reply]:
    """What the version answers, as the module says; CheckFailed where the first version answers the same."""
    if version.root not in t.wanted:
        if version.root == t.versions[0].root:
            t.wanted[version.root] = await answers(t)  # every check leaves the engine on this version
        elif t.fresh is not None:
            t.wanted[version.root] = await answers(t, await t.fresh(version))
        else:
            async with t.on(version):
                t.wanted[version.root] = await answers(t)
                await against_reference_of(t, version, t.wanted[version.root])
    found = t.wanted[version.root]
    first = t.versions[0].root
    if version.root != first:
        same = [
            not difference(a, b, t.facts.tolerance) for a, b in zip(await wanted(t, t.versions[0]), found)
        ]
        expect(
            sum(same) < len(same) // 2, f"the check is blind: {sum(same)} of 8 answers are those of before"
        )
    return found


async def against_reference_of(t: Target, version: ModelVersion, replies: list[Reply]) -> str:
    """Compares with the plain forward of the version's own folder."""
    kept = t.reference
    t.reference = Reference(version.folder)
    try:
        return await against_reference(t, t.prompts(), replies)
    finally:
        t.reference = kept


async def serves(t: Target, version: ModelVersion, label: str | None = None) -> str:
    """Evidence that the engine answers as the version does, under its label, and attests its content."""
    want, seen = await wanted(t, version), await answers(t)
    told = equal(want, seen, t.facts.repeat_tolerance, f"served as {version.label}")
    shown = {reply.version for reply in seen}
    named = version.label if label is None else label
    expect(shown == {named}, f"meta_info.weight_version is {sorted(shown)}, not {named}")
    against = "a fresh engine" if t.fresh is not None else "a disk update"
    attested = await root_attested(t)
    if attested is not None and attested != version.root:
        raise CheckFailed(f"the engine attests root {attested}, the version's is {version.root}")
    return f"{told} to {against}; root {'not attested' if attested is None else 'attested'}"


async def root_attested(t: Target) -> str | None:
    """The root digest that the engine attests, None where it has none to offer."""
    answer = await t.wire.get("/weight_version")
    return None if lacks(answer) else str(must(answer).row["root"])


async def unchanged(t: Target) -> str:
    """Evidence that the first version is served as before."""
    want, seen = await wanted(t, t.versions[0]), await answers(t)
    told = equal(want, seen, t.facts.repeat_tolerance, "after the refusal")
    root = await root_attested(t)
    expect(root in (None, t.versions[0].root), f"root {root} is attested")
    return told
