"""A request to the two halves of a PD pair, on scripted engines: what each gets, and how it ends when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.scripted_engine import HANG, Answer, ScriptedEngine, reply
from turnout.core.address import Address
from turnout.core.errors import EngineBusy, EngineDead, EngineError, EngineRefused, VersionUnmet
from turnout.core.types import Finish
from turnout.protocol.sglang import GenerateReply, GenerateRequest, SamplingParams
from turnout.protocol.stream import PartialReply
from turnout.serving.pair import Way

REQUEST = GenerateRequest("r", (1, 2), SamplingParams(max_new_tokens=4))
DEADLINE_S = 20.0


def on_a_pair(work: Callable[[ScriptedEngine, ScriptedEngine, Way], Awaitable[None]]) -> None:
    async def main() -> None:
        async with ScriptedEngine("p") as prefill, ScriptedEngine("d") as decode:
            way = Way(decode.client(), prefill.client())
            assert way.first is not None
            way.first.bootstrap_port = 77
            await asyncio.wait_for(work(prefill, decode, way), DEADLINE_S / 2)

    asyncio.run(main())


async def items(way: Way, request: GenerateRequest = REQUEST) -> list[Any]:
    return [item async for item in way.stream(request, DEADLINE_S)]


def test_both_halves_get_the_same_request_and_decode_answers() -> None:
    async def work(prefill: ScriptedEngine, decode: ScriptedEngine, way: Way) -> None:
        prefill.script("/generate", Answer(body=reply(1)))
        first, last = await items(way)
        assert isinstance(last, GenerateReply) and last.finish is Finish.LENGTH and len(last.output_ids) == 4
        assert [(part.output_ids, part.engine_id) for part in way.begun(first)] == [
            (last.output_ids[:1], "p"),
            (last.output_ids[1:], "d"),
        ]
        (one,), (other,) = prefill.sent("/generate"), decode.sent("/generate")
        assert one | {"stream": True} == other
        assert (one["bootstrap_host"], one["bootstrap_port"], one["rid"]) == ("127.0.0.1", 77, "r")
        await items(way)
        rooms = {body["bootstrap_room"] for body in decode.sent("/generate")}
        assert len(rooms) == 2 and all(0 <= room < 1 << 63 for room in rooms)

    on_a_pair(work)


@pytest.mark.parametrize(
    "answer, fault",
    [
        (Answer(429), EngineBusy),
        (Answer(400), EngineRefused),
        (Answer(409, {"served": {"version": "v", "root": "r"}}), VersionUnmet),
        (Answer(500), EngineError),
        (Answer(ending="reset"), EngineDead),
    ],
)
def test_rtr_20_a_prefill_half_that_fails_ends_the_other(answer: Answer, fault: type[EngineError]) -> None:
    async def work(prefill: ScriptedEngine, decode: ScriptedEngine, way: Way) -> None:
        prefill.script("/generate", answer)
        decode.script("/generate", HANG)
        with pytest.raises(fault) as raised:
            await items(way)
        assert type(raised.value) is fault and raised.value.engine_id == "p"
        await decode.until_running(0)

    on_a_pair(work)


def test_an_abort_of_the_prefill_half_is_one_of_the_request() -> None:
    async def work(prefill: ScriptedEngine, decode: ScriptedEngine, way: Way) -> None:
        row = reply(1, finish=Finish.ABORT)
        row["meta_info"]["finish_reason"]["message"] = "no pages"
        prefill.script("/generate", Answer(body=row))
        decode.script("/generate", HANG)
        (only,) = await items(way)
        assert (only.finish, only.message, only.output_ids) == (Finish.ABORT, "no pages", ())
        await decode.until_running(0)

    on_a_pair(work)


def test_a_decode_half_that_fails_ends_the_other() -> None:
    async def work(prefill: ScriptedEngine, decode: ScriptedEngine, way: Way) -> None:
        prefill.script("/generate", HANG)
        decode.script("/generate", Answer(503))
        with pytest.raises(EngineBusy):
            await items(way)
        await prefill.until_running(0)

    on_a_pair(work)


def test_a_prefill_half_that_hangs_after_the_first_token_is_left() -> None:
    async def work(prefill: ScriptedEngine, decode: ScriptedEngine, way: Way) -> None:
        prefill.script("/generate", HANG)
        assert (await items(way))[-1].finish is Finish.LENGTH
        await prefill.until_running(0)

    on_a_pair(work)


def test_rtr_04_a_prefill_engine_on_loopback_is_not_named_to_another_host() -> None:
    async def work(prefill: ScriptedEngine, decode: ScriptedEngine, way: Way) -> None:
        way.engine.address = Address("10.0.0.2", 30000)
        with pytest.raises(EngineRefused, match=r"10\.0\.0\.2:30000 takes its KV from 127.*name it"):
            way.stream(REQUEST, DEADLINE_S)
        assert not prefill.sent("/generate") and not decode.sent("/generate")

    on_a_pair(work)


def test_a_prefill_engine_without_a_bootstrap_port_is_refused() -> None:
    async def work(prefill: ScriptedEngine, decode: ScriptedEngine, way: Way) -> None:
        assert way.first is not None
        way.first.bootstrap_port = None
        with pytest.raises(EngineRefused, match="without a bootstrap port"):
            way.stream(REQUEST, DEADLINE_S)

    on_a_pair(work)


@pytest.mark.parametrize("runs", [((1, "a"),), ((3, "a"),), ((1, "a"), (2, "b"))])
def test_tokens_are_parted_with_all_that_belongs_to_them(runs: tuple[tuple[int, str], ...]) -> None:
    count = sum(tokens for tokens, _ in runs)
    whole = PartialReply(tuple(range(count)), (-0.5,) * count, runs, (1,) * count, "d")
    head, tail = whole.parted("p")
    assert (head.engine_id, tail.engine_id) == ("p", "d")
    assert head == replace(
        whole, engine_id="p", output_ids=(0,), logprobs=(-0.5,), spans=((1, "a"),), kv_mixed=(1,)
    )
    assert head.output_ids + tail.output_ids == whole.output_ids and len(tail.logprobs) == count - 1
    assert sum(tokens for tokens, _ in tail.spans) == count - 1 == len(tail.kv_mixed)
    assert tail.spans == (runs[1:] if runs[0][0] == 1 else ((2, "a"),))
