"""Bad input and clients that leave, one after the other at one engine: after each it is healthy, has every page
back, and the weights still answer the same."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tests.engine_models import add_tokenizer, make_model
from tests.engine_process import engine, parts

PROMPT, CONTEXT = [10, 20, 30, 40], 512
LONG = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    model = add_tokenizer(make_model(tmp_path_factory.mktemp("model"), "llama", torch.bfloat16, 0))
    flags = ("--max-running-requests", "4", "--max-total-tokens", "4096", "--max-step-tokens", "64")
    with engine(model, tmp_path_factory.mktemp("engine"), *flags) as server:
        yield server, parts(server.generate(PROMPT, 30))
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


@pytest.fixture
def server(process):
    one, want = process
    yield one
    one.wait_for(lambda load: load["num_total_reqs"] == 0)
    state = one.call("/server_info")[1]["internal_states"][0]
    assert (state["running"], state["waiting"], state["used_pages"]) == (0, 0, 0)
    assert one.call("/health_generate")[0] == one.call("/health")[0] == 200
    assert parts(one.generate(PROMPT, 30)) == want


REFUSED = [
    ("/generate", b"{"), ("/generate", b"null"), ("/generate", b"\xff\xfe"), ("/generate", b"[" * 200_000),
    ("/generate", {}), ("/generate", {"input_ids": []}), ("/generate", {"text": ""}),
    ("/generate", {"input_ids": [320]}), ("/generate", {"input_ids": [-1]}),
    ("/generate", {"input_ids": [10**30]}), ("/generate", {"input_ids": [1.5]}), ("/generate", {"input_ids": "ab"}),
    ("/generate", {"input_ids": [5] * 600}),
    ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 512}}),
    ("/generate", {"input_ids": [5], "sampling_params": {"temperature": "hot"}}),
    ("/generate", {"input_ids": [5], "sampling_params": {"stop_token_ids": [10**30]}}),
    ("/generate", {"input_ids": [5], "sampling_params": {"sampling_seed": 1.5}}),
    ("/generate", {"input_ids": [[5]] * 1025}), ("/generate", {"input_ids": [5], "rid": "x" * 300}),
    ("/v1/completions", b"{"), ("/v1/completions", {"prompt": [10**30]}), ("/v1/completions", {"prompt": {"a": 1}}),
    ("/v1/chat/completions", b"[]"), ("/v1/chat/completions", {"messages": 5}),
    ("/abort_request", b"{"), ("/abort_request", {"rid": 5}), ("/pause_generation", {"mode": 5}),
    ("/update_weight_version", {"new_version": ""}), ("/update_weights_from_disk", {"model_path": 5}),
    ("/flush_cache?timeout=soon", {}), ("/flush_cache?timeout=-1", {}), ("/flush_cache?timeout=nan", {}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), REFUSED, ids=lambda v: str(v)[:40])
def test_refused_with_a_reason(server, path: str, body: Any):
    status, row = server.call(path, body)
    text = json.dumps(row)
    assert status == 400 and len(text) > 20 and "Traceback" not in text


def test_a_prompt_longer_than_the_context_names_both_numbers(server):
    status, row = server.call("/generate", {"input_ids": [5] * 600})
    assert status == 400 and "600 tokens: the context is 512" in row["error"]["message"]


def test_seeds_of_any_size_and_no_new_tokens(server):
    for seed in (0, -1, 2**63, 2**64 + 5, -(10**30)):
        assert len(parts(server.generate(PROMPT, 3, sampling_seed=seed))[0]) == 3
    assert server.generate(PROMPT, 0)[1]["output_ids"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_client_that_disconnects_ends_its_request(server, stream, path):
    def aborted() -> float:
        lines = server.call("/metrics")[1].splitlines()
        return next(
            float(li.split()[-1]) for li in lines if li.startswith("sglang:num_aborted_requests_total")
        )

    where, before = urlsplit(server.url), aborted()
    own = {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True}
    data = json.dumps((LONG if path == "/generate" else own) | {"stream": stream}).encode()
    for _ in range(3):
        with socket.create_connection((where.hostname, where.port)) as client:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
            client.sendall(head.encode() + data)
            server.wait_for(lambda load: load["num_running_reqs"] == 1)
        server.wait_for(lambda load: load["num_total_reqs"] == 0 and load["num_used_tokens"] == 0, 10.0)
    assert aborted() == before + 3  # none of them ran to its end


def test_a_client_that_leaves_in_the_middle_of_its_body(server):
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port)) as client:
        client.sendall(
            b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"input_ids": [1, 2'
        )


def test_a_client_that_leaves_the_queue(server):
    where, data = urlsplit(server.url), json.dumps(LONG).encode()
    server.call("/pause_generation", {"mode": "in_place"})
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection((where.hostname, where.port)) as client:
        client.sendall(head + data)
        server.wait_for(lambda load: load["num_waiting_reqs"] == 1)
    server.wait_for(lambda load: load["num_total_reqs"] == 0, 10.0)
    server.call("/continue_generation", {})


def test_ids_duplicate_unknown_and_prefix(server):
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(server.call, "/generate", LONG | {"rid": rid}) for rid in ("ab", "abc")]
        server.wait_for(lambda load: load["num_running_reqs"] == 2)
        status, row = server.call("/generate", LONG | {"rid": "ab"})
        assert status == 400 and "in use" in row["error"]["message"]
        for rid in ("a", "abcd", "unknown"):
            assert server.call("/abort_request", {"rid": rid}) == (200, {"aborted": 0})
        assert server.call("/abort_request", {"rid": "ab"}) == (200, {"aborted": 1})
        assert running[0].result(30)[1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert running[1].result(60)[1]["meta_info"]["finish_reason"]["type"] == "length"


def test_a_flush_waits_for_requests_within_its_timeout(server):
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.call, "/generate", LONG | {"rid": "f"})
        server.wait_for(lambda load: load["num_running_reqs"] == 1)
        assert server.call("/flush_cache", {})[0] == 400
        status, text = server.call("/flush_cache?timeout=0.01", {})
        assert status == 400 and "after 0.01 s" in text
        assert server.call("/flush_cache?timeout=60", {})[0] == 200
        assert running.done() or running.result(5)[0] == 200
