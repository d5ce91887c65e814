"""Streams over real sockets: what events hold, readers that leave or do not read, deadlines, versions."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tests.engine_models import add_tokenizer, make_model
from tests.engine_process import EngineProcess, engine, parts
from turnout.placement.real import RealClock
from turnout.protocol.sglang import GenerateReply, GenerateRequest, SamplingParams
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of

PROMPT = [10, 20, 30, 40]
SLOW_TOKENS = 1200


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    sizes = {"max_position_embeddings": 4096}
    return [
        add_tokenizer(make_model(root / f"m{seed}", "llama", torch.bfloat16, seed, **sizes))
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def process(models, tmp_path_factory):
    flags = ("--max-total-tokens", "16384", "--max-running-requests", "8", "--max-step-tokens", "64")
    limit = ("--request-timeout-s", "60")
    with engine(models[0], tmp_path_factory.mktemp("engine"), *flags, *limit) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text(), server.log.read_text()


@pytest.fixture
def server(process, models):
    """Idle before and after each test, no page missing, and still able to generate."""
    yield process
    process.wait_for(lambda load: load["num_total_reqs"] == 0 and load["num_used_tokens"] == 0)
    assert process.call("/health_generate")[0] == 200


def request_of(new: int, **fields: Any) -> dict[str, Any]:
    params = {"max_new_tokens": new, "ignore_eos": True, "sampling_seed": 5} | fields.pop("params", {})
    return {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "stream": True} | fields


def events(server: EngineProcess, path: str, body: dict[str, Any]) -> Iterator[Any]:
    """The events of a stream as they come; the last is the text [DONE]."""
    where = urlsplit(server.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.headers["Content-Type"] == "text/event-stream"
        for line in answer:
            text = line.decode().strip()
            if text:
                assert text.startswith("data: ")
                yield text[6:] if text == "data: [DONE]" else json.loads(text[6:])
    finally:
        connection.close()


def open_stream(server: EngineProcess, body: dict[str, Any]) -> socket.socket:
    """A raw connection on which a stream was asked for."""
    where, data = urlsplit(server.url), json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((where.hostname, where.port))
    client.sendall(
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )
    return client


def test_events_grow_and_the_last_is_the_reply_without_streaming(server):
    body = request_of(60, rid="s" * 32, return_text_in_logprobs=True)
    whole = server.call("/generate", body | {"stream": False})[1]
    *rows, last, done = events(server, "/generate", body)
    assert done == "[DONE]" and len(rows) >= 3
    cached = whole["meta_info"].pop("cached_tokens"), last["meta_info"].pop("cached_tokens")
    assert last == whole and min(cached) >= 0
    known = 0
    for row in rows:
        meta, count = row["meta_info"], len(row["output_ids"])
        assert meta["finish_reason"] is None and meta["id"] == "s" * 32 and count > known
        assert row["output_ids"] == last["output_ids"][:count]
        assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == count
        assert meta["output_token_logprobs"] == last["meta_info"]["output_token_logprobs"][:count]
        assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": count}]
        assert last["text"].startswith(row["text"])
        known = count
    assert all(isinstance(t[2], str) for t in last["meta_info"]["output_token_logprobs"])


@pytest.fixture(scope="module")
def incremental(models, tmp_path_factory):
    flags = ("--max-total-tokens", "16384", "--incremental-streaming-output")
    with engine(models[0], tmp_path_factory.mktemp("incremental"), *flags) as server:
        yield server


@pytest.mark.parametrize("interval", [None, 16])
def test_events_with_their_own_tokens_are_together_the_reply_without_streaming(incremental, interval):
    body = request_of(60, return_text_in_logprobs=True, params={"stream_interval": interval})
    whole = incremental.call("/generate", body | {"stream": False})[1]
    *rows, done = events(incremental, "/generate", body)
    assert done == "[DONE]"
    ids, pairs, text = [], [], ""
    for row in rows:
        meta = row["meta_info"]
        ids += row["output_ids"]
        pairs += meta["output_token_logprobs"]
        text += row["text"]
        assert meta["completion_tokens"] == len(ids) == len(pairs)
        assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": len(ids)}]
    assert ids == whole["output_ids"] and text == whole["text"]
    assert pairs == whole["meta_info"]["output_token_logprobs"]
    assert rows[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    if interval is not None:
        # the first has one token, or more where the reader is late
        sizes = [len(row["output_ids"]) for row in rows]
        assert len(sizes) > 2 and min(sizes[1:-1]) >= interval, sizes


@pytest.mark.parametrize("which", ["server", "incremental"])
def test_the_token_that_ends_a_request_comes_with_its_end(which, request):
    """Else a client whose engine dies between the two would go on behind the end."""
    asked = request.getfixturevalue(which)
    ids = asked.call("/generate", request_of(40, stream=False))[1]["output_ids"]
    last = next(at for at in range(10, 40) if ids[at] not in ids[:at])
    params = {"stop_token_ids": [ids[last]], "ignore_eos": False}
    for _ in range(20):
        *rows, final, _ = events(asked, "/generate", request_of(40, params=params))
        assert final["meta_info"]["finish_reason"]["type"] == "stop"
        assert all(ids[last] not in row["output_ids"] for row in rows)


def test_a_stream_never_shows_what_a_stop_string_takes_back(server):
    text = server.call("/generate", request_of(80, stream=False))[1]["text"]
    at = next(i for i in range(20, 60) if text[i : i + 3].isprintable() and "\ufffd" not in text[i : i + 3])
    stop = text[at : at + 3]
    body = request_of(80, params={"stop": [stop]})
    *rows, last, _ = events(server, "/generate", body)
    assert last["text"] == text[: text.index(stop)]
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert all(last["text"].startswith(row["text"]) for row in rows)


def test_without_log_probs_and_for_a_list_of_prompts(server):
    body = request_of(12, return_logprob=False, rid="many") | {"input_ids": [PROMPT, [7, 8, 9]]}
    listed = server.call("/generate", body | {"stream": False})[1]
    assert [row["meta_info"]["id"] for row in listed] == ["many_0", "many_1"]
    assert listed[0]["output_ids"] != listed[1]["output_ids"]
    *rows, _ = events(server, "/generate", body)
    assert {row["index"] for row in rows} == {0, 1}
    for index, whole in enumerate(listed):
        last = [row for row in rows if row["index"] == index][-1]
        assert last["output_ids"] == whole["output_ids"] and last["text"] == whole["text"]
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert all("output_token_logprobs" not in row["meta_info"] for row in rows)
    alone = parts(server.generate([7, 8, 9], 12))
    assert listed[1]["output_ids"] == alone[0]


def test_a_list_is_refused_whole_when_one_id_is_in_use(server):
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, PROMPT, 3000, "x_1")
        server.wait_for(lambda load: load["num_running_reqs"] == 1)
        status, row = server.call("/generate", request_of(5, rid="x", stream=True, input_ids=[[5], [6]]))
        assert status == 400 and "in use" in row["error"]["message"]
        assert server.load()["num_total_reqs"] == 1
        assert server.call("/abort_request", {"rid": "x_1"}) == (200, {"aborted": 1})
        assert running.result(30)[0] == 200


def test_an_abort_ends_a_stream_with_what_exists(server):
    rows = events(server, "/generate", request_of(3000, rid="cut"))
    first = next(rows)
    assert server.call("/abort_request", {"rid": "cut"}) == (200, {"aborted": 1})
    *_, last, done = rows
    assert last["meta_info"]["finish_reason"] == {"type": "abort", "message": "aborted by a call"}
    assert done == "[DONE]" and len(first["output_ids"]) <= len(last["output_ids"]) < 3000


def test_a_client_that_leaves_a_stream_takes_its_request_along(server):
    with open_stream(server, request_of(3500)) as client:
        assert client.recv(1000)
        server.wait_for(lambda load: load["num_used_tokens"] > 0)
    server.wait_for(lambda load: load["num_total_reqs"] == 0 and load["num_used_tokens"] == 0, 5.0)


def test_a_client_that_does_not_read_holds_up_nobody_and_costs_no_memory(server):
    def resident() -> int:
        text = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0])

    list(events(server, "/generate", request_of(100)))
    before = resident()
    with open_stream(server, request_of(SLOW_TOKENS)) as client:
        server.wait_for(lambda load: load["num_running_reqs"] == 1)
        server.wait_for(lambda load: load["num_total_reqs"] == 0, 60.0)  # computed to its end all the same
        # a list of SLOW_TOKENS cumulative events is 30 MB, of which the sockets hold a few
        assert resident() - before < 15_000
        assert parts(server.generate(PROMPT, 20))[0]
        got = b""
        client.settimeout(10)
        while b"[DONE]" not in got:
            part = client.recv(1 << 20)
            assert part
            got += part
    last = json.loads(got.split(b"data: ")[-2].split(b"\r")[0].split(b"\n")[0])
    assert len(last["output_ids"]) == SLOW_TOKENS and got.count(b"data: ") < SLOW_TOKENS // 2


def test_a_request_ends_at_its_deadline_with_what_exists(models, tmp_path):
    with engine(models[0], tmp_path, "--request-timeout-s", "0.5") as server:
        began = time.monotonic()
        *_, last, done = events(server, "/generate", request_of(4000))
        assert last["meta_info"]["finish_reason"] == {"type": "abort", "message": "deadline of 0.5 s"}
        assert 0 < len(last["output_ids"]) < 4000 and done == "[DONE]" and time.monotonic() - began < 30
        status, row = server.generate(PROMPT, 4000)
        assert status == 200 and row["meta_info"]["finish_reason"]["message"] == "deadline of 0.5 s"


def test_version_constraints(server, models):
    roots = [root_of(read_checkpoint(model)) for model in models]
    first, second = f"v000003-{roots[0][:16]}", f"v000004-{roots[1][:16]}"
    update = {"model_path": str(models[0]), "weight_version": first}
    assert server.call("/update_weights_from_disk", update)[0] == 200
    ask = request_of(4, stream=False)
    for key in (first, f"{first}!", f"v000002-{'0' * 16}", "a namespace", None):
        assert server.call("/generate", ask | {"extra_key": key})[0] == 200, key
    for key in (second, f"{second}!", f"v000002-{'0' * 16}!", f"v000003-{'0' * 16}"):
        for stream in (False, True):
            status, row = server.call("/generate", ask | {"extra_key": key, "stream": stream})
            assert status == 409 and row["served"] == {"version": first, "root": roots[0]}, key
            assert key.rstrip("!") in row["error"]["message"]
    server.call("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(3) as pool:
        keys = (f"{first}!", first, "a namespace")
        asked = [pool.submit(server.call, "/generate", ask | {"extra_key": key}) for key in keys]
        server.wait_for(lambda load: load["num_total_reqs"] == 3)
        update = {"model_path": str(models[1]), "weight_version": second}
        assert server.call("/update_weights_from_disk", update)[0] == 200
        exact = asked[0].result(30)[1]["meta_info"]
        assert exact["finish_reason"] == {
            "type": "abort", "message": f"asked for exactly {first}; {second} is served now"
        }  # fmt: skip
        assert exact["completion_tokens"] == 0
        server.call("/continue_generation", {})
        for other in asked[1:]:
            meta = other.result(30)[1]["meta_info"]
            assert meta["weight_version"] == second and meta["completion_tokens"] == 4


def test_the_client_streams_and_resumes_from_what_it_saw(server):
    where = urlsplit(server.url)
    params = SamplingParams(max_new_tokens=80, sampling_seed=9, ignore_eos=True)
    whole = GenerateRequest("w" * 32, tuple(PROMPT), params)

    async def main() -> tuple[Any, Any, Any]:
        client = EngineClient("e0", Address(where.hostname or "", where.port or 0), RealClock())
        try:
            want = await client.generate(whole, 60.0)
            cut = replace(whole, rid="c" * 32)
            seen: list[tuple[int, float]] = []
            async with contextlib.aclosing(client.generate_stream(cut, 60.0)) as stream:
                async for item in stream:
                    seen += zip(item.output_ids, item.logprobs)
                    if len(seen) >= 20:
                        break
            rest = replace(whole, rid="d" * 32, input_ids=(*whole.input_ids, *(token for token, _ in seen)),
                           params=replace(whole.params, max_new_tokens=80 - len(seen)))  # fmt: skip
            items = [item async for item in client.generate_stream(rest, 60.0)]
        finally:
            await client.close()
        return want, seen, items

    want, seen, items = asyncio.run(main())
    assert 20 <= len(seen) < 80
    assert isinstance(items[-1], GenerateReply) and len(items) > 1
    made = [*seen, *zip(items[-1].output_ids, items[-1].logprobs)]
    assert made == list(zip(want.output_ids, want.logprobs))
