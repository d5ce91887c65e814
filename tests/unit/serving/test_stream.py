"""Streams of the client against a scripted engine: what is yielded, and which error each bad end is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.scripted_engine import CUT, HANG, RESET, Answer, ScriptedEngine, reply
from turnout.core.errors import EngineBusy, EngineDead, EngineError, EngineRefused, VersionUnmet
from turnout.core.types import Finish
from turnout.protocol.sglang import GenerateReply, GenerateRequest, PartialReply, SamplingParams

REQUEST = GenerateRequest("r" * 32, (1, 2, 3), SamplingParams(max_new_tokens=4, sampling_seed=5))


def partial(count: int) -> dict[str, Any]:
    row = reply(count)
    row["meta_info"]["finish_reason"] = None
    return row


def body(*rows: Any, done: bool = True) -> bytes:
    events = [f"data: {json.dumps(row)}\n\n" for row in rows] + ["data: [DONE]\n\n"] * done
    return "".join(events).encode()


def streamed(answer: Answer, deadline_s: float = 10.0) -> list[Any]:
    """What the stream yields, and at its end what it raised."""

    async def main() -> list[Any]:
        got: list[Any] = []
        async with ScriptedEngine() as engine:
            engine.script("/generate", answer)
            try:
                stream = engine.client().generate_stream(REQUEST, deadline_s)
                async for item in stream:
                    got.append(item)  # noqa: PERF401 - what came before a fault is kept
            except EngineError as fault:
                got.append(fault)
            assert engine.sent("/generate") == [REQUEST.to_json() | {"stream": True}]
        return got

    return asyncio.run(main())


def test_a_stream_grows_and_ends_with_the_whole_reply() -> None:
    got = streamed(Answer(body=body(partial(1), partial(3), reply(4))))
    assert [(type(item), len(item.output_ids), len(item.logprobs)) for item in got] == [
        (PartialReply, 1, 1), (PartialReply, 3, 3), (GenerateReply, 4, 4)
    ]  # fmt: skip
    assert got[1].spans == ((3, "v000000-0000000000000000"),) and got[2].finish is Finish.LENGTH


def test_a_long_event_is_read_whole() -> None:
    long = partial(3)
    long["text"] = "x" * 1_000_000
    got = streamed(Answer(body=body(long, reply(4))))
    assert len(got[0].text) == 1_000_000 and len(got) == 2


@pytest.mark.parametrize(
    ("answer", "kind", "kept", "words"),
    [
        (Answer(body=body(partial(1), done=False)), EngineDead, 1, "before its last event"),
        (Answer(body=body(partial(2))), EngineDead, 1, "before its last event"),
        (Answer(body=b""), EngineDead, 0, "before its last event"),
        (Answer(body=body(partial(1), reply(4)), ending="cut"), EngineDead, 0, "not completed"),
        (CUT, EngineDead, 0, "/generate"),
        (RESET, EngineDead, 0, "/generate"),
        (Answer(body=body({"error": {"message": "no", "code": 400}})), EngineRefused, 0, "no"),
        (Answer(body=body(partial(1), {"error": {"message": "broke", "code": 500}})), EngineError, 1, "broke"),
        (Answer(body=body([1])), EngineError, 0, "not understood"),
        (Answer(body=b"data: {\n\n"), EngineError, 0, "not understood"),
        (Answer(400, {"error": {"message": "context"}}), EngineRefused, 0, "context"),
        (Answer(429, {"error": {"message": "full"}}), EngineBusy, 0, "full"),
    ],
)  # fmt: skip
def test_bad_ends(answer: Answer, kind: type[EngineError], kept: int, words: str) -> None:
    *items, fault = streamed(answer)
    assert type(fault) is kind and len(items) >= kept and words in str(fault)


def test_differences_instead_of_all_tokens_are_not_mistaken_for_them() -> None:
    second = partial(1)
    second["meta_info"]["completion_tokens"] = 2
    *items, fault = streamed(Answer(body=body(partial(1), second)))
    assert len(items) == 1 and "1 of 2 tokens: not cumulative" in str(fault)


def test_a_silent_engine_meets_the_deadline() -> None:
    (fault,) = streamed(HANG, 0.05)
    assert type(fault) is EngineError and "waited 0.05 s" in str(fault)


def test_another_version_than_asked_for_says_what_is_served() -> None:
    row = {"error": {"message": "asks for"}, "served": {"version": "v000007-x", "root": "ab"}}
    (fault,) = streamed(Answer(409, row))
    assert type(fault) is VersionUnmet and (fault.last_version, fault.root) == ("v000007-x", "ab")
