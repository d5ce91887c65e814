"""Checks of plain and streamed generation: what comes back, that it is the same every time and in company, and
that repeated prompts are not computed twice."""

from __future__ import annotations

from typing import Any

from turnout.bench.compare import equal
from turnout.bench.registry import CapabilityAbsent, CheckFailed, check, expect
from turnout.bench.replies import Reply, must, refused, reply_of, rows
from turnout.bench.target import Target, request_body
from turnout.serving.exchange import DONE


@check("generation")
async def generate_from_ids(t: Target) -> str:
    """input_ids in, that many tokens with log-probs out, under the id that was given."""
    ids = t.prompt(1)
    reply = await t.generate(ids, 9, rid="kit-generate-from-ids")
    expect(reply.rid == "kit-generate-from-ids", f"meta_info.id is {reply.rid}")
    expect(reply.finish == "length", f"finish_reason is {reply.finish}, not length")
    counts = (len(reply.tokens), len(reply.logprobs), reply.prompt_tokens)
    expect(counts == (9, 9, len(ids)), f"{counts} tokens, log-probs, prompt tokens, not (9, 9, {len(ids)})")
    return f"9 tokens, 9 log-probs, finish length, {len(ids)} prompt tokens"


@check("generation")
async def generate_from_text(t: Target) -> str:
    """A text gives what its token ids give, and the answer's text is its tokens decoded."""
    tokenizer = t.reference.tokenizer()
    if tokenizer is None:
        raise CapabilityAbsent("the model's folder has no tokenizer")
    text = "The capital of France is"
    ids = list(tokenizer(text)["input_ids"])
    from_text, from_ids = await t.generate((), 8, text=text), await t.generate(ids, 8)
    expect(from_text.prompt_tokens == len(ids), f"{from_text.prompt_tokens} prompt tokens, not {len(ids)}")
    expect(from_text.tokens == from_ids.tokens, f"{from_text.tokens} from text, {from_ids.tokens} from ids")
    reply = await _of_known_ids(t, len(tokenizer))
    decoded = tokenizer.decode(list(reply.tokens), skip_special_tokens=True)
    expect(reply.text == decoded, f"text {reply.text!r}, the tokens are {decoded!r}")
    return f"{len(ids)} prompt tokens both ways, text is the {len(decoded)} characters of its tokens"


async def _of_known_ids(t: Target, known: int) -> Reply:
    """A reply whose ids the tokenizer has: a model may make others, and SGLang shows them as id 0."""
    for seed in range(120, 160):
        reply = await t.generate(t.prompt(seed), 5)
        if max(reply.tokens) < known:
            return reply
    raise CapabilityAbsent("every greedy response of this model has ids that its tokenizer lacks")


@check("generation")
async def log_probs_only_when_asked(t: Target) -> str:
    """Without return_logprob there are no log-probs, and the tokens are the same."""
    plain = await t.generate(t.prompt(1), 8, return_logprob=False)
    asked = await t.generate(t.prompt(1), 8)
    expect(not plain.logprobs, f"{len(plain.logprobs)} log-probs that nobody asked for")
    expect(plain.tokens == asked.tokens, f"{plain.tokens} without log-probs, {asked.tokens} with them")
    return "same 8 tokens without and with log-probs"


@check("generation")
async def greedy_repeats(t: Target) -> str:
    """The same greedy request gives the same tokens and log-probs each time."""
    first = [await t.generate(ids, 12) for ids in t.prompts(4)]
    again = [await t.generate(ids, 12) for ids in t.prompts(4)]
    return equal(first, again, t.facts.repeat_tolerance, "the second time")


@check("generation")
async def greedy_in_company(t: Target) -> str:
    """Eight greedy requests at once give what each gives alone."""
    alone = [await t.generate(ids, 12) for ids in t.prompts()]
    company = await t.together([t.generate(ids, 12) for ids in t.prompts()])
    return equal(alone, company, t.facts.repeat_tolerance, "in company")


@check("generation")
async def more_requests_than_fit(t: Target) -> str:
    """More requests at once than may run are all answered, each with its own tokens."""
    count = min(3 * t.facts.max_running, 48)
    asked = [t.prompts()[at % 8] for at in range(count)]
    replies = await t.together([t.generate(ids, 6) for ids in asked])
    expect(len({reply.rid for reply in replies}) == count, "two answers carry one id")
    return equal(
        replies[:8] * (count // 8), replies[: count // 8 * 8], t.facts.repeat_tolerance, "later ones"
    )


@check("generation")
async def usage_counts(t: Target) -> str:
    """prompt_tokens and completion_tokens are the numbers of tokens, for prompts of many lengths."""
    lengths = [1, 2, 15, 16, 17, 63, 64, 65]
    replies = await t.together(
        [t.generate(t.prompt(40 + n, n), 1 + n % 5, return_logprob=True) for n in lengths]
    )
    seen = [(r.prompt_tokens, r.completion_tokens, len(r.tokens)) for r in replies]
    want = [(n, 1 + n % 5, 1 + n % 5) for n in lengths]
    expect(seen == want, f"(prompt, completion, tokens) are {seen}, not {want}")
    return f"right for prompts of {', '.join(map(str, lengths))} tokens"


@check("generation")
async def repeated_prompt_is_reused(t: Target) -> str:
    """A prompt that was computed before is not computed again, and its answer is the same."""
    ids = t.prompt(7001, 96)
    first, second = await t.generate(ids, 8), await t.generate(ids, 8)
    if second.cached_tokens == 0:
        raise CapabilityAbsent("cached_tokens is 0 for a repeated prompt: nothing is kept between requests")
    evidence = equal([first], [second], t.facts.repeat_tolerance, "from the cache")
    return f"{first.cached_tokens} then {second.cached_tokens} of {len(ids)} tokens cached; {evidence}"


@check("generation")
async def flush_cache_forgets(t: Target) -> str:
    """After /flush_cache a repeated prompt is computed again; while requests run the call is refused."""
    ids = t.prompt(7002, 96)
    await t.generate(ids, 2)
    must(await t.wire.post("/flush_cache", {}))
    after = await t.generate(ids, 2)
    expect(after.cached_tokens == 0, f"{after.cached_tokens} tokens cached after the flush")
    async with t.flight(t.prompt(3), t.facts.long) as flight:
        await t.until_running(1)
        busy = await t.wire.post("/flush_cache", {})
        await t.control("/abort_request", {"rid": flight.rid})
        await flight.answer()
    expect(busy.status == 400, f"flush while a request runs answered {busy.status}")
    return "0 tokens cached after the flush; 400 while a request runs"


async def streamed(t: Target, ids: list[int], new: int, **more: Any) -> tuple[list[Reply], list[float]]:
    """The events of one stream as replies that hold all tokens so far (engines send them so, or send each
    event's own only), and the times at which they came."""
    body = request_body(ids, new, {"stream": True, **more})
    replies: list[Reply] = []
    times: list[float] = []
    async with t.wire.stream("/generate", body) as stream:
        if stream.status != 200:
            must(await stream.answer())
        ended = False
        async for event in stream.events():
            ended = event == DONE
            if not ended:
                if "error" in event:
                    raise CheckFailed(f"an error in the stream: {event['error']}")
                replies.append(reply_of(event))
                times.append(t.clock.now())
    expect(ended, "the stream ended without [DONE]")
    return replies, times


@check("streaming")
async def stream_equals_plain(t: Target) -> str:
    """The last event of a stream holds what the plain call answers."""
    plain = [await t.generate(ids, 20) for ids in t.prompts(3)]
    last = [(await streamed(t, ids, 20))[0][-1] for ids in t.prompts(3)]
    expect([r.finish for r in last] == ["length"] * 3, f"finish reasons {[r.finish for r in last]}")
    expect([r.text for r in last] == [r.text for r in plain], "the texts differ")
    return equal(plain, last, t.facts.repeat_tolerance, "streamed")


@check("streaming")
async def stream_is_incremental(t: Target) -> str:
    """Tokens come while later ones are still computed, and each event extends the one before."""
    replies, times = await streamed(t, t.prompt(2), 40)
    counts = [reply.completion_tokens for reply in replies]
    expect(counts == sorted(counts) and counts[-1] == 40, f"completion_tokens of the events: {counts}")
    expect(len(replies) >= 3, f"only {len(replies)} events for 40 tokens")
    final = replies[-1].tokens
    for reply in replies:
        expect(final[: len(reply.tokens)] == reply.tokens, "an event's tokens are no beginning of the last's")
    expect(times[0] < times[-1], "all events came at one time")
    return f"{len(replies)} events, {counts[0]} tokens in the first, 40 in the last"


@check("streaming")
async def stream_of_a_bad_request(t: Target) -> str:
    """A bad request that asks for a stream is refused: by status, or by an error event before [DONE]."""
    body = request_body(t.prompt(1), 4, {"stream": True, "temperature": -1.0})
    async with t.wire.stream("/generate", body) as stream:
        if stream.status != 200:
            return f"{stream.status}: {refused(await stream.answer())[:120]}"
        events = [event async for event in stream.events()]
    errors = [event["error"] for event in events if isinstance(event, dict) and "error" in event]
    expect(bool(errors), f"no error among {len(events)} events")
    return f"error event: {str(errors[0])[:120]}"


@check("streaming")
async def stream_hang_up_frees(t: Target) -> str:
    """A client that leaves its stream takes the request along."""
    body = request_body(t.prompt(2), t.facts.long, {"stream": True})
    async with t.wire.stream("/generate", body) as stream:
        if stream.status != 200:
            must(await stream.answer())
        async for event in stream.events():
            expect(event != DONE, "the stream ended before the client left")
            break
    return await t.until_freed()


@check("information")
async def info_under_both_names(t: Target) -> str:
    """/server_info and /model_info answer, also under their old names, with the same model and version."""
    told = []
    for name in ("model_info", "get_model_info", "server_info", "get_server_info"):
        row = rows(await t.wire.get(f"/{name}"))
        told.append(row.get("model_path"))
        if "model" in name:
            expect(row.get("weight_version") == t.facts.label, f"{name}: version {row.get('weight_version')}")
    expect(len(set(told)) == 1 and told[0], f"model_path differs: {told}")
    return f"four endpoints name {told[0]}"


@check("information")
async def loads_count_requests(t: Target) -> str:
    """/v1/loads counts what runs, and nothing when idle."""
    idle = await t.load()
    expect(sum(idle.values()) == 0, f"idle, and yet {idle}")
    async with t.flight(t.prompt(1), t.facts.long) as one, t.flight(t.prompt(2), t.facts.long) as two:
        await t.until_running(2)
        busy = await t.load()
        for flight in (one, two):
            await t.control("/abort_request", {"rid": flight.rid})
            await flight.answer()
    expect(busy["num_running_reqs"] == 2, f"two requests run, and the load is {busy}")
    return "0 idle, 2 while two run"


@check("information")
async def health_answers(t: Target) -> str:
    """/health and /health_generate answer 200, also while a request runs."""
    for path in ("/health", "/health_generate"):
        must(await t.wire.get(path))
    async with t.flight(t.prompt(1), t.facts.long) as flight:
        await t.until_running(1)
        for path in ("/health", "/health_generate"):
            must(await t.wire.get(path))
        await t.control("/abort_request", {"rid": flight.rid})
        await flight.answer()
    return "200 idle and busy"


@check("information")
async def metrics_in_prometheus_form(t: Target) -> str:
    """/metrics is Prometheus text whose counters of generated tokens grow with what is generated."""
    before = _counters(must(await t.wire.get("/metrics")).text)
    await t.generate(t.prompt(5), 16)
    after = _counters(must(await t.wire.get("/metrics")).text)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    tokens = {n: g for n, g in grown.items() if "generation_tokens" in n and "bucket" not in n and g > 0}
    expect(bool(tokens), f"no counter of generation_tokens grew among {len(after)} samples")
    name, grew = max(tokens.items(), key=lambda item: item[1])
    expect(grew >= 16, f"{name} grew by {grew:g} for 16 tokens")
    return f"{len(after)} samples; {name} grew by {grew:g} for 16 tokens"


def _counters(text: str) -> dict[str, float]:
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples
