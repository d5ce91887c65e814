"""Streams of the client against a scripted engine: what is yielded, and which error each bad end is."""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

import pytest

from tests.scripted_engine import CUT, HANG, RESET, Answer, ScriptedEngine, reply
from turnout.core.errors import EngineBusy, EngineDead, EngineError, EngineRefused, VersionUnmet
from turnout.core.events import EngineWorked, Event
from turnout.core.types import Finish
from turnout.protocol.sglang import GenerateReply, GenerateRequest, SamplingParams
from turnout.protocol.stream import PartialReply, Stream
from turnout.serving.work import Work

REQUEST = GenerateRequest("r" * 32, (1, 2, 3), SamplingParams(max_new_tokens=4, sampling_seed=5))


LABEL = "v000000-0000000000000000"


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


def own(first: int, row: dict[str, Any]) -> dict[str, Any]:
    """An event with only its own tokens, from `first` on."""
    pairs = row["meta_info"]["output_token_logprobs"][first:]
    meta = row["meta_info"] | {"output_token_logprobs": pairs}
    return row | {"output_ids": row["output_ids"][first:], "meta_info": meta}


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_stream_tells_each_token_once_and_ends_with_the_whole_reply(cumulative: bool) -> None:
    rows = [partial(1), partial(3), reply(4)]
    got = streamed(Answer(body=body(*rows if cumulative else map(own, (0, 1, 3), rows))))
    assert [(type(item), len(item.output_ids), len(item.logprobs)) for item in got] == [
        (PartialReply, 1, 1), (PartialReply, 2, 2), (PartialReply, 1, 1), (GenerateReply, 4, 4)
    ]  # fmt: skip
    assert [token for item in got[:3] for token in item.output_ids] == reply(4)["output_ids"]
    assert got[1].spans == ((2, LABEL),) and got[3].spans == ((4, LABEL),)
    assert got[3].finish is Finish.LENGTH and got[3].output_ids == tuple(reply(4)["output_ids"])


def test_a_stream_is_work_of_its_engine_until_it_is_closed() -> None:
    class Told:
        events: ClassVar[list[Event]] = []

        def emit(self, event: Event) -> None:
            self.events.append(event)

    async def main() -> None:
        async with ScriptedEngine() as engine:
            engine.script("/generate", Answer(body=body(partial(1), partial(3), reply(4))))
            engine.script("/health", Answer(body=b"{}"))
            client = engine.client()
            client.work = Work("engine-0", Told(), client.clock)
            await client.health(10.0)
            async for item in client.generate_stream(REQUEST, 10.0):
                assert isinstance(item, GenerateReply) or not Told.events

    asyncio.run(main())
    assert [(event.engine, event.requests) for event in Told.events if isinstance(event, EngineWorked)] == [
        ("engine-0", 1)
    ]


def test_a_long_event_is_read_whole() -> None:
    long = reply(4)
    long["text"] = "x" * 1_000_000
    got = streamed(Answer(body=body(partial(3), long)))
    assert len(got[-1].text) == 1_000_000 and len(got) == 3


@pytest.mark.parametrize("cumulative", [True, False])
def test_rol_14_a_token_without_a_log_prob_ends_what_is_told(cumulative: bool) -> None:
    rows = [partial(2), partial(3), reply(4)]
    pairs = rows[1]["meta_info"]["output_token_logprobs"]
    pairs[2] = [float("nan"), pairs[2][1], None]
    if cumulative:
        rows[2]["meta_info"]["output_token_logprobs"][2] = pairs[2]
    else:
        rows = list(map(own, (0, 2, 3), rows))
    *_, whole = got = streamed(Answer(body=body(*rows)))
    assert [len(item.output_ids) for item in got] == [2, 2]
    assert whole.finish is Finish.ABORT and "log-prob" in whole.message


def old_label(row: dict[str, Any], label: str) -> dict[str, Any]:
    """Of an engine that names one version for a whole reply."""
    del row["meta_info"]["weight_versions"]
    row["meta_info"]["weight_version"] = label
    return row


def test_asy_13_without_spans_tokens_over_a_change_of_the_label_are_the_older_versions() -> None:
    a, b = "v000001-0123456789abcdef", "v000002-0123456789abcdef"
    rows = [
        old_label(partial(1), a),
        old_label(partial(2), b),
        old_label(partial(3), b),
        old_label(reply(4), b),
    ]
    got = streamed(Answer(body=body(*rows)))
    assert [item.spans for item in got] == [((1, a),), ((1, a),), ((1, b),), ((1, b),), ((2, a), (2, b))]
    stream = Stream(4, a, "e")  # what the engine served when the request was sent
    assert [item.spans for item in stream.take(old_label(reply(4), b))] == [((4, a),)] * 2


def test_marks_of_kv_of_older_weights_are_told_by_token() -> None:
    second, last = partial(3), reply(4)
    for row in (second, last):
        row["meta_info"]["kv_mixed"] = [[1, 2], [3, 4]]
    got = streamed(Answer(body=body(partial(1), second, last)))
    assert [item.kv_mixed for item in got] == [(0,), (1, 0), (1,), ((1, 2), (3, 4))]


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


@pytest.mark.parametrize(
    ("second", "words"),
    [(own(2, partial(3)), "begins at token 2, 1 were told"), (partial(0), "has 0 tokens, 1 were told")],
)
def test_lost_tokens_are_noticed(second: Any, words: str) -> None:
    *items, fault = streamed(Answer(body=body(partial(1), second)))
    assert len(items) == 1 and words in str(fault)


def test_a_silent_engine_meets_the_deadline() -> None:
    (fault,) = streamed(HANG, 0.05)
    assert type(fault) is EngineError and "waited 0.05 s" in str(fault)


def test_another_version_than_asked_for_says_what_is_served() -> None:
    row = {"error": {"message": "asks for"}, "served": {"version": "v000007-x", "root": "ab"}}
    (fault,) = streamed(Answer(409, row))
    assert type(fault) is VersionUnmet and (fault.last_version, fault.root) == ("v000007-x", "ab")
