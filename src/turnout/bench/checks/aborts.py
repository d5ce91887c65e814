"""Checks of how requests are ended from outside, in every phase, and of what is kept of them."""

from __future__ import annotations

import asyncio

from turnout.bench.checks.sampling import need_seeds
from turnout.bench.compare import equal
from turnout.bench.registry import CapabilityAbsent, CheckFailed, check, expect
from turnout.bench.replies import Reply, must, piece, reply_of
from turnout.bench.target import Target, request_body
from turnout.serving.exchange import DONE

FILL_MAX = 64


def partial(t: Target, whole: Reply, cut: Reply) -> str:
    """Evidence that `cut` is an aborted beginning of `whole`, each token with its log-prob."""
    expect(cut.finish == "abort", f"finish_reason is {cut.finish}, not abort")
    count = len(cut.tokens)
    expect(len(cut.logprobs) == count, f"{count} tokens and {len(cut.logprobs)} log-probs")
    common = min(count, len(whole.tokens))
    equal(
        [piece(whole, 0, common)], [piece(cut, 0, common)], t.facts.repeat_tolerance, "of the partial tokens"
    )
    return f"{count} tokens with log-probs kept"


@check("abort")
async def abort_running(t: Target) -> str:
    """A running request ends as abort; the tokens it has are a beginning of the uncut response."""
    whole = await t.generate(t.prompt(1), 64)
    async with t.flight(t.prompt(1), t.facts.long) as flight:
        await t.until_running(1)
        await t.abort(flight.rid)
        reply = await flight.reply()
    expect(0 < len(reply.tokens) < t.facts.long, f"{len(reply.tokens)} tokens came back")
    return partial(t, whole, reply)


@check("abort")
async def abort_waiting(t: Target) -> str:
    """A request that waits for a slot ends as abort without a token; those that run go on."""
    slots = t.facts.max_running
    if slots > FILL_MAX:
        raise CapabilityAbsent(f"max_running_requests {slots} is more than this check fills ({FILL_MAX})")
    filling = [asyncio.ensure_future(t.ask(t.prompt(at), t.facts.long)) for at in range(slots)]
    try:
        await t.until_running(slots)
        async with t.flight(t.prompt(1), 8) as flight:
            await t.clock.sleep(4 * t.facts.token_s)
            waits = not flight.landed
            await t.abort(flight.rid)
            reply = await flight.reply()
        running = (await t.load())["num_running_reqs"]
    finally:
        await t.control("/abort_request", {"rid": "", "abort_all": True})
        await asyncio.wait(filling)
    expect(waits, "the request did not wait although every slot was taken")
    seen = (reply.finish, len(reply.tokens))
    expect(seen == ("abort", 0), f"finish and tokens are {seen}")
    expect(running == slots, f"{running} of {slots} others run after the abort")
    return f"abort with 0 tokens; {slots} others went on"


@check("abort")
async def abort_streaming(t: Target) -> str:
    """A streamed request that is aborted ends its stream with finish abort and the tokens it has."""
    whole = await t.generate(t.prompt(2), 64)
    body = request_body(t.prompt(2), t.facts.long, {"stream": True})
    replies = []
    async with t.wire.stream("/generate", body) as stream:
        if stream.status != 200:
            must(await stream.answer())
        async for event in stream.events():
            if event != DONE:
                replies.append(reply_of(event))
            if len(replies) == 3:
                await t.abort(body["rid"])
    expect(replies[-1].completion_tokens < t.facts.long, "the stream went on to its end")
    return f"{len(replies)} events; {partial(t, whole, replies[-1])}"


@check("abort")
async def abort_all_requests(t: Target) -> str:
    """abort_all ends every request, running and waiting, and the engine is idle."""
    count = min(t.facts.max_running + 3, 12)
    flying = [asyncio.ensure_future(t.ask(t.prompt(at), t.facts.long)) for at in range(count)]
    try:
        await t.until_running(min(count, t.facts.max_running))
    finally:
        await t.control("/abort_request", {"rid": "", "abort_all": True})
    replies = [reply_of(must(await one).row) for one in flying]
    expect({r.finish for r in replies} == {"abort"}, f"finish reasons {sorted({r.finish for r in replies})}")
    await t.until_idle(10.0)
    return f"{count} of {count} ended as abort, {sum(len(r.tokens) for r in replies)} tokens kept"


@check("abort")
async def abort_of_an_unknown_id(t: Target) -> str:
    """The abort of an id that nobody has is answered and touches nobody; an empty id aborts nobody."""
    async with t.flight(t.prompt(1), 40) as flight:
        for body in ({"rid": "kit-nobody"}, {"rid": "kit-"}, {"rid": ""}):
            answer = await t.wire.post("/abort_request", body)
            expect(answer.status in (200, 400), f"{body} answered {answer.status}")
        reply = await flight.reply()
    expect((reply.finish, len(reply.tokens)) == ("length", 40), f"the other one ended as {reply.finish}")
    return "three unknown ids, the running request went on to its 40 tokens"


@check("abort")
async def abort_is_by_exact_id(t: Target) -> str:
    """Aborting one id leaves alone those that begin with it."""
    async with (
        t.flight(t.prompt(1), t.facts.long, rid="kit-exact-1") as one,
        t.flight(t.prompt(2), t.facts.long, rid="kit-exact-10") as ten,
    ):
        await t.until_running(2)
        await t.abort(one.rid)
        first = await one.reply()
        await t.clock.sleep(8 * t.facts.token_s)
        alone = not ten.landed
        await t.abort(ten.rid)
        second = await ten.reply()
    expect((first.finish, second.finish) == ("abort", "abort"), f"{first.finish}, then {second.finish}")
    if not alone and not t.facts.ours:
        raise CapabilityAbsent("ids are matched by their beginning: kit-exact-10 ended with kit-exact-1")
    expect(alone, "kit-exact-10 ended with kit-exact-1")
    return "kit-exact-10 went on when kit-exact-1 was aborted"


@check("abort")
async def abort_of_an_ended_id(t: Target) -> str:
    """The abort of a request that has ended does not reach a later one of the same id."""
    await t.generate(t.prompt(1), 2, rid="kit-ended")
    await t.abort("kit-ended")
    reply = await t.generate(t.prompt(1), 24, rid="kit-ended")
    expect((reply.finish, len(reply.tokens)) == ("length", 24), f"it ended as {reply.finish}")
    return "24 tokens under the id that was aborted after its end"


@check("abort")
async def client_hang_up_frees(t: Target) -> str:
    """A client that closes its connection takes its request along."""
    async with t.flight(t.prompt(1), t.facts.long) as flight:
        await t.until_running(1)
        flight.task.cancel()
    return await t.until_freed()


async def _cut_and_resumed(t: Target, **more: object) -> str:
    ids = t.prompt(5, 20)
    length = 48
    whole = await t.generate(ids, length, **more)
    cuts = (1, 7, 16, 33)
    resumed = await t.together([t.generate([*ids, *whole.tokens[:at]], length - at, **more) for at in cuts])
    tails = [piece(whole, at, length) for at in cuts]
    told = equal(tails, resumed, t.facts.repeat_tolerance, "resumed")
    return f"cut after {', '.join(map(str, cuts))} tokens: {told}"


@check("abort")
async def resumed_greedy_equals_uncut(t: Target) -> str:
    """A greedy response that is cut anywhere and resumed as a longer prompt ends with the same tokens."""
    return await _cut_and_resumed(t)


@check("abort")
async def resumed_seeded_equals_uncut(t: Target) -> str:
    """So does a sampled one with a seed: noise depends on seed and absolute position only."""
    await need_seeds(t)
    try:
        return await _cut_and_resumed(t, temperature=1.0, sampling_seed=77)
    except CheckFailed as fault:
        if t.facts.ours:
            raise
        raise CapabilityAbsent(f"noise depends on more than seed and position: {fault}") from fault
