"""One engine process over real HTTP: generation, abort, pause, updates, bad input, clients that leave."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine_models import add_tokenizer, make_model
from tests.engine_process import engine, parts
from turnout.protocol.sglang import load_total, parse_reply
from turnout.weights.checkpoint_io import copy_assets, read_checkpoint
from turnout.weights.digest import root_of

CONTEXT = 2048
PROMPT = [10, 20, 30, 40]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    sizes = {"max_position_embeddings": CONTEXT}
    return [
        add_tokenizer(make_model(root / f"m{seed}", "llama", torch.bfloat16, seed, **sizes))
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    flags = ("--max-total-tokens", "16384", "--max-running-requests", "8", "--max-step-tokens", "64")
    roots = ("--allowed-root", str(models[0].parent), "--allowed-root", str(tmp_path_factory.getbasetemp()))
    with engine(
        models[0], tmp_path_factory.mktemp("engine"), *flags, *roots, "--max-waiting", "4"
    ) as process:
        yield process
        assert process.stop() == 0
        assert "Traceback" not in process.log.read_text()


@pytest.fixture
def calm(server, models):
    """The server, idle and on its first weights before and after each test; no page may be missing."""
    yield server
    server.call("/continue_generation", {})
    server.wait_for(lambda load: load["num_total_reqs"] == 0)
    assert server.load()["num_used_tokens"] == 0
    status, reply = server.call(
        "/update_weights_from_disk", {"model_path": str(models[0]), "weight_version": "default"}
    )
    assert status == 200, reply
    assert server.call("/health_generate")[0] == 200


def test_information(calm, models):
    for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        status, row = calm.call(path)
        assert status == 200 and row["weight_version"] == "default" and row["model_path"] == str(models[0])
    assert calm.call("/get_weight_version")[1] == {"weight_version": "default"}
    status, row = calm.call("/weight_version")
    assert (row["version"], row["root"]) == ("default", root_of(read_checkpoint(models[0])))
    assert (row["level"], row["verified"]) == ("memory", "full") and row["at"] <= time.time()
    assert load_total(calm.call("/v1/loads")[1]) == 0
    assert calm.call("/health")[0] == 200
    assert calm.ready == {"url": calm.url, "pid": calm.process.pid, "engine_id": "engine-0"}


def test_results_do_not_depend_on_concurrency(calm):
    asked = [
        (list(range(3, 5 + 13 * i)), 40, {"sampling_seed": i, "temperature": 0.6 + i / 5}) for i in range(6)
    ]
    alone = [parts(calm.generate(ids, new, **row)) for ids, new, row in asked]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda a: parts(calm.generate(a[0], a[1], **a[2])), asked))
    assert together == alone
    assert len({tuple(tokens) for tokens, _ in alone}) == 6


def test_seed_decides_and_a_reply_is_what_the_client_reads(calm):
    first, again = (calm.generate(PROMPT, 12, sampling_seed=3) for _ in range(2))
    assert parts(first) == parts(again) != parts(calm.generate(PROMPT, 12, sampling_seed=4))
    reply = parse_reply(first[1], 12)
    assert reply.finish == "length" and reply.spans == ((12, "default"),) and reply.prompt_tokens == 4
    unseeded = [parts(calm.generate(PROMPT, 12, sampling_seed=None)) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_text_stop_ids_stop_strings_and_minimum(calm):
    status, row = calm.call("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 3}})
    assert status == 200 and row["meta_info"]["prompt_tokens"] == 3
    assert "output_token_logprobs" not in row["meta_info"]
    tokens, _ = parts(calm.generate(PROMPT, 60))
    at = next(i for i in range(5, 60) if tokens[i] not in tokens[:i])
    assert (
        parts(calm.generate(PROMPT, 60, stop_token_ids=[tokens[at]]))[0] == tokens
    )  # ignore_eos: no id ends it
    status, row = calm.generate(PROMPT, 60, stop_token_ids=[tokens[at]], ignore_eos=False)
    assert row["output_ids"] == tokens[: at + 1] and row["meta_info"]["finish_reason"]["type"] == "stop"
    minimum = {"stop_token_ids": [tokens[at]], "min_new_tokens": at + 1, "ignore_eos": False}
    late = parts(calm.generate(PROMPT, 60, **minimum))[0]
    assert len(late) > at and tokens[at] not in late[: at + 1]
    letters = next(i for i in range(4, 60) if 36 <= tokens[i] < 97)
    text = calm.generate(PROMPT, letters + 1)[1]["text"]
    status, row = calm.generate(PROMPT, 60, stop=[text[-1]])
    assert row["meta_info"]["finish_reason"]["type"] == "stop" and text[-1] not in row["text"]
    assert row["output_ids"] == tokens[: len(row["output_ids"])] and len(row["output_ids"]) <= letters + 1


def test_log_probs_of_the_prompt(calm):
    def ask(ids, new, start, **params):
        row = {"max_new_tokens": new, "ignore_eos": True, "sampling_seed": 5} | params
        body = {"input_ids": ids, "sampling_params": row, "return_logprob": True, "logprob_start_len": start}
        return calm.call("/generate", body)

    tokens, logprobs = parts(calm.generate(PROMPT, 40))
    whole = [*PROMPT, *tokens]
    status, row = ask(whole, 0, 0, temperature=0.3)
    pairs = row["meta_info"]["input_token_logprobs"]
    assert status == 200 and row["output_ids"] == [] and row["meta_info"]["finish_reason"]["type"] == "length"
    assert pairs[0] == [None, PROMPT[0], None] and [pair[1] for pair in pairs] == whole
    assert [pair[0] for pair in pairs[len(PROMPT) :]] == pytest.approx(logprobs, abs=1e-5)
    status, row = ask(whole, 2, 36)
    assert row["meta_info"]["input_token_logprobs"] == [[None, whole[36], None], *pairs[37:]]
    assert row["meta_info"]["completion_tokens"] == 2 and row["meta_info"]["cached_tokens"] == 32
    for start in (-1, len(whole)):
        assert ask(whole, 2, start)[1]["meta_info"]["input_token_logprobs"] == []
    for start in (len(whole) + 1, -2, "0", True):
        status, row = ask(whole, 2, start)
        assert status == 400 and "logprob_start_len" in row["error"]["message"]


def test_no_new_tokens_is_legal(calm):
    status, row = calm.generate(PROMPT, 0)
    assert (
        status == 200
        and row["output_ids"] == []
        and row["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    )


BAD = [
    (b"{no json", "not JSON"),
    (b"[1, 2]", "must be a JSON object"),
    ({"sampling_params": {}}, "exactly one of text and input_ids"),
    ({"input_ids": [], "sampling_params": {}}, "at least one token id"),
    ({"input_ids": [[1], [1, 320]], "sampling_params": {}}, "[1].input_ids[1] = 320"),
    ({"input_ids": [[1], []]}, "[1].input_ids"),
    ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid = 1: there are 2 prompts"),
    ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "an id of its own"),
    ({"input_ids": [5] * (CONTEXT + 1)}, f"{CONTEXT + 1} tokens: the context is {CONTEXT}"),
    ({"input_ids": [1, 320]}, "320: must be an id from 0 to 319"),
    ({"input_ids": [1, -1]}, "-1: must be an id from 0 to 319"),
    ({"input_ids": [True]}, "input_ids[0]"),
    ({"input_ids": [5] * CONTEXT, "sampling_params": {"max_new_tokens": 9}}, f"{CONTEXT + 9} in all"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
    ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": [999]}}, "stop_token_ids"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}, "min_new_tokens"),
    ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    ({"input_ids": [1], "sampling_params": {"sampling_seed": "x"}}, "sampling_seed"),
    ({"input_ids": [1], "sampling_params": {"stop": [1]}}, "stop"),
    ({"input_ids": [1], "sampling_params": {"n": 4}}, "n = 4"),
    ({"input_ids": [1], "sampling_params": 3}, "sampling_params"),
    ({"input_ids": [1], "rid": ""}, "rid"),
    (b"[" * 100_000, "not JSON"),
    (b'{"text": "\xff"}', "not JSON"),
    ({"input_ids": [1], "stream": "yes"}, "stream = yes"),
    ({"text": []}, "text = 0 prompts"),
    ({"text": "a", "input_ids": [1]}, "exactly one"),
    ({"text": ""}, "at least one token id"),
    ({"input_ids": [1], "image_data": "x"}, "image_data"),
    ({"input_ids": [1], "lora_path": "x"}, "lora_path"),
    ({"input_ids": [1], "return_hidden_states": True}, "return_hidden_states"),
    ({"input_ids": [1], "extra_key": 5}, "extra_key"),
    ({"input_ids": [1], "return_logprob": "yes"}, "return_logprob"),
    ({"input_ids": [1], "sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty"),
    ({"input_ids": [1], "sampling_params": {"json_schema": "{}"}}, "json_schema"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), BAD)
def test_bad_requests_are_refused_by_name(server, body, message):
    before = parts(server.generate(PROMPT))
    status, row = server.call("/generate", body)
    assert status == 400 and message in row["error"]["message"]
    assert parts(server.generate(PROMPT)) == before and server.load()["num_used_tokens"] == 0


def test_unknown_fields_are_ignored(calm):
    body = {"input_ids": PROMPT, "novel": 1, "sampling_params": {"max_new_tokens": 2, "novel": 2}}
    assert calm.call("/generate", body)[0] == 200


def test_abort_is_by_exact_id_and_returns_what_exists(calm):
    with ThreadPoolExecutor(4) as pool:
        replies = {rid: pool.submit(calm.generate, PROMPT, 1500, rid) for rid in ("r1", "r10")}
        calm.wait_for(lambda load: load["num_running_reqs"] == 2)
        duplicate = calm.generate(PROMPT, 4, "r1")
        assert duplicate[0] == 400 and "in use" in duplicate[1]["error"]["message"]
        assert calm.call("/abort_request", {"rid": ""})[0] == 400
        assert calm.call("/abort_request", {})[0] == 400
        assert calm.call("/abort_request", {"rid": "r"}) == (200, {"aborted": 0})
        assert calm.call("/abort_request", {"rid": "r1"}) == (200, {"aborted": 1})
        tokens, _ = parts(replies["r1"].result(30))
        assert replies["r1"].result()[1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(tokens) < 1500 and not replies["r10"].done()
        assert calm.call("/abort_request", {"abort_all": True}) == (200, {"aborted": 1})
        longer, _ = parts(replies["r10"].result(30))
        common = min(len(tokens), len(longer))
        assert tokens[:common] == longer[:common]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pause_and_continue(calm, mode):
    want = parts(calm.generate(PROMPT, 300))
    with ThreadPoolExecutor(2) as pool:
        reply = pool.submit(calm.generate, PROMPT, 300, "p1")
        calm.wait_for(lambda load: load["num_running_reqs"] == 1)
        assert calm.call("/pause_generation", {"mode": mode})[0] == 200
        still = calm.call("/server_info")[1]["internal_states"][0]["steps"]
        later = pool.submit(calm.generate, PROMPT, 300, "p2")
        calm.wait_for(lambda load: load["num_total_reqs"] == (1 if mode == "abort" else 2))
        time.sleep(0.05)
        assert calm.call("/server_info")[1]["internal_states"][0]["steps"] == still
        assert calm.call("/health_generate")[0] == 200 and not later.done()
        used = calm.load()["num_used_tokens"]
        assert (used > 0) == (mode == "in_place")
        assert calm.call("/flush_cache")[0] == 400
        assert calm.call("/continue_generation", {})[0] == 200
        assert parts(later.result(60)) == want
        tokens, logprobs = parts(reply.result(60))
        assert (tokens, logprobs) == (want[0][: len(tokens)], want[1][: len(tokens)])
        assert (len(tokens) == 300) == (mode != "abort")
    assert calm.call("/flush_cache", method="POST")[0] == 200
    assert calm.call("/pause_generation", {"mode": "sideways"})[0] == 400


def test_a_full_queue_is_a_429(calm):
    calm.call("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(16) as pool:
        held = [pool.submit(calm.generate, PROMPT, 2) for _ in range(12)]
        calm.wait_for(lambda load: load["num_total_reqs"] == 12)
        assert calm.generate(PROMPT, 2)[0] == 429
        calm.call("/continue_generation", {})
        assert {h.result(60)[0] for h in held} == {200}


def test_a_client_that_leaves_takes_its_request_along(calm):
    where = urlsplit(calm.url)
    body = json.dumps({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}})
    with socket.create_connection((where.hostname, where.port)) as client:
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        calm.wait_for(lambda load: load["num_running_reqs"] == 1)
    calm.wait_for(lambda load: load["num_total_reqs"] == 0 and load["num_used_tokens"] == 0, 5.0)
    steps = calm.call("/server_info")[1]["internal_states"][0]["steps"]
    assert steps > 0


def test_update_equals_a_fresh_engine_and_tokens_carry_their_version(calm, models, tmp_path):
    old = parts(calm.generate(PROMPT, 50))
    with ThreadPoolExecutor(1) as pool:
        flying = pool.submit(calm.generate, PROMPT, 1200)
        calm.wait_for(lambda load: load["num_used_tokens"] >= 32)
        row = {"model_path": str(models[1]), "weight_version": "w2", "flush_cache": False}
        status, reply = calm.call("/update_weights_from_disk", row)
        assert status == 200 and reply["success"] and reply["num_paused_requests"] == 1
        assert (reply["version"], reply["root"]) == ("w2", root_of(read_checkpoint(models[1])))
        versions = flying.result(60)[1]["meta_info"]["weight_versions"]
        assert [v["version"] for v in versions] == ["default", "w2"] and versions[-1]["end"] == 1200
        parts(flying.result())
    assert calm.call("/weight_version")[1]["root"] == reply["root"]
    updated = parts(calm.generate(PROMPT, 50))
    assert updated != old
    with engine(models[1], tmp_path, "--weight-version", "w2") as fresh:
        assert parts(fresh.generate(PROMPT, 50)) == updated
        assert fresh.call("/weight_version")[1]["root"] == reply["root"]


def test_update_with_abort_cuts_what_runs(calm, models):
    with ThreadPoolExecutor(1) as pool:
        flying = pool.submit(calm.generate, PROMPT, 1900)
        calm.wait_for(lambda load: load["num_running_reqs"] == 1)
        row = {"model_path": str(models[1]), "abort_all_requests": True}
        status, reply = calm.call("/update_weights_from_disk", row)
        assert status == 200 and reply["version"] == f"root-{reply['root'][:16]}"
        assert flying.result(60)[1]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    "change",
    [
        {"model_path": "/nonexistent"},
        {"model_path": ""},
        {"model_path": "/etc"},
        {"load_format": "delta"},
        {"weight_version": 7},
        {"abort_all_requests": "yes"},
        {"weight_version": "v000003-0123456789abcdef"},
    ],
    ids=str,
)
def test_refused_updates_leave_the_old_weights_answering(server, models, change):
    before, version = parts(server.generate(PROMPT)), server.call("/weight_version")[1]
    row = {"model_path": str(models[1]), "weight_version": "w9"} | change
    status, reply = server.call("/update_weights_from_disk", row)
    assert status == 400 and reply["success"] is False and reply["message"]
    served = server.call("/weight_version")[1] | {"at": version["at"]}  # an audit may have looked since
    assert parts(server.generate(PROMPT)) == before and served == version
    assert server.call("/health_generate")[0] == 200 and server.load()["num_used_tokens"] == 0


def test_a_poisoned_checkpoint_is_refused_by_tensor_name(server, models, tmp_path):
    copy_assets(models[1], tmp_path)
    tensors = load_file(models[1] / "model.safetensors")
    tensors["model.norm.weight"][5] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors")
    before = parts(server.generate(PROMPT))
    status, reply = server.call("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert status == 400 and "model.norm.weight has 1 values that are NaN" in reply["message"]
    assert parts(server.generate(PROMPT)) == before


def test_a_control_body_over_its_limit_is_refused(server):
    body = b'{"rid": "' + b"x" * (1 << 20) + b'"}'
    assert server.call("/abort_request", body)[0] == 413
    assert server.call("/abort_request", {"rid": "x" * 1000}) == (200, {"aborted": 0})


def test_load_reports_under_every_name(calm):
    parts(calm.generate(list(range(3, 40)), 5))
    parts(calm.generate(list(range(3, 40)), 5))
    for query in ("", "?include=core", "?include=core,queues", "?include=all&dp_rank=0"):
        status, row = calm.call(f"/v1/loads{query}")
        load = row["loads"][0]
        assert status == 200 and load["num_total_reqs"] == 0 and load["max_total_num_tokens"] == 16384
        for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "num_total_tokens", "token_usage",
                     "gen_throughput", "cache_hit_rate", "utilization", "timestamp"):  # fmt: skip
            assert isinstance(load[name], int | float), name
        assert ("queues" in load) == (query != "?include=core")
    for query in ("?include=nonsense", "?dp_rank=1"):
        assert calm.call(f"/v1/loads{query}")[0] == 400
    old = calm.call("/get_load")[1]
    assert old[0]["num_reqs"] == 0 == load_total(old)
    assert calm.call("/ready")[0] == calm.call("/ping")[0] == 200


def test_metrics_count_what_was_done(calm):
    def samples() -> dict[str, float]:
        status, text = calm.call("/metrics")
        assert status == 200
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name.split("{")[0] if "_bucket" not in name else name: float(v) for name, v in lines}

    before = samples()
    parts(calm.generate(PROMPT, 7))
    after = samples()

    def grew(name: str) -> float:
        return after[name] - before[name]

    assert grew("sglang:generation_tokens_total") == 7 and grew("sglang:prompt_tokens_total") == 4
    assert grew("sglang:num_requests_total") == 1 and grew("sglang:num_aborted_requests_total") == 0
    assert grew("sglang:time_to_first_token_seconds_count") == 1
    assert grew("sglang:inter_token_latency_seconds_count") == 6
    assert grew("sglang:e2e_request_latency_seconds_count") == 1
    assert after["sglang:num_running_reqs"] == after["sglang:num_queue_reqs"] == 0
    assert after["turnout:weight_version_info"] == 1 and grew("turnout:steps_total") == 7
    calm.call("/pause_generation", {"mode": "in_place"})
    time.sleep(0.05)
    assert samples()["turnout:paused"] == 1
    calm.call("/continue_generation", {})
    assert samples()["turnout:pause_seconds_total"] >= before["turnout:pause_seconds_total"] + 0.05
