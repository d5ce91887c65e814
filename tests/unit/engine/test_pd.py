"""A PD pair inside one process: equal results, and every failure at every phase."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from dataclasses import replace
from typing import Any

import pytest

from tests.engine_models import make_model
from tests.pd_inside import Pair, Side, pair, side
from turnout.engine.pd_link import Link, PeerLost
from turnout.engine.pd_pages import digest, layout
from turnout.protocol.pd import (
    HEADER,
    Ask,
    Go,
    Joined,
    Kv,
    LinkError,
    Offer,
    Taken,
    chunk_header,
    pack,
    prompt_digest,
    seal,
)

LONG = [(11 * i) % 300 + 5 for i in range(75)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("pd") / "model")


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


def ids_of(row: Any) -> tuple[list[int], list[float]]:
    pairs = row["meta_info"]["output_token_logprobs"]
    assert [p[1] for p in pairs] == row["output_ids"]
    return row["output_ids"], [p[0] for p in pairs]


def finish(row: Any) -> tuple[str, str]:
    reason = row["meta_info"]["finish_reason"]
    return reason["type"], reason.get("message", "")


async def alone(single: Side, body: dict[str, Any]) -> tuple[list[int], list[float]]:
    """What an engine that is no half of anything answers."""
    status, row = await single.generate({k: v for k, v in body.items() if "bootstrap" not in k})
    assert status == 200
    return ids_of(row)


async def whole(model, body: dict[str, Any]) -> tuple[list[int], list[float]]:
    async with side(model, "null") as single:
        return await alone(single, body)


def test_a_pair_answers_as_one_engine_does(model):
    async def scenario() -> None:
        async with pair(model) as split:
            for transfer in ("shm", "tcp"):
                split.decode.compute.settings.__dict__["disaggregation_transfer"] = (
                    "auto" if transfer == "shm" else "tcp"
                )
                body = split.body(LONG, 12)
                first, answer = await split.generate(body)
                assert ids_of(answer) == await whole(model, body)
                assert ids_of(first) == tuple(part[:1] for part in ids_of(answer))
                assert answer["meta_info"]["pd_transfer_path"] == transfer
            assert split.decode.compute.load.prompt_rows == 0

    run(scenario())


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["abort_request", "hang_up", "abort_all", "pause_abort"])
@pytest.mark.parametrize("phase", ["prefill", "kv_transfer", "decode"])
def test_an_end_on_either_side_in_each_phase_ends_both_and_returns_all(model, who, how, phase):
    async def scenario() -> None:
        async with pair(model) as split:
            body = split.body(LONG, 400, rid="it")
            await (split.prefill if phase == "prefill" else split.decode).pause()
            calls = split.send(body)
            await split.decode.until("prefill" if phase == "prefill" else "kv_transfer")
            await split.prefill.until("prefill" if phase == "prefill" else "kv_transfer")
            if phase == "decode":
                await split.decode.go_on()
                await split.decode.until("decode")
                await split.prefill.idle()
            at = getattr(split, who)
            if how == "hang_up":
                calls[0 if who == "prefill" else 1].cancel()
            elif how == "pause_abort":
                await at.call("/pause_generation", {"mode": "abort"})
            else:
                await at.call(
                    "/abort_request", {"rid": "it"} if how == "abort_request" else {"abort_all": True}
                )
            async with asyncio.timeout(30):
                replies = await asyncio.gather(*calls, return_exceptions=True)
            ended = [finish(reply[1]) for reply in replies if isinstance(reply, tuple)]
            if phase != "decode":
                assert ended and all(kind == "abort" for kind, _ in ended)
            elif who == "decode":  # prefill had given its one token
                assert [kind for kind, _ in ended] == ["length", "abort"][: len(ended)]
            else:
                assert [kind for kind, _ in ended][
                    -1
                ] == "length"  # prefill has nothing to do with it any more
            for reply in replies:
                if isinstance(reply, tuple) and finish(reply[1])[0] == "abort":
                    tokens, _ = ids_of(reply[1])
                    assert (len(tokens) > 1) == (phase == "decode")
            await split.prefill.go_on()
            await split.decode.go_on()
            await split.idle()
            assert ids_of((await split.generate(split.body(LONG, 4)))[1])[0]

    run(scenario())


@pytest.mark.parametrize("alone", ["prefill", "decode"])
def test_rtr_20_a_half_whose_other_half_never_comes_ends_at_its_deadline(model, alone):
    async def scenario() -> None:
        async with pair(model, disaggregation_timeout_s=0.5) as split:
            status, row = await getattr(split, alone).generate(split.body(LONG, 9))
            assert status == 200 and finish(row)[0] == "abort"
            message = finish(row)[1]
            assert (
                ("0.5 s" in message)
                if alone == "prefill"
                else ("no request with it came" in message or "0.5 s" in message)
            )
            await split.idle()
            # one that hangs in the transfer: no page for it comes free
            await split.decode.pause()
            first, answer = await split.generate(split.body(LONG, 9))
            assert (
                finish(first)[0] == finish(answer)[0] == "abort"
                and "0.5 s" in finish(answer)[1] + finish(first)[1]
            )

    run(scenario())


@pytest.mark.parametrize("change", ["label_decode", "label_prefill", "weights_prefill", "weights_in_place"])
def test_kv_of_other_weights_is_never_decoded(model, tmp_path, change):
    other = make_model(tmp_path / "other", seed=9)

    async def scenario() -> None:
        async with pair(model) as split:
            await split.decode.pause()
            calls = split.send(split.body(LONG, 9))
            await split.prefill.until("kv_transfer")
            await split.decode.until("kv_transfer")
            if change.startswith("label"):
                at = split.decode if change == "label_decode" else split.prefill
                await at.call("/update_weight_version", {"new_version": "w", "abort_all_requests": False})
                if at is split.prefill:  # the KV was made before: it is as good as it was
                    await split.decode.go_on()
                    first, answer = [(await call)[1] for call in calls]
                    assert [finish(row)[0] for row in (first, answer)] == ["length", "length"]
                    assert answer["meta_info"]["weight_versions"] == [
                        {"version": "default", "start": 0, "end": 9}
                    ]
                    first, answer = await split.generate(split.body(LONG, 9))  # and this one is not
                    assert finish(answer)[0] == finish(first)[0] == "abort"
                    assert "KV made by w" in finish(answer)[1]
                    return
            else:
                body = {
                    "model_path": str(other),
                    "weight_version": "w",
                    "flush_cache": change == "weights_prefill",
                }
                at = split.prefill if change == "weights_prefill" else split.decode
                await at.call("/update_weights_from_disk", body)
            await split.decode.go_on()
            first, answer = [(await call)[1] for call in calls]
            assert finish(answer)[0] == finish(first)[0] == "abort"
            expected = "weights changed" if change == "weights_prefill" else "is not decoded by w"
            assert expected in finish(answer)[1] and expected in finish(first)[1]
            assert not answer["output_ids"]

    run(scenario())


def test_rooms_are_used_once(model):
    async def scenario() -> None:
        async with pair(model) as split:
            body = split.body(LONG, 5)
            await split.prefill.pause()
            calls = split.send(body)
            await split.decode.until("prefill")
            for at in (split.prefill, split.decode):
                status, row = await at.generate(body | {"rid": "second"})
                assert status == 400 and "bootstrap_room" in row["error"]["message"]
            async with side(model, "decode", engine_id="third") as third:
                _, row = await third.generate(body | {"rid": "x"})
                assert finish(row)[0] == "abort" and "is taken" in finish(row)[1]
                await split.prefill.go_on()
                first, answer = [await call for call in calls]
                assert len(ids_of(answer[1])[0]) == 5 and len(ids_of(first[1])[0]) == 1
                _, row = await third.generate(body | {"rid": "x"})
                assert finish(row)[0] == "abort" and "ended as length" in finish(row)[1]
                status, row = await split.prefill.generate(body)
                assert status == 400 and "was used" in row["error"]["message"]

    run(scenario())


def test_rtr_20_halves_with_different_prompts_layouts_or_tokens_are_refused(model, tmp_path):
    wide = make_model(tmp_path / "wide", head_dim=32)

    async def scenario() -> None:
        async with pair(model) as split:
            body = split.body(LONG, 5)
            call = asyncio.create_task(split.prefill.generate(body))
            _, row = await split.decode.generate(body | {"input_ids": LONG[1:]})
            assert "another prompt" in finish(row)[1]
            for settings, message in (
                ({"dtype": "bfloat16"}, "bfloat16, keys by dimension, values by token there"),
                ({"admin_token": "t"}, "different admin tokens"),
            ):
                async with side(model, "decode", **settings) as other:
                    _, row = await other.generate(split.body(LONG, 5))
                    assert finish(row)[0] == "abort" and message in finish(row)[1]
            async with side(wide, "decode") as other:
                _, row = await other.generate(split.body(LONG, 5))
                assert "heads of 16" in finish(row)[1] and "heads of 32" in finish(row)[1]
            _, row = await split.decode.generate(body)  # the room is still there for the right one
            assert len(ids_of(row)[0]) == 5 and len(ids_of((await call)[1])[0]) == 1

    run(scenario())


def test_a_port_scan_and_garbage_change_nothing(model, monkeypatch):
    monkeypatch.setattr("turnout.engine.pd_prefill.FIRST_FRAME_S", 0.5)

    async def scenario() -> None:
        async with pair(model) as split:
            port = split.prefill.server.pair.bootstrap_port
            ask = Ask(1, "x", "y", "z", "")
            for said in (
                b"",
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                bytes(range(256)) * 400,
                struct.pack(">4sBBI", b"TRPD", 9, 1, 10) + b"0123456789",
                struct.pack(">4sBBI", b"TRPD", 1, 1, 1 << 31),
                struct.pack(">4sBBI", b"TRPD", 1, 99, 1),
                HEADER.pack(b"TRPD", 1, 1, 7) + b"not {}!",
                HEADER.pack(b"TRPD", 1, 1, 2) + b"[]",
                HEADER.pack(b"TRPD", 1, 1, 12) + b'{"room":"1"}',
                pack(Taken()),
                chunk_header(5) + b"12345",
                pack(ask)[:-1],
                pack(ask),  # a wrong seal
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.suppress(OSError):
                    writer.write(said)
                    async with asyncio.timeout(10):
                        heard = await reader.read()
                    assert b"admin tokens" in heard if said == pack(ask) else heard == b""
                writer.close()
            assert len(ids_of((await split.generate(split.body(LONG, 4)))[1])[0]) == 4

    run(scenario())


async def as_decode(split: Pair, body: dict[str, Any]) -> tuple[Link, Offer]:
    """The test as the decode side of one room, up to the offer."""
    link = await Link.connect("127.0.0.1", split.prefill.server.pair.bootstrap_port)
    room = body["bootstrap_room"]
    own = layout(split.prefill.compute.core.runner.cache)
    await link.send(Ask(room, "test", own, prompt_digest(body["input_ids"]), seal(None, room)))
    await link.expect(Joined)
    return link, await link.expect(Offer)


@pytest.mark.parametrize("point", ["offered", "half", "all"])
@pytest.mark.parametrize("how", ["close", "silent", "wrong"])
def test_a_decode_side_that_fails_during_the_transfer(model, point, how):
    async def scenario() -> None:
        async with pair(model, disaggregation_timeout_s=1.0 if how == "silent" else 20.0) as split:
            body = split.body(LONG, 9)
            call = asyncio.create_task(split.prefill.generate(body))
            link, offer = await as_decode(split, body)
            assert not offer.ended and offer.kv_bytes > 0
            if point != "offered":
                await link.send(Go("tcp"))
                kv = await link.expect(Kv)
                size = offer.kv_bytes
                data = await link.receive_bytes(size) if point == "all" else b""
                assert point == "half" or digest(data) == kv.digest
            if how == "close":
                await link.close()
            elif how == "wrong":
                with contextlib.suppress(PeerLost):
                    await link.send(Joined("out of turn"))
            _, row = await call
            assert finish(row)[0] == "abort"
            await split.prefill.idle()
            with contextlib.suppress(PeerLost, LinkError):
                while True:
                    await asyncio.wait_for(link.receive(), 5)
            await link.close()

    run(scenario())


FALSE = (
    "close",
    "wrong_digest",
    "short",
    "long",
    "wrong_bytes",
    "root",
    "label",
    "not_due",
    "abort",
    "ended",
)


@pytest.mark.parametrize("lie", FALSE)
def test_a_prefill_side_that_fails_or_lies(model, lie):
    """The test is the prefill side; the decode engine must end with an abort and no token."""

    async def scenario() -> None:
        async with pair(model) as split:
            served = split.decode.compute.attested

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                link = Link(reader, writer)
                await link.expect(Ask)
                await link.send(Joined("test"))
                pages = -(-len(LONG) // 16)
                size = sum(t[0].nbytes for t in _tensors(split)) * pages
                offer = Offer(
                    7, -0.5, served.version, served.root, 1, False, size, 0, "no-such-socket", "00" * 16
                )
                offer = {
                    "wrong_bytes": replace(offer, kv_bytes=size - 1),
                    "root": replace(offer, root="0" * 32),
                    "label": replace(offer, label="w"),
                    "ended": replace(offer, ended=True, kv_bytes=0),
                }.get(lie, offer)
                with contextlib.suppress(PeerLost, LinkError):
                    await link.send(offer)
                    if lie == "abort":
                        await link.close("the prompt is too long")
                        return
                    go = await link.expect(Go)
                    assert go.path == ("none" if lie == "ended" else "tcp")
                    data = bytes(size)
                    if lie == "not_due":
                        await link.send(Joined("again"))
                    await link.send(Kv("0" * 32 if lie == "wrong_digest" else digest(data)))
                    if lie in ("close", "short"):
                        await link.send_bytes(memoryview(data)[: size // 2])
                        await link.close("" if lie == "close" else "enough")
                        return
                    await link.send_bytes(memoryview(data + (b"x" * 9 if lie == "long" else b"")))
                    await link.receive()
                await link.close()

            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            status, row = await split.decode.generate(split.body(LONG, 9) | {"bootstrap_port": port})
            assert status == 200 and finish(row)[0] == "abort" and finish(row)[1], row
            if lie == "ended":
                assert row["output_ids"] == [7] and "not here" in finish(row)[1]
            else:
                assert row["output_ids"] == []
            if lie == "abort":
                assert "the prompt is too long" in finish(row)[1]
            server.close()
            await split.idle()
            assert len(ids_of((await split.generate(split.body(LONG, 4)))[1])[0]) == 4

    run(scenario())


def _tensors(split: Pair) -> list[Any]:
    cache = split.decode.compute.core.runner.cache
    return [*cache.keys, *cache.values]


def test_a_decode_engine_short_of_pages_waits_preempts_and_loses_no_token(model):
    """Eight requests of 11 pages each on a decode engine with 20 pages. What is preempted there is computed
    again there, with the same bits."""

    async def scenario() -> None:
        async with pair(model, {"max_total_tokens": 320}) as split:
            bodies = [split.body(LONG[k:], 90, sampling_seed=k) for k in range(8)]
            replies = await asyncio.gather(*[split.generate(body) for body in bodies])
            load = split.decode.compute.load
            assert load.preempted and load.prompt_rows
            async with side(model, "null") as single:
                for body, (_, answer) in zip(bodies, replies):
                    assert finish(answer)[0] == "length"
                    assert ids_of(answer) == await alone(single, body)

    run(scenario())


def test_lists_streams_and_no_new_tokens(model):
    async def scenario() -> None:
        async with pair(model) as split:
            rooms = [1 << 40, 1 << 41]
            body = split.body(LONG, 6, rid="list") | {"input_ids": [LONG, LONG[3:]], "bootstrap_room": rooms}
            firsts, answers = await split.generate(body)
            for ids, first, answer in zip(body["input_ids"], firsts, answers):
                single = {**body, "rid": "one", "input_ids": ids}
                assert ids_of(answer) == await whole(model, single)
                assert len(ids_of(first)[0]) == 1
            body = split.body(LONG, 6)
            call = asyncio.create_task(split.prefill.generate(body))
            async with split.decode.client.post("/generate", json=body | {"stream": True}) as reply:
                text = await reply.text()
            events = [e for e in text.split("\n\n") if e]
            assert events[-1] == "data: [DONE]" and len((await call)[1]["output_ids"]) == 1
            assert f'"output_ids": {await _tokens(model, body)}' in events[-2]
            for row in await split.generate(split.body(LONG, 0)):
                assert row["output_ids"] == []

    run(scenario())


async def _tokens(model, body: dict[str, Any]) -> list[int]:
    return (await whole(model, body))[0]


def test_memory_is_handed_over_only_for_a_ticket(model):
    from turnout.engine.pd_shm import show_ticket

    async def scenario() -> None:
        async with pair(model) as split:
            body = split.body(LONG, 9)
            call = asyncio.create_task(split.prefill.generate(body))
            link, offer = await as_decode(split, body)
            assert await asyncio.to_thread(show_ticket, offer.local, "11" * 16) is None
            assert await asyncio.to_thread(show_ticket, "turnout-pd-other", offer.ticket) is None
            caller = await asyncio.to_thread(show_ticket, offer.local, offer.ticket)
            assert caller is not None
            assert await asyncio.to_thread(show_ticket, offer.local, offer.ticket) is None  # shown once
            caller.close()
            await link.close()
            assert finish((await call)[1])[0] == "abort"

    run(scenario())


def test_mem_07_no_half_gives_memory_back_under_a_request_that_is_parked_between_them(model):
    """Prefilled, and not taken over yet: its pages are in use. Once it has ended both give back, and a pair of
    which only one half has taken its memory again answers nothing."""

    async def scenario() -> None:
        async with pair(model) as split:
            await split.decode.pause()
            calls = split.send(split.body(LONG, 40, rid="it"))
            for at in (split.prefill, split.decode):
                await at.until("kv_transfer")
            for at in (split.prefill, split.decode):
                async with at.client.post("/release_memory_occupation", json={}) as reply:
                    assert reply.status == 400 and "wait" in await reply.text()
            await split.prefill.call("/abort_request", {"rid": "it"})
            await split.decode.go_on()
            for _, answer in await asyncio.gather(*calls):
                assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            await split.idle()
            moved = split.decode.counters["transfers"]
            for at in (split.prefill, split.decode):
                await at.call("/release_memory_occupation", {})
            await split.decode.call("/resume_memory_occupation", {})
            replies = await asyncio.gather(*split.send(split.body(LONG, 4)))
            assert all(status >= 400 for status, _ in replies), replies
            assert split.decode.counters["transfers"] == moved

    run(scenario())
