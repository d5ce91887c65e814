"""Checks of what ends a generation, and of what it says then."""

from __future__ import annotations

from turnout.bench.registry import CapabilityAbsent, check, expect
from turnout.bench.replies import Reply
from turnout.bench.target import Target

LENGTH = 48
ROUNDS = 6


async def _fresh_place(t: Target) -> tuple[list[int], Reply, int]:
    """A prompt, its greedy response, and a place of it whose token did not come before: 5 or later, and not the
    last, where SGLang says length. No end id comes up to it: ignore_eos, which SGLang takes to mean stop ids as
    well, can be left out."""
    for seed in range(50, 70):
        ids = t.prompt(seed)
        reply = await t.generate(ids, LENGTH)
        for at in range(5, LENGTH - 1):
            before = reply.tokens[:at]
            if reply.tokens[at] not in before and not {*before, reply.tokens[at]} & set(t.facts.eos_ids):
                return ids, reply, at
    raise CapabilityAbsent("no greedy response of this model has a new token after its fifth")


@check("stopping")
async def stop_token_ids(t: Target) -> str:
    """A stop id ends the response at its first place, included in the tokens, with finish stop."""
    ids, free, at = await _fresh_place(t)
    reply = await t.generate(ids, LENGTH, stop_token_ids=[free.tokens[at]], ignore_eos=False)
    expect(reply.finish == "stop", f"finish_reason is {reply.finish}")
    expect(reply.tokens == free.tokens[: at + 1], f"{len(reply.tokens)} tokens, the stop id is token {at}")
    return f"ended at token {at} of {LENGTH}, the stop id"


@check("stopping")
async def stop_names_what_matched(t: Target) -> str:
    """finish_reason.matched is the stop id or the stop string that ended the response."""
    ids, free, at = await _fresh_place(t)
    reply = await t.generate(ids, LENGTH, stop_token_ids=[free.tokens[at]], ignore_eos=False)
    if reply.matched is None:
        raise CapabilityAbsent("finish_reason has no matched")
    expect(reply.matched == free.tokens[at], f"matched is {reply.matched}, the stop id {free.tokens[at]}")
    return f"matched is {reply.matched}"


async def _letters(t: Target) -> tuple[list[int], Reply, str]:
    """A prompt, its response, and two characters of its text whose first place is not at its beginning."""
    for seed in range(70, 110):
        ids = t.prompt(seed)
        reply = await t.generate(ids, LENGTH, temperature=0.0)
        for at in range(4, len(reply.text) - 1):
            pair = reply.text[at : at + 2]
            if reply.text.find(pair) == at and pair.isascii() and pair.isprintable():
                return ids, reply, pair
    raise CapabilityAbsent("no greedy text of this model has two plain characters in a new order")


@check("stopping")
async def stop_string(t: Target) -> str:
    """A stop string ends the response, and the text ends before it."""
    ids, free, pair = await _letters(t)
    reply = await t.generate(ids, LENGTH, stop=[pair[0]])
    cut = free.text[: free.text.find(pair[0])]
    expect(reply.finish == "stop", f"finish_reason is {reply.finish}")
    expect(reply.text == cut, f"text is {reply.text!r}, not {cut!r}")
    expect(
        free.tokens[: len(reply.tokens)] == reply.tokens, "the tokens are no beginning of the free response"
    )
    return f"text cut before {pair[0]!r} after {len(reply.tokens)} of {LENGTH} tokens"


@check("stopping")
async def stop_string_over_tokens(t: Target) -> str:
    """A stop string that several tokens make together is found; one that never comes changes nothing."""
    ids, free, pair = await _letters(t)
    asked = [t.generate(ids, LENGTH, stop=stop) for stop in ([pair], "\x00never\x00", ["\x00", pair])]
    found, never, second = await t.together(asked)
    cut = free.text[: free.text.find(pair)]
    expect((found.finish, found.text) == ("stop", cut), f"{found.finish} with {found.text!r}, not {cut!r}")
    expect((second.finish, second.text) == ("stop", cut), "the second of two stop strings was missed")
    expect((never.finish, never.tokens) == ("length", free.tokens), "a stop string that never comes mattered")
    return f"{pair!r} found after {len(found.tokens)} tokens"


@check("stopping")
async def min_new_tokens(t: Target) -> str:
    """Before min_new_tokens a stop id is not drawn, and the response goes on."""
    ids, free, at = await _fresh_place(t)
    stop = free.tokens[at]
    more = {"stop_token_ids": [stop], "min_new_tokens": at + 3, "ignore_eos": False}
    reply = await t.generate(ids, LENGTH, **more)
    expect(len(reply.tokens) >= at + 3, f"{len(reply.tokens)} tokens, at least {at + 3} were asked for")
    expect(stop not in reply.tokens[: at + 2], f"the stop id was drawn before token {at + 3}")
    return f"{len(reply.tokens)} tokens where the stop id alone ends after {at + 1}"


@check("stopping")
async def max_new_tokens(t: Target) -> str:
    """Responses end at max_new_tokens exactly, with finish length."""
    replies = await t.together([t.generate(t.prompt(1), n) for n in (1, 2, 15, 16, 17, 33)])
    seen = [(len(r.tokens), r.finish) for r in replies]
    expect(seen == [(n, "length") for n in (1, 2, 15, 16, 17, 33)], f"tokens and finish: {seen}")
    return "1, 2, 15, 16, 17 and 33 tokens"


@check("stopping")
async def max_new_tokens_0(t: Target) -> str:
    """max_new_tokens 0 is legal: no token, finish length, the prompt counted."""
    reply = await t.generate(t.prompt(1), 0)
    seen = (len(reply.tokens), reply.finish, reply.prompt_tokens)
    expect(seen == (0, "length", 12), f"tokens, finish and prompt tokens are {seen}")
    return "0 tokens, finish length, 12 prompt tokens"


@check("stopping")
async def ignore_eos(t: Target) -> str:
    """An end id ends a response with finish stop; with ignore_eos it is a token like others."""
    if not t.facts.eos_ids:
        raise CapabilityAbsent("the model has no end id")
    for turn in range(ROUNDS):
        more = [{"temperature": 1.0 + turn / 4, "sampling_seed": 100 * turn + at} for at in range(8)]
        free = await t.together([t.generate(t.prompt(at), 160, **row) for at, row in enumerate(more)])
        expect(all(len(r.tokens) == 160 for r in free), "a response ended early in spite of ignore_eos")
        ended = await t.together(
            [t.generate(t.prompt(at), 160, ignore_eos=False, **row) for at, row in enumerate(more)]
        )
        for reply in ended:
            inside = [at for at, token in enumerate(reply.tokens) if token in t.facts.eos_ids]
            last = [len(reply.tokens) - 1] if reply.finish == "stop" else []
            expect(inside == last, f"end ids at {inside}, {len(reply.tokens)} tokens, finish {reply.finish}")
        stopped = sum(reply.finish == "stop" for reply in ended)
        kept = sum(any(token in t.facts.eos_ids for token in reply.tokens) for reply in free)
        if stopped and kept:
            return f"{stopped} of 8 ended at an end id, {kept} of 8 went on over one with ignore_eos"
    raise CapabilityAbsent(f"no end id was drawn in {ROUNDS * 16} responses of 160 tokens")
