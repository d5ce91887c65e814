"""Checks of pausing in three modes: what happens to what runs, to what comes meanwhile, and after going on."""

from __future__ import annotations

from turnout.bench.checks.aborts import partial
from turnout.bench.compare import equal
from turnout.bench.registry import check, expect
from turnout.bench.replies import refused
from turnout.bench.target import Target


@check("pause")
async def pause_abort(t: Target) -> str:
    """Mode abort ends what runs with the tokens it has; after going on the engine answers."""
    whole = await t.generate(t.prompt(1), t.facts.lasting)
    async with t.flight(t.prompt(1), t.facts.long) as flight:
        await t.until_running(1)
        async with t.paused("abort"):
            reply = await flight.reply()
    told = partial(t, whole, reply)
    after = await t.generate(t.prompt(1), 8)
    return f"{told}; afterwards {len(after.tokens)} tokens"


async def _held(t: Target, mode: str) -> str:
    """A request that runs when generation is paused makes no token during the pause and ends as if there had
    been none."""
    whole = await t.generate(t.prompt(2), t.facts.lasting)
    async with t.flight(t.prompt(2), t.facts.lasting) as flight:
        await t.until_running(1)
        async with t.paused(mode):
            await t.clock.sleep(2 * t.facts.lasting * t.facts.token_s)
            early = flight.landed
        reply = await flight.reply()
    expect(not early, "the request ended during the pause, or before it")
    expect(reply.finish == "length", f"finish_reason is {reply.finish}")
    return equal([whole], [reply], t.facts.repeat_tolerance, "after the pause")


@check("pause")
async def pause_retract(t: Target) -> str:
    """Mode retract keeps the request and its tokens; they equal those of a run without a pause."""
    return await _held(t, "retract")


@check("pause")
async def pause_in_place(t: Target) -> str:
    """Mode in_place keeps the request, its tokens and its KV; they equal those of a run without a pause."""
    return await _held(t, "in_place")


@check("pause")
async def pause_holds_new_requests(t: Target) -> str:
    """A request that comes during a pause waits, and is answered afterwards."""
    want = await t.generate(t.prompt(3), 8)
    async with t.flight(t.prompt(4), t.facts.lasting) as runs:
        await t.until_running(1)
        async with t.paused("in_place"), t.flight(t.prompt(3), 8) as flight:
            await t.clock.sleep(24 * t.facts.token_s)
            early = flight.landed
            await t.control("/continue_generation", {})
            reply = await flight.reply()
        await runs.answer()
    expect(not early, "it was answered during the pause")
    return equal([want], [reply], t.facts.repeat_tolerance, "after the pause")


@check("pause")
async def pause_and_abort(t: Target) -> str:
    """A request that is aborted while generation is paused ends as abort, at the latest when it goes on."""
    async with t.flight(t.prompt(1), t.facts.long) as flight:
        await t.until_running(1)
        async with t.paused("in_place"):
            await t.abort(flight.rid)
        reply = await flight.reply()
    expect(reply.finish == "abort", f"finish_reason is {reply.finish}")
    return f"abort with {len(reply.tokens)} tokens"


@check("pause")
async def pause_twice(t: Target) -> str:
    """Pausing twice and going on twice is harmless; an unknown mode is refused."""
    for _ in range(2):
        await t.control("/pause_generation", {"mode": "in_place"})
    for _ in range(2):
        await t.control("/continue_generation", {})
    told = refused(await t.wire.post("/pause_generation", {"mode": "sideways"}))
    reply = await t.generate(t.prompt(1), 8)
    return f"{len(reply.tokens)} tokens after it; mode sideways: {told[:80]}"
