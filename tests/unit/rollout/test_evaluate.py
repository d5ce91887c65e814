"""An evaluation point: one version, failures counted apart, the same noise every time (MET-05)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.scripted_engine import HANG, RESET, Answer, ScriptedEngine, reply
from tests.unit.rollout.parts import SEEDS, TOKENS, Bench, plan, prompts
from turnout.core.errors import EngineDead, VersionUnmet, WeightError
from turnout.core.types import Finish
from turnout.placement.real import RealClock
from turnout.rollout.evaluate import (
    EvalMeans,
    EvalPoint,
    EvalSet,
    NoPoint,
    PassAt,
    Requests,
    evaluate,
    pass_at,
)

V1, V2 = (f"v{n:06d}-{'0' * 15}{n}" for n in (1, 2))
DATA = EvalSet("held-out", prompts(2), plan(4))
SEEDS_OF = {SEEDS.child(f"p{n}", member).seed: (n, member) for n in range(2) for member in range(4)}


async def made(bench: Any, data: EvalSet, version: str = "", requests: Requests | None = None) -> Any:
    requests = requests or Requests()
    requests.expect(data.requests)
    return await evaluate(EvalMeans(bench.generator, bench.rewards, SEEDS, requests), data, version)


def on(use: Callable[[Bench, ScriptedEngine], Awaitable[Any]], **more: Any) -> Any:
    async def main() -> Any:
        async with ScriptedEngine() as engine:
            return await asyncio.wait_for(use(Bench(engine, **more), engine), 20)

    return asyncio.run(main())


def point(answer: Callable[[tuple[int, int], Any], Any] = lambda who, usual: usual, **more: Any) -> Any:
    """A point where `answer(which sample, its usual reply)` is what the engine says; and the bench."""

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        engine.on_generate = lambda body: answer(
            SEEDS_OF[body["sampling_params"]["sampling_seed"]], engine.generated(body)
        )
        return await made(bench, DATA), bench

    return on(use, **more)


def test_a_point() -> None:
    got, bench = point(reward=lambda label, text: float(label))
    assert (got.name, got.version, got.score, got.items, got.failed) == ("held-out", "default", 0.5, 8, 0)
    assert [sample.prompt.prompt_id for sample in got.samples] == ["p0"] * 4 + ["p1"] * 4
    assert [sample.tokens for sample in got.samples] == [TOKENS] * 8
    assert bench.book.counts()["taken"] == 0, "an evaluation takes no prompts of the run"


@pytest.mark.parametrize(
    "bad", [Answer(500, b"boom"), Answer(400, {}), Answer(200, {}), reply(0, finish=Finish.ABORT)]
)
def test_met_05_a_failed_sample_is_counted_and_not_zeroed(bad: Any) -> None:
    got, bench = point(lambda who, usual: bad if who == (1, 2) else usual)
    assert (got.score, got.items, got.failed) == (1.0, 7, 1)
    assert [sample.reward for sample in got.samples] == [1.0] * 6 + [None, 1.0]
    assert len(bench.scored) == 7, "an abort is not scored"


def test_met_05_an_unscored_sample_is_counted_and_not_zeroed() -> None:
    got, _ = point(reward=lambda label, text: None if label else 1.0)
    assert (got.score, got.items, got.failed) == (1.0, 4, 4)


def test_met_05_samples_stay_with_their_prompts_in_whatever_order_they_arrive() -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        gates = {who: asyncio.Event() for who in SEEDS_OF.values()}

        async def held(body: Any) -> Any:
            await gates[SEEDS_OF[body["sampling_params"]["sampling_seed"]]].wait()
            return engine.generated(body)

        engine.on_generate = held
        task = asyncio.ensure_future(made(bench, DATA))
        await engine.until_running(8)
        for left, who in enumerate([(1, 3), (0, 2), (1, 0), (0, 0), (0, 1), (1, 1), (0, 3), (1, 2)], 1):
            gates[who].set()
            await engine.until_running(8 - left)
        return await task

    shuffled = on(use, reward=lambda label, text: float(label))
    assert shuffled == point(reward=lambda label, text: float(label))[0]


def test_asy_14_tokens_of_two_versions_make_no_point() -> None:
    got, _ = point(lambda who, usual: reply(TOKENS, "v2" if who == (0, 3) else "v1"))
    assert got == NoPoint("held-out", "", "its tokens are of v1 and v2")


def test_asy_14_two_versions_within_one_sample_make_no_point() -> None:
    mixed = reply(TOKENS, "v1")
    mixed["meta_info"]["weight_versions"] = [
        {"version": "v1", "start": 0, "end": 1},
        {"version": "v2", "start": 1, "end": TOKENS},
    ]
    got, _ = point(lambda who, usual: mixed if who == (0, 0) else reply(TOKENS, "v1"))
    assert got == NoPoint("held-out", "", "its tokens are of v1 and v2")


def pinned(label: str, answer: Callable[[Any], Any]) -> tuple[Any, list[str]]:
    """A point pinned to a label, and the version constraints that the engine saw."""

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        seen: list[str] = []

        def told(body: Any) -> Any:
            seen.append(body["extra_key"])
            return answer(body)

        engine.on_generate = told
        return await made(bench, DATA, label), seen

    return on(use)


def test_asy_14_every_request_asks_for_exactly_the_version_of_the_point() -> None:
    got, seen = pinned(V1, lambda body: reply(TOKENS, V1))
    assert (got.version, got.items) == (V1, 8)
    assert set(seen) == {f"{V1}!"}


def test_asy_14_an_engine_with_other_weights_makes_no_point() -> None:
    """A foreign engine, to which the constraint is only a name: its answers still tell."""
    got, _ = pinned(V1, lambda body: reply(TOKENS, V2))
    assert got == NoPoint("held-out", V1, f"its tokens are of {V2}")


def test_asy_14_a_version_that_is_gone_makes_no_point() -> None:
    served = {"version": V2, "root": "f" * 32}
    unmet = Answer(409, {"error": {"message": "serves another"}, "served": served})
    answers = iter([unmet])
    got, _ = pinned(V1, lambda body: next(answers, reply(TOKENS, V1)))
    assert isinstance(got, NoPoint)
    assert "cannot be asked any more" in got.reason


@pytest.mark.parametrize("fault", [VersionUnmet("e", V2, "", "serves another"), WeightError("no engine")])
def test_asy_14_no_engine_with_the_version_makes_no_point(fault: Exception) -> None:
    class Gone:
        async def sample(self, *ignored: Any) -> Any:
            raise fault

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        bench.generator = cast("Any", Gone())
        return await made(bench, DATA, V1)

    got = on(use)
    assert isinstance(got, NoPoint)
    assert "cannot be asked any more" in got.reason


def held_until_cut(hold_s: float, release: bool) -> tuple[Any, int]:
    """A point of which one request hangs while an update waits; what it came to, and the samples scored."""

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        gate, all_in, asked = asyncio.Event(), asyncio.Event(), []

        async def slow(body: Any) -> Any:
            asked.append(body)
            if len(asked) == 8:
                all_in.set()
            await all_in.wait()
            if SEEDS_OF[body["sampling_params"]["sampling_seed"]] == (1, 3):
                await gate.wait()
            return engine.generated(body)

        engine.on_generate = slow
        requests = Requests()
        task = asyncio.ensure_future(made(bench, DATA, "", requests))
        await all_in.wait()
        await engine.until_running(1)
        if release:
            asyncio.get_running_loop().call_later(0.05, gate.set)
        await requests.idle(RealClock(), hold_s)
        got = await task
        await engine.until_running(0)
        return got, len(bench.scored)

    return on(use)


def test_asy_14_an_update_waits_for_the_requests_and_no_longer_than_the_hold() -> None:
    got, scored = held_until_cut(20.0, release=True)
    assert (got.items, got.failed, scored) == (8, 0, 8)
    got, scored = held_until_cut(0.05, release=False)
    assert got == NoPoint("held-out", "", "1 of its requests were not done within 0.05 s (--eval-hold)")
    assert scored == 7, "what was finished was scored; the point is not written all the same"


def test_nothing_in_flight_holds_no_update() -> None:
    async def main() -> None:
        await Requests().idle(RealClock(), 0.0)

    asyncio.run(main())


def test_met_05_pass_at_k_by_hand() -> None:
    """p0: 2 of 4 right. p1: 1 of 3 finished right, so it counts for pass@1 and pass@2, not for pass@4."""
    right = {(0, 1), (0, 2), (1, 0)}
    texts: dict[str, float] = {}

    def answer(who: tuple[int, int], usual: Any) -> Any:
        if who == (1, 3):
            return Answer(500, b"boom")
        texts[" ".join(map(str, usual["output_ids"]))] = float(who in right)
        return usual

    got, _ = point(answer, reward=lambda label, text: texts[text])
    assert (got.score, got.items, got.failed) == (3 / 7, 7, 1)
    assert got.pass_at == (
        PassAt(1, (2 / 4 + 1 / 3) / 2, 2),
        PassAt(2, ((1 - 1 / 6) + (1 - 1 / 3)) / 2, 2),
        PassAt(4, 1.0, 1),
    )


def test_met_05_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    for right in range(6):
        got, _ = point_of_five(right)
        for one in got.pass_at:
            subsets = list(itertools.combinations([n < right for n in range(5)], one.k))
            assert one.value == pytest.approx(sum(map(any, subsets)) / len(subsets))
        assert [one.k for one in got.pass_at] == [1, 2, 4, 5]


def point_of_five(right: int) -> Any:
    data = EvalSet("five", prompts(1), plan(5))
    left = [1.0] * right + [0.9] * (5 - right)

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        return await made(bench, data), bench

    return on(use, reward=lambda label, text: left.pop())


def test_one_sample_of_each_prompt_has_no_pass_at_k() -> None:
    assert pass_at([], 1) == ()


def test_a_set_with_a_reward_of_its_own_is_scored_by_that() -> None:
    data = EvalSet("own", prompts(2), plan(1), lambda prompt, response, label: 0.25)

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        return await made(bench, data), bench

    got, bench = on(use)
    assert (got.score, bench.scored) == (0.25, [])


def test_met_02_each_set_is_asked_with_its_own_sampling() -> None:
    stopped = replace(plan(1), params=replace(plan(1).params, stop=("A",), min_new_tokens=2))
    sets = [EvalSet("stopped", prompts(1), stopped), EvalSet("free", prompts(1), plan(1))]

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        seen: list[Any] = []

        def told(body: Any) -> Any:
            seen.append(body["sampling_params"])
            return engine.generated(body)

        engine.on_generate = told
        for data in sets:
            await made(bench, data)
        return seen

    first, second = on(use)
    assert (first["stop"], first["min_new_tokens"]) == (["A"], 2)
    assert not second.get("stop")
    assert not second.get("min_new_tokens")


def test_the_noise_depends_on_the_prompt_and_the_sample_only() -> None:
    """Another point, of fewer prompts in another order, samples the same for the prompts they share."""
    small = EvalSet("half", prompts(2)[::-1], plan(2))

    async def use(bench: Bench, engine: ScriptedEngine) -> EvalPoint:
        return await made(bench, small)

    whole, part = point()[0], on(use)
    texts = {(s.prompt.prompt_id, at % 4): s.text for at, s in enumerate(whole.samples)}
    assert [s.text for s in part.samples] == [texts["p1", 0], texts["p1", 1], texts["p0", 0], texts["p0", 1]]


def test_a_dead_engine_ends_the_evaluation_and_all_its_requests() -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> None:
        async def last_words(body: Any) -> Answer:
            if SEEDS_OF[body["sampling_params"]["sampling_seed"]] != (0, 1):
                return HANG
            await engine.until_running(8)
            return RESET

        engine.on_generate = last_words
        with pytest.raises(EngineDead):
            await made(bench, DATA)
        await engine.until_running(0)

    on(use)


def test_without_one_finished_sample_there_is_no_version() -> None:
    got, _ = point(lambda who, usual: Answer(500, b"boom"))
    assert (got.version, got.items, got.failed) == ("none", 0, 8)
