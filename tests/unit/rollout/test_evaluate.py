"""An evaluation point: one version, failures counted apart, the same noise every time (MET-05)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.scripted_engine import HANG, RESET, Answer, ScriptedEngine, reply
from tests.unit.rollout.parts import SEEDS, TOKENS, Bench, plan, prompts
from turnout.core.errors import EngineDead, InvariantBroken
from turnout.core.types import Finish
from turnout.rollout.evaluate import EvalPoint, EvalSet, evaluate

DATA = EvalSet("held-out", prompts(2), plan(4))
SEEDS_OF = {SEEDS.child(f"p{n}", member).seed: (n, member) for n in range(2) for member in range(4)}


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
        return await evaluate(bench.generator, bench.rewards, DATA, SEEDS), bench

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
        task = asyncio.ensure_future(evaluate(bench.generator, bench.rewards, DATA, SEEDS))
        await engine.until_running(8)
        for left, who in enumerate([(1, 3), (0, 2), (1, 0), (0, 0), (0, 1), (1, 1), (0, 3), (1, 2)], 1):
            gates[who].set()
            await engine.until_running(8 - left)
        return await task

    shuffled = on(use, reward=lambda label, text: float(label))
    assert shuffled == point(reward=lambda label, text: float(label))[0]


def test_asy_14_two_versions_are_refused() -> None:
    with pytest.raises(InvariantBroken, match=r"held-out has tokens of several versions.*v1.*v2"):
        point(lambda who, usual: reply(TOKENS, "v2" if who == (0, 3) else "v1"))


def test_asy_14_two_versions_within_one_sample_are_refused() -> None:
    mixed = reply(TOKENS, "v1")
    mixed["meta_info"]["weight_versions"] = [
        {"version": "v1", "start": 0, "end": 1},
        {"version": "v2", "start": 1, "end": TOKENS},
    ]
    with pytest.raises(InvariantBroken):
        point(lambda who, usual: mixed if who == (0, 0) else reply(TOKENS, "v1"))


def test_the_noise_depends_on_the_prompt_and_the_sample_only() -> None:
    """Another point, of fewer prompts in another order, samples the same for the prompts they share."""
    small = EvalSet("half", prompts(2)[::-1], plan(2))

    async def use(bench: Bench, engine: ScriptedEngine) -> EvalPoint:
        return await evaluate(bench.generator, bench.rewards, small, SEEDS)

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
            await evaluate(bench.generator, bench.rewards, DATA, SEEDS)
        await engine.until_running(0)

    on(use)


def test_without_one_finished_sample_there_is_no_version() -> None:
    got, _ = point(lambda who, usual: Answer(500, b"boom"))
    assert (got.version, got.items, got.failed) == ("none", 0, 8)
