"""The wire: every known shape of a reply, the load reports of ROL-11, and sampling parameters."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.core.types import Finish
from turnout.protocol.sglang import GenerateReply, GenerateRequest, SamplingParams, load_total, parse_reply

TWO = [[-0.1, 1, None], [-0.2, 2, None]]


def row(finish: Any = "stop", ids: Any = (1, 2), pairs: Any = TWO, **meta: Any) -> dict[str, Any]:
    finish = {"type": finish} if isinstance(finish, str) else finish
    known = {"finish_reason": finish, "output_token_logprobs": pairs, "weight_version": "3"} | meta
    return {"text": "ab", "output_ids": list(ids), "meta_info": known}


def aborted(reply: GenerateReply, tokens: int = 0) -> None:
    assert reply.finish is Finish.ABORT
    assert len(reply.output_ids) == len(reply.logprobs) == sum(n for n, _ in reply.spans) == tokens


def test_a_natural_stop() -> None:
    reply = parse_reply(row(prompt_tokens=7, cached_tokens=4), 64)
    assert reply == GenerateReply("ab", (1, 2), (-0.1, -0.2), Finish.STOP, "", ((2, "3"),), 7, 4)


def test_an_abort_without_tokens_keeps_its_message() -> None:
    text = '{"text":"","output_ids":[],"meta_info":{"finish_reason":{"type":"abort","message":"x"}}}'
    reply = parse_reply(json.loads(text), 64)
    aborted(reply)
    assert reply.message == "x"


def test_an_abort_with_tokens_but_without_log_probs() -> None:
    text = '{"text":"a","output_ids":[1],"meta_info":{"finish_reason":{"type":"abort"}}}'
    aborted(parse_reply(json.loads(text), 64))


def test_rol_14_tokens_beyond_the_last_log_prob_are_cut() -> None:
    reply = parse_reply(row("abort", (1, 2, 3, 4), [[-0.1, 1, None], [-0.2, 2, None], [-0.3, 3, None]]), 64)
    aborted(reply, 3)
    assert reply.output_ids == (1, 2, 3)


def test_lengths_that_differ_are_no_length_finish() -> None:
    text = (
        '{"text":"ab","output_ids":[1,2],"meta_info":{"finish_reason":{"type":"length"},'
        '"output_token_logprobs":[[-0.1,1,null]],"completion_tokens":2}}'
    )
    aborted(parse_reply(json.loads(text), 2), 1)


def test_rtr_19_a_length_finish_with_no_tokens_is_a_lost_half() -> None:
    text = '{"text":"","output_ids":[],"meta_info":{"finish_reason":{"type":"length"},"completion_tokens":0}}'
    reply = parse_reply(json.loads(text), 64)
    aborted(reply)
    assert reply.message == "said length after 0 of 64 tokens"


def test_rtr_19_a_length_finish_with_fewer_tokens_than_asked() -> None:
    aborted(parse_reply(row("length"), 3), 2)
    assert parse_reply(row("length"), 2).finish is Finish.LENGTH


def test_a_finish_reason_that_is_a_plain_string() -> None:
    aborted(parse_reply({"text": "ab", "meta_info": {"finish_reason": "abort"}}, 64))
    plain = row()
    plain["meta_info"]["finish_reason"] = "stop"
    assert parse_reply(plain, 64).finish is Finish.STOP


def test_a_list_of_one_is_that_one_and_a_list_of_two_is_refused() -> None:
    assert parse_reply([row()], 64) == parse_reply(row(), 64)
    with pytest.raises(ValueError, match="a list of 2"):
        parse_reply([row(), row()], 64)


def test_rol_05_a_text_without_tokens_is_aborted_and_never_tokenised_again() -> None:
    aborted(parse_reply({"text": "ab", "meta_info": {"finish_reason": {"type": "stop"}}}, 64))
    aborted(parse_reply(row("stop", (), []), 64))


def test_rol_20_an_empty_response_is_a_legal_stop() -> None:
    empty = row("stop", (), [])
    empty["text"] = ""
    reply = parse_reply(empty, 64)
    assert (reply.finish, reply.output_ids, reply.spans) == (Finish.STOP, (), ())


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "-Infinity"])
def test_a_log_prob_that_is_not_finite_ends_the_tokens_there(bad: str) -> None:
    text = json.dumps(row("stop", (1, 2, 3), [*TWO, [-0.3, 3, None]])).replace("-0.2", bad)
    reply = parse_reply(json.loads(text), 64)
    aborted(reply, 1)
    assert "finite log-prob" in reply.message


def test_output_ids_that_are_missing_come_from_the_log_probs() -> None:
    bare = row()
    del bare["output_ids"]
    assert parse_reply(bare, 64) == parse_reply(row(), 64)


def test_log_probs_of_other_tokens_are_no_log_probs_of_these() -> None:
    reply = parse_reply(row("stop", (1, 5)), 64)
    aborted(reply, 1)


def test_more_log_probs_than_tokens_are_cut() -> None:
    reply = parse_reply(row("stop", (1,)), 64)
    assert (reply.output_ids, reply.logprobs, reply.finish) == ((1,), (-0.1,), Finish.STOP)


@pytest.mark.parametrize(
    "shape",
    [None, 3, "text", [], {}, {"text": "a"}, {"meta_info": None}, {"meta_info": []},
     {"error": {"message": "no"}}, row("unknown"), row(None), row({"type": None}), row({"type": []}),
     row({}), row(3)],
)  # fmt: skip
def test_unknown_shapes_are_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match=r"reply|finish_reason"):
        parse_reply(shape, 64)


def test_rtr_22_a_reply_without_meta_info_says_what_it_has() -> None:
    with pytest.raises(ValueError, match="meta_info; this one is an object with output_ids, text"):
        parse_reply({"text": "ab", "output_ids": [1, 2]}, 64)


def test_asy_13_versions_by_token_are_kept() -> None:
    versions = [{"version": "v3", "start": 0, "end": 1}, {"version": "v4", "start": 1, "end": 2}]
    assert parse_reply(row(weight_versions=versions), 64).spans == ((1, "v3"), (1, "v4"))


def test_versions_are_cut_with_the_tokens() -> None:
    versions = [{"version": "v3", "start": 0, "end": 1}, {"version": "v4", "start": 1, "end": 3}]
    reply = parse_reply(row("abort", (1, 2, 3), TWO, weight_versions=versions), 64)
    assert reply.spans == ((1, "v3"), (1, "v4"))
    reply = parse_reply(row("abort", (1,), [], weight_versions=versions), 64)
    assert reply.spans == ()


@pytest.mark.parametrize("meta", [{"weight_version": ""}, {"weight_version": None}])
def test_a_reply_without_a_version_is_unknown_and_not_current(meta: dict[str, Any]) -> None:
    assert parse_reply(row(**meta), 64).spans == ((2, "unknown"),)
    bare = row()
    del bare["meta_info"]["weight_version"]
    assert parse_reply(bare, 64).spans == ((2, "unknown"),)


TOKENS = st.lists(st.tuples(st.integers(0, 2**31), st.floats(-1e3, 0)), max_size=12)


@given(TOKENS, st.sampled_from(Finish), st.text(max_size=5), st.lists(st.integers(1, 4), max_size=4))
def test_a_reply_comes_back_as_it_was_sent(
    tokens: list[tuple[int, float]], finish: Finish, text: str, cuts: list[int]
) -> None:
    ids, logprobs = tuple(t for t, _ in tokens), tuple(p for _, p in tokens)
    spans, left = [], len(ids)
    for at, count in enumerate([*cuts, left]):
        take = min(count, left)
        left -= take
        if take:
            spans.append((take, f"v{at}"))
    message = text if finish is Finish.ABORT else ""
    sent = GenerateReply(text if ids else "", ids, logprobs, finish, message, tuple(spans), 3, 1)
    asked = len(ids) if finish is Finish.LENGTH else 64
    assert parse_reply(json.loads(json.dumps(sent.to_json("rid"))), asked) == sent


@pytest.mark.parametrize(
    ("report", "total"),
    [
        ([{"num_reqs": 2}, {"num_reqs": 3}], 5),
        ([{"num_reqs": 2}, {"num_running_reqs": 1, "num_waiting_reqs": 4}], 7),
        ({"loads": [{"num_reqs": 2}, {"num_total_reqs": 3}]}, 5),
        ({"num_reqs": 0}, 0),
        ({"num_total_reqs": 4}, 4),
        ({"num_running_reqs": 1, "num_waiting_reqs": 2}, 3),
        ({"num_total_reqs": 4, "num_running_reqs": 1, "num_waiting_reqs": 2}, 4),
        ({}, None),
        ([], None),
        ({"loads": []}, None),
        ({"loads": {}}, None),
        ({"num_running_reqs": 0}, None),
        ({"num_waiting_reqs": 0}, None),
        ([{"num_reqs": 0}, {}], None),
        (None, None),
        (0, None),
        ("idle", None),
        ({"num_reqs": None}, None),
        ({"num_reqs": "many"}, None),
        ({"num_reqs": -1}, None),
        ({"num_reqs": 0.5}, None),
        ({"num_reqs": True}, None),
        ({"num_running_reqs": 0, "num_waiting_reqs": None}, None),
    ],
)
def test_rol_11_load_reports(report: Any, total: int | None) -> None:
    assert load_total(report) == total


def test_sampling_parameters_have_sglangs_defaults() -> None:
    assert SamplingParams.from_json({}) == SamplingParams()
    assert SamplingParams.from_json(dict.fromkeys(SamplingParams.__dataclass_fields__)) == SamplingParams()


@given(
    st.builds(
        SamplingParams,
        max_new_tokens=st.integers(0, 1 << 20),
        min_new_tokens=st.integers(0, 100),
        temperature=st.floats(0, 100),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(1, 100) | st.just(-1),
        min_p=st.floats(0, 1),
        stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 100), max_size=2).map(tuple),
        ignore_eos=st.booleans(),
        skip_special_tokens=st.booleans(),
        sampling_seed=st.none() | st.integers(0, 2**63 - 1),
    )
)
def test_sampling_parameters_come_back(params: SamplingParams) -> None:
    assert SamplingParams.from_json(json.loads(json.dumps(params.to_json()))) == params


def test_one_stop_text_is_a_list_of_one() -> None:
    assert SamplingParams.from_json({"stop": "END"}).stop == ("END",)
    assert SamplingParams.from_json({"stop_token_ids": 3}).stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("max_new_tokens", "min_new_tokens") for value in (-1, 1.5, "4", True, [4])]
    + [(name, value) for name in ("temperature", "top_p", "min_p") for value in (-0.1, math.nan, "1", True, [1])]
    + [("temperature", math.inf), ("top_p", 0), ("top_p", 1.01), ("min_p", 1.01), ("min_p", math.inf)]
    + [("top_k", 0), ("top_k", -2), ("top_k", 1.5)]
    + [("stop", 3), ("stop", [3]), ("stop", {"a": 1}), ("stop", [None])]
    + [("stop_token_ids", ["a"]), ("stop_token_ids", [1.5]), ("stop_token_ids", [True])]
    + [("sampling_seed", "7"), ("sampling_seed", 1.5), ("sampling_seed", True)]
    + [("ignore_eos", "false"), ("ignore_eos", 0), ("skip_special_tokens", "no")],
)  # fmt: skip
def test_a_wrong_sampling_parameter_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams.from_json({name: value})


def test_a_request_carries_everything_an_engine_needs() -> None:
    request = GenerateRequest(
        "rid", (1, 2), SamplingParams(max_new_tokens=4, sampling_seed=9), extra_key="v1"
    )
    sent = json.loads(json.dumps(request.to_json()))
    assert (sent["rid"], sent["input_ids"], sent["return_logprob"], sent["stream"]) == (
        "rid",
        [1, 2],
        True,
        False,
    )
    assert (sent["extra_key"], sent["sampling_params"]["sampling_seed"]) == ("v1", 9)
    assert "extra_key" not in GenerateRequest("rid", (1,)).to_json()
    assert sent["return_text"] is False, "no text is read, and engines need no tokenizer for the rest"
