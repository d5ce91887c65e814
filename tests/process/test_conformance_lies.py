"""The conformance kit can fail: a real engine behind a proxy that lies in one way is found out, by the check that
is there for it; behind an honest proxy the same checks pass."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engine_process import engine
from tests.lying_engine import Lie, LyingEngine, Passed
from turnout.bench.conformance import Plan, conformance
from turnout.bench.registry import Result
from turnout.bench.suite import Rules
from turnout.placement.real import RealClock
from turnout.train.model_zoo import resolve_checkpoint


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    model = resolve_checkpoint("tiny:llama")
    flags = ("--max-running-requests", "8", "--max-step-tokens", "64", "--max-total-tokens", "16384")
    flags += ("--context-length", "1024")
    with engine(model, tmp_path_factory.mktemp("engine"), *flags) as process:
        yield process


def results(url: str, lie: Lie, names: list[str], work) -> dict[str, tuple[Result, str]]:
    async def run():
        async with LyingEngine(url, lie) as liar:
            only = tuple(rf"\.{name}$" for name in names)
            plan = Plan(liar.url, None, work, Rules(timeout_s=60.0, risky=False), only)
            return await conformance(plan, RealClock(), lambda _outcome: None)

    report = asyncio.run(run())
    assert len(report.outcomes) == len(names)
    return {outcome.name: (outcome.result, outcome.detail) for outcome in report.outcomes}


def without(*names: str) -> Lie:
    """The engine does not hear of these sampling parameters."""

    async def request(path: str, body: Any, _ask: Any) -> Any:
        if path == "/generate":
            body["sampling_params"] = {k: v for k, v in body["sampling_params"].items() if k not in names}
        return body

    return Lie(request)


def with_params(**changes: Any) -> Lie:
    """Sampling parameters that were given are changed by these functions."""

    async def request(path: str, body: Any, _ask: Any) -> Any:
        if path == "/generate":
            params = body["sampling_params"]
            params.update({name: change(params[name]) for name, change in changes.items() if name in params})
        return body

    return Lie(request)


def meta(change: Any) -> Lie:
    """Good replies of /generate are changed by this function of meta_info and the whole reply."""

    def reply(path: str, _body: Any, status: int, row: Any) -> tuple[int, Any]:
        if path == "/generate" and status == 200:
            change(row["meta_info"], row)
        return status, row

    return Lie(reply=reply)


def swallowed(*paths: str, row: Any = None) -> Lie:
    """These calls are answered with success and never reach the engine."""

    async def request(path: str, body: Any, _ask: Any) -> Any:
        return Passed(200, row or {"success": True}) if path in paths else body

    return Lie(request)


def shifted_logprobs(info: Any, _row: Any) -> None:
    for pair in info.get("output_token_logprobs", []):
        pair[0] -= 0.2


def one_span(info: Any, row: Any) -> None:
    end = len(row["output_ids"])
    info["weight_versions"] = [{"version": info["weight_version"], "start": 0, "end": end}] if end else []


def cut_logprobs(info: Any, row: Any) -> None:
    if info["finish_reason"]["type"] == "abort" and row["output_ids"]:
        info["output_token_logprobs"] = []


def off_by_one(info: Any, _row: Any) -> None:
    info["prompt_tokens"] += 1


def always_cached(info: Any, _row: Any) -> None:
    info["cached_tokens"] = info["prompt_tokens"] - 1


def text_with_stop(info: Any, row: Any) -> None:
    if info["finish_reason"]["type"] == "stop":
        row["text"] += "x"


async def label_without_weights(path: str, body: Any, ask: Any) -> Any:
    if path == "/update_weights_from_disk" and body.get("weight_version") != "default":
        await ask("/update_weight_version", {"new_version": "other", "abort_all_requests": False})
        return Passed(200, {"success": True})
    return body


def old_root(path: str, _body: Any, status: int, row: Any) -> tuple[int, Any]:
    return status, row | {"root": "0" * 32} if path == "/weight_version" else row


def refusals_hidden(path: str, _body: Any, status: int, row: Any) -> tuple[int, Any]:
    if path == "/update_weights_from_disk" and status == 400:
        return 200, {"success": True}
    return status, row


def loads_what_it_refuses(real_model: str) -> Lie:
    async def request(path: str, body: Any, ask: Any) -> Any:
        if path == "/update_weights_from_disk" and "/nan" in body["model_path"]:
            status, row = await ask(path, body)
            await ask(path, body | {"model_path": real_model, "weight_version": "default"})
            return Passed(status, row)
        return body

    return Lie(request)


def aborts_by_prefix() -> Lie:
    seen: list[str] = []

    async def request(path: str, body: Any, ask: Any) -> Any:
        if path == "/generate" and "rid" in body:
            seen.append(body["rid"])
        if path == "/abort_request" and body.get("rid"):
            for rid in [rid for rid in seen if rid.startswith(body["rid"])]:
                await ask(path, {"rid": rid})
        return body

    return Lie(request)


def other_rids() -> Lie:
    count = iter(range(10**6))

    async def request(path: str, body: Any, _ask: Any) -> Any:
        return body | {"rid": f"{body['rid']}-{next(count)}"} if path == "/generate" else body

    return Lie(request)


LIES: dict[str, tuple[Lie, list[str]]] = {
    "log-probs are off by 0.2": (meta(shifted_logprobs), ["log_probs_equal_reference"]),
    "temperature is ignored": (with_params(temperature=lambda t: t and 1.0), ["log_probs_are_temperature_scaled"]),
    "top_k is ignored": (without("top_k"), ["top_k_support", "top_k_1_is_greedy"]),
    "top_p is ignored": (without("top_p"), ["top_p_support"]),
    "min_p is ignored": (without("min_p"), ["min_p_support"]),
    "seeds are ignored": (without("sampling_seed"), ["seed_decides"]),
    "draws are too cold": (with_params(temperature=lambda t: t * 0.7), ["draws_follow_the_distribution"]),
    "stop ids are ignored": (without("stop_token_ids"), ["stop_token_ids"]),
    "stop strings are ignored": (without("stop"), ["stop_string", "stop_string_over_tokens"]),
    "the text holds more than its tokens": (meta(text_with_stop), ["stop_string"]),
    "min_new_tokens is ignored": (without("min_new_tokens"), ["min_new_tokens"]),
    "one token too many": (with_params(max_new_tokens=lambda n: n + 1), ["max_new_tokens", "generate_from_ids"]),
    "end ids never end": (with_params(ignore_eos=lambda _: True), ["ignore_eos"]),
    "prompt tokens are off by one": (meta(off_by_one), ["usage_counts"]),
    "every id is made unique": (other_rids(), ["duplicate_rid"]),
    "aborts are swallowed": (swallowed("/abort_request"), ["abort_waiting"]),
    "aborts match beginnings": (aborts_by_prefix(), ["abort_is_by_exact_id"]),
    "aborted tokens lose log-probs": (meta(cut_logprobs), ["abort_running"]),
    "pauses are swallowed": (swallowed("/pause_generation"), ["pause_in_place"]),
    "a client that leaves is not heard": (Lie(deaf=True), ["client_hang_up_frees"]),
    "one version for all tokens": (meta(one_span), ["spans_over_an_in_place_update"]),
    "updates are swallowed": (swallowed("/update_weights_from_disk"), ["update_from_many_files"]),
    "only the label is updated": (Lie(label_without_weights), ["update_from_many_files"]),
    "another root is attested": (Lie(reply=old_root), ["root_digest_is_attested", "update_from_many_files"]),
    "the old prefix is reused": (meta(always_cached), ["no_stale_prefix", "no_stale_prefix_in_place"]),
    "refusals are told as success": (Lie(reply=refusals_hidden), ["refuses_nan", "refuses_an_unknown_name"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_found_out(real, name, tmp_path):
    lie, names = LIES[name]
    for attempt in range(
        3
    ):  # one check goes by the pace of tokens, which other work on the machine may change
        (tmp_path / str(attempt)).mkdir()
        seen = results(real.url, lie, names, tmp_path / str(attempt))
        if all(result is Result.FAILED for result, _ in seen.values()):
            break
    assert {check: result for check, (result, _) in seen.items()} == dict.fromkeys(names, Result.FAILED), seen


def test_a_refused_update_that_is_loaded_all_the_same_is_found_out(real, tmp_path):
    other = str(tmp_path / "version-2")
    seen = results(real.url, loads_what_it_refuses(other), ["refuses_nan"], tmp_path)
    assert seen["refuses_nan"][0] is Result.FAILED and "after the refusal" in seen["refuses_nan"][1], seen


def test_behind_an_honest_proxy_all_these_checks_pass(real, tmp_path):
    names = sorted({name for _, checks in LIES.values() for name in checks})
    seen = results(real.url, Lie(), names, tmp_path)
    assert {result for result, _ in seen.values()} == {Result.PASSED}, seen
