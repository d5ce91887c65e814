"""Virtual engines and the network before them: tokens that can be proved, calls that get lost, late or doubled."""

from __future__ import annotations

import asyncio
import random

import pytest

from turnout.core.errors import EngineDead, EngineError, VersionUnmet
from turnout.core.types import Finish
from turnout.core.version import WeightVersion
from turnout.protocol.sglang import GenerateReply, GenerateRequest, SamplingParams
from turnout.protocol.stream import PartialReply
from turnout.serving.weights_client import EngineWeights, OnUpdate
from turnout.sim.engine import VirtualEngine
from turnout.sim.faults import Faults
from turnout.sim.loop import Life, VirtualClock, VirtualLoop
from turnout.sim.model import EngineShape, length_of, logprobs_of, number_of, prompt_ids, root_after, tokens
from turnout.sim.network import VirtualClient, Wire

BASE, NEXT = WeightVersion(0, 0, root_after(b"")), WeightVersion(0, 1, root_after(b"next"))
SHAPE = EngineShape(speed=50.0, chunk=8, running=4, kv_tokens=400, median=40.0)
PROMPT = prompt_ids(7, 6)


class Timers:
    def later(self, seconds, call, *args):
        return asyncio.get_running_loop().call_later(seconds, call, *args)


def world(work, kind=None, shape=SHAPE):
    """`work(client, engine, faults)` with one engine; every operation meets the one kind of fault."""
    loop = VirtualLoop(3)
    faults = Faults(random.Random(0), () if kind is None else (kind,))
    faults.rates = dict.fromkeys(faults.rates, 1e9)
    engine = VirtualEngine("e0", shape, BASE.root, Timers())
    clock = VirtualClock(loop)

    def lost(found):
        found.die()

    wire = Wire(faults, Life("controller"), Timers().later, lambda engine, request: None, lost)

    async def main():
        return await work(VirtualClient(engine, clock, wire), engine, faults)

    try:
        return loop.run_until_complete(main())
    finally:
        loop.discard()


def request(rid="r", ids=PROMPT, seed=5, most=1000, key=None):
    return GenerateRequest(rid, ids, SamplingParams(max_new_tokens=most, sampling_seed=seed), extra_key=key)


async def streamed(client, asked, deadline_s=600.0):
    return [item async for item in client.generate_stream(asked, deadline_s)]


def test_a_stream_grows_to_the_tokens_that_the_model_gives():
    items = world(lambda client, *_: streamed(client, request()))
    last = items[-1]
    length = length_of(7, 5, SHAPE.median)
    assert isinstance(last, GenerateReply) and last.finish is Finish.STOP and len(items) > 2
    assert list(last.output_ids) == tokens(PROMPT, 5, [(length, number_of(BASE.root))])
    assert last.spans == ((length, "default"),) and list(last.logprobs) == logprobs_of(last.output_ids)
    assert all(isinstance(item, PartialReply) for item in items[:-1])
    assert sum((item.output_ids for item in items[:-1]), ()) == last.output_ids


def test_a_request_resumed_from_its_tokens_goes_on_as_if_nothing_had_been():
    async def work(client, *_):
        whole = await client.generate(request("a"), 600)
        kept = whole.output_ids[:5]
        rest = await client.generate(request("b", PROMPT + kept), 600)
        return whole, kept + rest.output_ids

    whole, joined = world(work)
    assert joined == whole.output_ids


def test_the_budget_ends_a_response():
    reply = world(lambda client, *_: client.generate(request(most=3), 600))
    assert reply.finish is Finish.LENGTH and len(reply.output_ids) == 3


def test_an_update_in_the_middle_shows_in_the_spans():
    async def work(client, engine, _):
        asked = asyncio.ensure_future(client.generate(request(), 600))
        await asyncio.sleep(0.4)
        weights = EngineWeights(client)
        made = await weights.prepare(NEXT.root, NEXT.label, 60)
        await weights.activate(made, 60, OnUpdate.CONTINUE)
        assert (await client.attest(60)).root == NEXT.root == engine.root
        return await asked

    reply = world(work)
    (first, _), (second, label) = reply.spans
    assert label == NEXT.label
    expected = tokens(PROMPT, 5, [(first, number_of(BASE.root)), (second, number_of(NEXT.root))])
    assert list(reply.output_ids) == expected


def test_kv_of_other_weights_shows_in_the_tokens_unless_namespaces_differ():
    async def work(client, engine, _):
        await client.generate(request("a", key="old"), 600)
        engine.root, engine.label = NEXT.root, NEXT.label
        return [(await client.generate(request(key, key=key), 600)).output_ids for key in ("old", "new")]

    stale, fresh = world(work)
    assert list(fresh) == tokens(PROMPT, 5, [(len(fresh), number_of(NEXT.root))])
    assert stale != fresh


def test_more_requests_than_fit_are_put_back_and_lose_nothing():
    async def work(client, engine, _):
        asked = [client.generate(request(str(seed), seed=seed), 6000) for seed in range(12)]
        return await asyncio.gather(*asked), engine.retracted

    tight = EngineShape(speed=50.0, chunk=8, running=8, kv_tokens=150, median=40.0)
    replies, retracted = world(work, shape=tight)
    assert retracted > 0
    for seed, reply in enumerate(replies):
        assert list(reply.output_ids) == tokens(PROMPT, seed, [(len(reply.output_ids), number_of(BASE.root))])


def test_a_version_that_is_not_served_is_refused():
    with pytest.raises(VersionUnmet):
        world(lambda client, *_: client.generate(request(key=NEXT.label), 600))


def test_an_abort_cuts_at_a_token_and_says_so():
    async def work(client, *_):
        asked = asyncio.ensure_future(client.generate(request(), 600))
        await asyncio.sleep(0.4)
        await client.control("/abort_request", {"rid": "r"}, 60)
        return await asked

    reply = world(work)
    assert reply.finish is Finish.ABORT and reply.output_ids
    assert list(reply.output_ids) == tokens(PROMPT, 5, [(len(reply.output_ids), number_of(BASE.root))])


def test_a_pause_holds_requests_and_going_on_ends_them():
    async def work(client, engine, _):
        asked = asyncio.ensure_future(client.generate(request(), 600))
        await asyncio.sleep(0.4)
        await client.control("/pause_generation", {"mode": "retract"}, 60)
        await asyncio.sleep(100)
        assert not asked.done() and await client.load() == 1
        await client.control("/continue_generation", {}, 60)
        return await asked

    assert world(work).finish is Finish.STOP


def test_a_reader_that_leaves_ends_its_request():
    async def work(client, engine, _):
        stream = client.generate_stream(request(), 600)
        await anext(stream)
        await stream.aclose()
        await asyncio.sleep(1)
        return engine.load

    assert world(work) == 0


@pytest.mark.parametrize(
    "kind, error, done",
    [
        ("request_lost", EngineError, False),
        ("answer_lost", EngineError, True),
        ("refused", EngineError, False),
        ("engine_crash", EngineDead, False),
    ],
)
def test_a_call_fails_and_what_the_engine_did_is_true_all_the_same(kind, error, done):
    async def work(client, engine, faults):
        with pytest.raises(error):
            await EngineWeights(client).prepare(NEXT.root, NEXT.label, 60)
        assert faults.counts[kind] >= 1
        return engine.alive and engine.prepared is not None

    assert world(work, kind) is done


def test_an_engine_that_loads_something_else_attests_it():
    async def work(client, engine, _):
        return (await client.update_from_disk(NEXT.root, NEXT.label, 60)).root

    assert world(work, "other_weights") == "f" * 32


def test_a_cut_stream_is_a_dead_engine():
    with pytest.raises(EngineDead):
        world(lambda client, *_: streamed(client, request()), "stream_cut")


def test_an_engine_that_dies_starts_with_the_weights_of_its_checkpoint():
    async def work(client, engine, _):
        engine.root, engine.label = NEXT.root, NEXT.label
        asked = asyncio.ensure_future(client.generate(request(), 600))
        await asyncio.sleep(0.4)
        engine.die()
        with pytest.raises(EngineDead):
            await asked
        with pytest.raises(EngineDead):
            await client.health(1)
        engine.start()
        return await client.attest(1)

    found = world(work)
    assert (found.root, found.label) == (BASE.root, "default")
