"""OpenAI's endpoints over real HTTP, against what /generate answers for the same tokens and seed."""

from __future__ import annotations

import json

import pytest
import torch

from tests.engine_models import add_tokenizer, make_model
from tests.engine_process import engine
from tests.process.test_engine_stream import events

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'odd' %}"
    "{{ raise_exception('no such role') }}{% endif %}{% endfor %}{{ mood }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    add_tokenizer(make_model(folder, "llama", torch.bfloat16, 0))
    row = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(row))
    flags = ("--served-model-name", "tiny", "--max-running-requests", "8")
    with engine(folder, tmp_path_factory.mktemp("engine"), *flags) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


@pytest.fixture
def server(process):
    yield process
    process.wait_for(lambda load: load["num_total_reqs"] == 0 and load["num_used_tokens"] == 0)


def native(server, text: str, new: int = 24, **params):
    row = {"max_new_tokens": new, "sampling_seed": 7, "ignore_eos": True} | params
    status, reply = server.call("/generate", {"text": text, "sampling_params": row, "return_logprob": True})
    assert status == 200, reply
    return reply


def asked(new: int = 24, **fields):
    return {"model": "tiny", "max_tokens": new, "seed": 7, "ignore_eos": True} | fields


def test_a_completion_is_what_generate_says(server):
    want = native(server, "once upon")
    body = asked(prompt="once upon", logprobs=0)
    status, row = server.call("/v1/completions", body)
    assert status == 200 and row["object"] == "text_completion" and row["model"] == "tiny"
    choice = row["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == (want["text"], "length", 0)
    pairs = want["meta_info"]["output_token_logprobs"]
    assert choice["logprobs"]["token_logprobs"] == [p[0] for p in pairs]
    assert len(choice["logprobs"]["tokens"]) == 24
    usage = row["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (9, 24, 33)
    assert row["metadata"]["weight_versions"] == [{"version": "default", "start": 0, "end": 24}]
    ids = [b + 3 for b in range(5)]
    assert server.call("/v1/completions", asked(prompt=ids))[1]["usage"]["prompt_tokens"] == 5
    assert len(server.call("/v1/completions", {"prompt": "x", "ignore_eos": True})[1]["choices"]) == 1


def test_lists_and_samples_are_choices_in_order(server):
    body = asked(8, prompt=["ab", "cd"], n=2)
    row = server.call("/v1/completions", body)[1]
    want = [native(server, text, 8, sampling_seed=7 + i)["text"] for text in ("ab", "cd") for i in (0, 1)]
    assert [c["text"] for c in row["choices"]] == want and [c["index"] for c in row["choices"]] == [
        0,
        1,
        2,
        3,
    ]
    assert (row["usage"]["prompt_tokens"], row["usage"]["completion_tokens"]) == (4, 32)
    *chunks, done = events(server, "/v1/completions", body | {"stream": True})
    for index, text in enumerate(want):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in mine) == text
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
    assert done == "[DONE]"


def test_a_stop_string_and_a_streamed_completion(server):
    text = native(server, "tell me", 80)["text"]
    at = next(i for i in range(10, 60) if text[i : i + 2].isprintable() and "\ufffd" not in text[i : i + 2])
    stop = text[at : at + 2]
    body = asked(80, prompt="tell me", stop=[stop, "never there"], logprobs=0)
    choice = server.call("/v1/completions", body)[1]["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, _ = events(server, "/v1/completions", body | options)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == choice["text"]
    streamed = [v for part in parts if part["logprobs"] for v in part["logprobs"]["token_logprobs"]]
    assert streamed == choice["logprobs"]["token_logprobs"]
    assert parts[-1]["finish_reason"] == "stop" and usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(streamed)


def test_a_chat_goes_through_the_template(server):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    want = native(server, "<system>be brief<user>hi<assistant>", 30)
    body = asked(messages=messages, logprobs=True, max_completion_tokens=30)
    status, row = server.call("/v1/chat/completions", body)
    assert status == 200 and row["object"] == "chat.completion"
    choice = row["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": want["text"]}
    values = [p[0] for p in want["meta_info"]["output_token_logprobs"]]
    assert [c["logprob"] for c in choice["logprobs"]["content"]] == values
    *chunks, done = events(server, "/v1/chat/completions", body | {"stream": True})
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(d["delta"].get("content", "") for d in deltas) == want["text"]
    assert deltas[-1]["delta"] == {} and deltas[-1]["finish_reason"] == "length" and done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    moody = asked(messages=messages, chat_template_kwargs={"mood": "!"})
    assert server.call("/v1/chat/completions", moody)[1]["usage"]["prompt_tokens"] == 36
    end = server.call("/v1/chat/completions", {"messages": messages, "seed": 1, "ignore_eos": True})[1]
    assert end["usage"]["total_tokens"] == 512  # without max_tokens a chat goes to the end of the context


USER = [{"role": "user", "content": "hi"}]
BAD = [
    ("completions", {}, "prompt"),
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [1, 999]}, "input_ids[1]"),
    ("completions", {"prompt": ["a", 5]}, "[1].text"),
    ("completions", {"prompt": "a", "logprobs": 3}, "logprobs"),
    ("completions", {"prompt": "a", "echo": True}, "echo"),
    ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": 600}, "max_new_tokens"),
    ("completions", {"prompt": "a", "n": 5000}, "n"),
    ("completions", {"prompt": "a", "best_of": 4}, "best_of"),
    ("completions", {"prompt": "a", "seed": "x"}, "seed"),
    ("completions", {"prompt": "a", "stream": 1}, "stream"),
    ("completions", {"prompt": "a", "presence_penalty": 1.5}, "presence_penalty"),
    ("chat/completions", {}, "messages"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": ["hi"]}, "messages[0]"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
    ("chat/completions", {"messages": [{"role": "odd", "content": ""}]}, "messages"),
    ("chat/completions", {"messages": USER, "tools": [{"type": "function"}]}, "tools"),
    ("chat/completions", {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"messages": USER, "logprobs": 1}, "logprobs"),
    ("chat/completions", {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"messages": USER, "chat_template_kwargs": {"chat_template": ""}}, "chat_template_kwargs"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=str)
def test_what_is_not_served_is_refused_by_name(server, path, body, param):
    status, row = server.call(f"/v1/{path}", body)
    error = row["error"]
    assert status == 400 and (error["param"], error["type"], error["code"]) == (
        param, "invalid_request_error", 400
    )  # fmt: skip
    assert param in error["message"]


def test_models_and_a_version_that_is_not_served(server):
    card = server.call("/v1/models")[1]["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)
    assert server.call("/v1/models/tiny")[1] == card
    assert server.call("/v1/models/other")[1]["error"]["code"] == "model_not_found"
    status, row = server.call("/v1/completions", asked(prompt="a", extra_key=f"v000001-{'a' * 16}"))
    assert status == 409 and row["error"]["type"] == "version_unmet" and row["served"]["version"] == "default"


def test_without_a_chat_template_a_chat_is_refused(tmp_path):
    model = add_tokenizer(make_model(tmp_path / "m", "llama", torch.bfloat16, 0))
    with engine(model, tmp_path) as server:
        status, row = server.call("/v1/chat/completions", {"messages": USER})
        assert status == 400 and "no chat template" in row["error"]["message"]
