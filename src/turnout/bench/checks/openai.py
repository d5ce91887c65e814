"""Checks of the OpenAI endpoints against /generate: the same text, plain and streamed, with the same counts."""

from __future__ import annotations

from typing import Any

from turnout.bench.registry import CapabilityAbsent, check, expect
from turnout.bench.replies import must, refused, rows
from turnout.bench.target import Target
from turnout.serving.exchange import DONE

PROMPT = "The quick brown fox"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}]
NEW = 16


async def _model(t: Target) -> str:
    return str(rows(await t.wire.get("/model_info")).get("served_model_name") or "default")


async def _body(t: Target, **more: Any) -> dict[str, Any]:
    return {"model": await _model(t), "max_tokens": NEW, "temperature": 0, "ignore_eos": True} | more


async def _events(t: Target, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    async with t.wire.stream(path, body | {"stream": True}) as stream:
        if stream.status != 200:
            must(await stream.answer())
        ended = False
        async for event in stream.events():
            ended = event == DONE
            if not ended:
                events.append(event)
    expect(ended, "the stream ended without [DONE]")
    return events


def _tokenizer(t: Target) -> Any:
    found = t.reference.tokenizer()
    if found is None:
        raise CapabilityAbsent("the model's folder has no tokenizer")
    return found


def _chat_ids(t: Target) -> list[int]:
    tokenizer = _tokenizer(t)
    if not tokenizer.chat_template:
        raise CapabilityAbsent("the model's tokenizer has no chat template")
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@check("openai")
async def completions(t: Target) -> str:
    """/v1/completions answers the text and the counts of /generate."""
    _tokenizer(t)
    row = rows(await t.wire.post("/v1/completions", await _body(t, prompt=PROMPT)))
    want = await t.generate((), NEW, text=PROMPT)
    choice, usage = row["choices"][0], row["usage"]
    seen = (choice["text"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])
    expected = (want.text, "length", want.prompt_tokens, NEW)
    expect(seen == expected, f"text, finish and counts are {seen}, not {expected}")
    return f"{NEW} tokens, {usage['prompt_tokens']} prompt tokens, text as of /generate"


@check("openai")
async def completions_of_ids_with_log_probs(t: Target) -> str:
    """/v1/completions takes token ids, and its log-probs are those of /generate."""
    _tokenizer(t)
    body = await _body(t, prompt=t.prompt(1), logprobs=0)
    row = rows(await t.wire.post("/v1/completions", body))
    want = await t.generate(t.prompt(1), NEW)
    found = row["choices"][0].get("logprobs")
    if found is None:
        raise CapabilityAbsent("no logprobs in the choice")
    gap = max(abs(a - b) for a, b in zip(found["token_logprobs"], want.logprobs, strict=True))
    expect(gap <= max(t.facts.repeat_tolerance, 1e-4), f"log-probs differ by {gap:.4f}")
    return f"{NEW} log-probs, difference at most {gap:.2g}"


@check("openai")
async def completions_streamed(t: Target) -> str:
    """The pieces of a streamed completion make the text of the plain one."""
    _tokenizer(t)
    plain = rows(await t.wire.post("/v1/completions", await _body(t, prompt=PROMPT)))
    events = await _events(t, "/v1/completions", await _body(t, prompt=PROMPT))
    pieces = [choice.get("text") or "" for event in events for choice in event["choices"]]
    finish = [c["finish_reason"] for event in events for c in event["choices"] if c.get("finish_reason")]
    expect("".join(pieces) == plain["choices"][0]["text"], f"the pieces make {''.join(pieces)!r}")
    expect(finish == ["length"], f"finish reasons {finish}")
    return f"{len(events)} events make the {len(''.join(pieces))} characters of the plain answer"


@check("openai")
async def chat_completions(t: Target) -> str:
    """/v1/chat/completions answers what /generate answers to the messages in the model's template."""
    ids = _chat_ids(t)
    row = rows(await t.wire.post("/v1/chat/completions", await _body(t, messages=MESSAGES)))
    want = await t.generate(ids, NEW)
    choice, usage = row["choices"][0], row["usage"]
    seen = (choice["message"]["role"], choice["message"]["content"], usage["prompt_tokens"])
    expected = ("assistant", want.text, len(ids))
    expect(seen == expected, f"role, content and prompt tokens are {seen}, not {expected}")
    return f"{len(ids)} prompt tokens by the template, content as of /generate"


@check("openai")
async def chat_completions_streamed(t: Target) -> str:
    """The pieces of a streamed chat completion make the content of the plain one; the first tells the role."""
    _chat_ids(t)
    plain = rows(await t.wire.post("/v1/chat/completions", await _body(t, messages=MESSAGES)))
    events = await _events(t, "/v1/chat/completions", await _body(t, messages=MESSAGES))
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    expect(text == plain["choices"][0]["message"]["content"], f"the pieces make {text!r}")
    expect(deltas[0].get("role") == "assistant", f"the first piece is {deltas[0]}")
    return f"{len(events)} events make the {len(text)} characters of the plain answer"


@check("openai")
async def openai_bad_requests(t: Target) -> str:
    """No messages, no prompt and no JSON are a 400."""
    model = await _model(t)
    told = refused(await t.wire.post("/v1/chat/completions", {"model": model, "messages": []}))
    refused(await t.wire.post("/v1/completions", {"model": model}))
    refused(await t.wire.post("/v1/completions", b"{no json"))
    return told[:160]


@check("openai")
async def models_are_listed(t: Target) -> str:
    """/v1/models names the served model."""
    row = rows(await t.wire.get("/v1/models"))
    names = [model["id"] for model in row["data"]]
    expect(await _model(t) in names, f"{await _model(t)} is not among {names}")
    return f"{names}"
