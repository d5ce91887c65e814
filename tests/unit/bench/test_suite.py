"""The registry, the suite's care for the engine between checks, the report and the exit status."""

from __future__ import annotations

import asyncio
import json

import pytest

from turnout.bench import registry
from turnout.bench.facts import read_facts
from turnout.bench.reference import Reference
from turnout.bench.registry import (
    CapabilityAbsent,
    Check,
    CheckFailed,
    Outcome,
    Result,
    check,
    chosen,
    expect,
)
from turnout.bench.replies import must, refused, reply_of
from turnout.bench.report import Report, one_line, table
from turnout.bench.suite import Rules, Suite
from turnout.bench.target import Facts, Target
from turnout.bench.versions import ModelVersion
from turnout.core.errors import ConfigError, EngineDead, InvariantBroken
from turnout.placement.real import RealClock
from turnout.serving.exchange import Answer

FACTS = Facts(512, 320, (2,), "float32", "default", 8, ours=True)


class StubWire:
    """Answers as an idle, healthy engine; `weights` and `paused` change what it answers."""

    def __init__(self) -> None:
        self.weights, self.paused, self.dead = 0, False, False
        self.posts: list[str] = []

    async def get(self, path):
        if self.dead:
            raise EngineDead("stub", path, "none", "gone")
        if path == "/v1/loads":
            return answer({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}, path)
        return Answer(path, 200, "")

    async def post(self, path, body):
        self.posts.append(path)
        if self.dead:
            raise EngineDead("stub", path, "none", "gone")
        if path == "/continue_generation":
            self.paused = False
        if path == "/update_weights_from_disk":
            self.weights = 0
            return answer({"success": True}, path)
        if path != "/generate":
            return Answer(path, 200, "")
        if self.paused:
            return Answer(path, 503, "paused")
        count = body["sampling_params"]["max_new_tokens"]
        tokens = [self.weights + at for at in range(count)]
        return answer(reply_row(tokens, [-0.5 - self.weights] * count), path)


def answer(row, path="/x", status=200):
    return Answer(path, status, json.dumps(row))


def reply_row(tokens, logprobs):
    return {
        "text": "",
        "output_ids": tokens,
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "length"},
            "prompt_tokens": 1,
            "completion_tokens": len(tokens),
            "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, tokens)],
        },
    }


@pytest.fixture
def target(tmp_path):
    version = ModelVersion(tmp_path, "default", "0" * 32)
    return Target(StubWire(), RealClock(), FACTS, Reference(tmp_path), (version,), tmp_path)  # pyright: ignore[reportArgumentType]


def run(target, *bodies, **rules):
    checks = [Check(body.__name__, "group", body, rules.pop(body.__name__, "")) for body in bodies]
    said: list[Outcome] = []
    kept = Rules(rules.get("timeout_s", 5.0), rules.get("risky", False), rules.get("skip", frozenset()))
    outcomes = asyncio.run(Suite(target, kept, said.append).run(checks))
    assert list(outcomes) == said
    return outcomes


async def good(_target):
    """Passes."""
    return "12 of 12"


async def bad(_target):
    """Fails."""
    raise CheckFailed("3, not 4")


async def lacking(_target):
    """Is absent."""
    raise CapabilityAbsent("/x answered 404")


async def odd(_target):
    """Meets an answer it can't read."""
    return {}["meta_info"]


async def endless(_target):
    """Never ends."""
    await asyncio.sleep(60)


def test_three_ways_to_end(target):
    seen = [(o.result, o.detail) for o in run(target, good, bad, lacking, odd)]
    assert seen == [
        (Result.PASSED, "12 of 12"),
        (Result.FAILED, "3, not 4"),
        (Result.ABSENT, "/x answered 404"),
        (Result.FAILED, "an answer was not understood: KeyError('meta_info')"),
    ]


def test_a_check_that_does_not_end_is_failed(target):
    (outcome,) = run(target, endless, timeout_s=0.05)
    assert outcome.result is Result.FAILED and "check endless to end" in outcome.detail


def test_a_check_that_leaves_other_weights_is_failed_and_the_first_ones_are_loaded(target):
    async def swaps(t):
        """Leaves other weights."""
        t.wire.weights = 7
        return "fine"

    outcomes = run(target, swaps, good)
    assert [o.result for o in outcomes] == [Result.FAILED, Result.PASSED]
    assert "other weights answer" in outcomes[0].detail
    assert "/update_weights_from_disk" in target.wire.posts


def test_a_check_that_leaves_a_pause_is_failed_and_it_is_ended(target):
    async def pauses(t):
        """Leaves a pause."""
        t.wire.paused = True
        return "fine"

    outcomes = run(target, pauses, good)
    assert [o.result for o in outcomes] == [Result.FAILED, Result.PASSED]
    assert "answered 503" in outcomes[0].detail


def test_a_lost_engine_fails_every_check_left(target):
    async def kills(t):
        """Ends the engine."""
        t.wire.dead = True
        return "fine"

    outcomes = run(target, kills, good, lacking)
    assert [o.result for o in outcomes] == [Result.FAILED] * 3
    assert all(o.detail.startswith("not run: the engine was lost in kills") for o in outcomes[1:])


def test_risky_checks_are_tried_where_allowed(target):
    target.facts = Facts(512, 320, (2,), "float32", "default", 8, ours=False)
    (outcome,) = run(target, good, good="its scheduler ends")
    assert outcome.result is Result.ABSENT and "its scheduler ends" in outcome.detail
    assert run(target, good, good="its scheduler ends", risky=True)[0].result is Result.PASSED
    (outcome,) = run(target, good, skip=frozenset({"good"}))
    assert outcome.result is Result.ABSENT and "--skip" in outcome.detail


def outcomes(*results):
    return tuple(Outcome(f"c{at}", f"g{at // 2}", result, "why") for at, result in enumerate(results))


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ((Result.PASSED, Result.ABSENT), 0),
        ((Result.PASSED, Result.FAILED), 1),
        ((Result.ABSENT,), 1),
        ((), 1),
    ],
)
def test_exit_status(results, status):
    assert Report("x", outcomes(*results)).exit_status == status


def test_report(target):
    report = Report("http://x:1", outcomes(Result.PASSED, Result.FAILED, Result.ABSENT, Result.FAILED))
    row = json.loads(report.to_json())
    assert {k: row[k] for k in ("engine", "passed", "failed", "absent")} == {
        "engine": "http://x:1",
        "passed": 1,
        "failed": 2,
        "absent": 1,
    }
    assert row["checks"][1] == {
        "name": "c1",
        "group": "g0",
        "result": "failed",
        "detail": "why",
        "seconds": 0.0,
    }
    assert report.summary() == "1 passed, 2 failed (c1, c3), 1 absent"
    lines = table(report.outcomes).splitlines()
    assert lines[0] == "g0" and "FAILED" in lines[2] and "g1" in lines
    assert one_line("a\n b" + "x" * 900).startswith("a bxxx") and len(one_line("x" * 900)) == 400


def test_registry_refuses_a_name_twice_and_a_check_that_proves_nothing(monkeypatch):
    monkeypatch.setattr(registry, "CHECKS", [])
    assert check("g")(good) is good
    with pytest.raises(InvariantBroken):
        check("g")(good)

    async def silent(_target):
        return ""

    with pytest.raises(InvariantBroken):
        check("g")(silent)
    assert [c.name for c in registry.CHECKS] == ["good"]


def test_choosing_by_pattern():
    made = [Check("a_b", "one", good), Check("c_d", "two", good)]
    assert chosen(made, []) == made
    assert [c.name for c in chosen(made, ["two", "a_"])] == ["a_b", "c_d"]
    assert [c.name for c in chosen(made, ["^one"])] == ["a_b"]


def test_expect():
    expect(True, "fine")
    with pytest.raises(CheckFailed, match="3, not 4"):
        expect(False, "3, not 4")


@pytest.mark.parametrize(
    "got",
    [
        Answer("/x", 404, "no"),
        Answer("/x", 405, "no"),
        Answer("/x", 501, "no"),
        answer({"error": {"message": "stream: is not served by this engine"}}, status=400),
        answer({"message": "not yet implemented"}, status=400),
    ],
)
def test_what_means_absent(got):
    with pytest.raises(CapabilityAbsent):
        must(got)


def test_what_is_wrong_instead_of_absent():
    with pytest.raises(CheckFailed):
        must(answer({"error": "top_p must be above 0"}, status=400))
    with pytest.raises(CheckFailed):
        must(Answer("/x", 500, "oops"))
    assert must(Answer("/x", 409, "busy"), 200, 409).status == 409


def test_refusals():
    told = answer({"error": {"message": "320 is outside 0 to 319"}}, status=400)
    assert "319" in refused(told, "320", "319")
    with pytest.raises(CheckFailed, match="without naming 512"):
        refused(told, "512")
    with pytest.raises(CheckFailed, match="not a refusal"):
        refused(Answer("/x", 200, "{}"))
    with pytest.raises(CheckFailed, match="not a refusal"):
        refused(Answer("/x", 500, "oops"))


def test_replies_of_another_shape_are_failures():
    assert reply_of(reply_row([1, 2], [-1.0, -2.0])).logprobs == (-1.0, -2.0)
    row = reply_row([1, 2], [-1.0, -2.0])
    row["output_ids"] = [1, 3]
    for wrong in (None, [], {"text": "a"}, row, {"meta_info": {}}):
        with pytest.raises(CheckFailed):
            reply_of(wrong)


def test_a_model_that_cannot_be_read_is_the_users_fault(tmp_path):
    class Named(StubWire):
        async def get(self, path):
            return answer({"model_path": str(tmp_path / "nowhere"), "weight_version": "default"}, path)

    with pytest.raises(ConfigError, match="--model"):
        asyncio.run(read_facts(Named(), None))  # pyright: ignore[reportArgumentType]
