"""Checks of bad requests: each is refused with a 400 that names the fault, and the engine answers on."""

from __future__ import annotations

from typing import Any

from turnout.bench.registry import CapabilityAbsent, check, expect
from turnout.bench.replies import must, refused, reply_of, rows
from turnout.bench.target import Target


async def _answers_on(t: Target) -> None:
    await t.generate(t.prompt(1), 2)


@check("requests")
async def malformed_json(t: Target) -> str:
    """A body that is no JSON, or no object, is a 400."""
    told = [refused(await t.wire.post("/generate", body))[:60] for body in (b"{no json", b"[1, 2]", b'"a"')]
    await _answers_on(t)
    return "; ".join(told)


@check("requests", risky="an engine that does not check them reads outside its embeddings, and ends")
async def ids_outside_the_vocabulary(t: Target) -> str:
    """A token id above the vocabulary or below 0 is a 400."""
    ids = (t.facts.vocabulary, t.facts.vocabulary + 10**6, -1)
    told = []
    for token in ids:
        answer = await t.ask([16, token], 2)
        if answer.status == 200 and not t.facts.ours:
            raise CapabilityAbsent(
                f"id {token} of {t.facts.vocabulary} was answered with 200: ids are not checked"
            )
        told.append(refused(answer, str(token))[:80])
        await _answers_on(t)
    return told[0]


@check("requests")
async def empty_prompt(t: Target) -> str:
    """A prompt without tokens, and a request without a prompt, are a 400."""
    told = refused(await t.ask([], 2))
    refused(await t.wire.post("/generate", {"sampling_params": {"max_new_tokens": 2}}))
    await _answers_on(t)
    return told[:120]


@check("requests")
async def prompt_longer_than_the_context(t: Target) -> str:
    """A prompt, and a prompt with its new tokens, that don't fit are a 400 that names both numbers."""
    context = t.facts.context
    told = refused(await t.ask(t.prompt(1, context + 5), 1), str(context))
    expect(
        any(str(n) in told for n in (context + 5, context + 6)), f"the prompt's length is not named: {told}"
    )
    both = refused(await t.ask(t.prompt(1, context - 4), 9), str(context), str(context + 5))
    await _answers_on(t)
    return both[:160]


@check("requests")
async def duplicate_rid(t: Target) -> str:
    """An id that a running request has is refused, and that request goes on."""
    async with t.flight(t.prompt(1), t.facts.lasting, rid="kit-duplicate") as flight:
        await t.until_running(1)
        told = refused(await t.ask(t.prompt(2), 4, rid="kit-duplicate"))
        reply = await flight.reply()
    expect(
        (reply.finish, len(reply.tokens)) == ("length", t.facts.lasting),
        f"the first one ended as {reply.finish}",
    )
    return told[:120]


@check("requests")
async def unknown_fields_are_ignored(t: Target) -> str:
    """Fields of the body that nobody knows change nothing."""
    plain = await t.generate(t.prompt(1), 8)
    novel = reply_of(must(await t.ask(t.prompt(1), 8, novel={"a": 1})).row)
    expect(novel.tokens == plain.tokens, f"{novel.tokens}, without the field {plain.tokens}")
    return "a field novel changes nothing"


BAD_PARAMETERS: tuple[dict[str, Any], ...] = (
    {"temperature": -1.0},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"top_k": 0, "temperature": 1.0},
    {"min_p": 1.5},
    {"max_new_tokens": -1},
    {"min_new_tokens": -1},
    {"temperature": "hot"},
    {"max_new_tokens": "many"},
)


@check("requests")
async def bad_sampling_parameters(t: Target) -> str:
    """Sampling parameters out of range or of the wrong kind are a 400."""
    taken = []
    for row in BAD_PARAMETERS:
        answer = await t.ask(t.prompt(1), **({"new": 4} | row))
        if answer.status != 400:
            taken.append(f"{row} answered {answer.status}")
    await _answers_on(t)
    if taken and not t.facts.ours and len(taken) < len(BAD_PARAMETERS) // 2:
        raise CapabilityAbsent(f"not refused: {'; '.join(taken)}")
    expect(not taken, "; ".join(taken))
    return f"{len(BAD_PARAMETERS)} of {len(BAD_PARAMETERS)} refused"


@check("requests")
async def unknown_endpoint(t: Target) -> str:
    """A path that does not exist is a 404, a wrong method a 405."""
    none, wrong = await t.wire.get("/kit/nothing"), await t.wire.send("DELETE", "/generate")
    expect((none.status, wrong.status) == (404, 405), f"{none.status} and {wrong.status}")
    return "404 and 405"


@check("requests")
async def control_needs_the_token(t: Target) -> str:
    """Where the engine has an admin token, control calls without it are refused, and generation is not."""
    if t.token is None:
        raise CapabilityAbsent("no admin token was given: --admin-token-env")
    calls = ("/pause_generation", "/abort_request", "/update_weights_from_disk", "/flush_cache")
    for path in calls:
        for token in (None, "wrong"):
            answer = await t.wire.send("POST", path, {"rid": "kit-nobody"}, token=token)
            expect(answer.status in (401, 403), f"{path} without the token answered {answer.status}")
    rows(await t.wire.get("/server_info"))
    return f"{len(calls)} control calls refused without the token and with a wrong one"
