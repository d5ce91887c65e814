"""From a prompt to a scored group, on a scripted engine: what trains, what does not, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.scripted_engine import HANG, RESET, Answer, ScriptedEngine, reply
from tests.unit.rollout.parts import SEEDS, TOKENS, Bench, Numbers, plan, prompts
from turnout.core.errors import EngineDead
from turnout.core.types import Finish, RolloutGroup, Trajectory, but
from turnout.placement.real import RealClock
from turnout.rollout.rewards import RewardRunner
from turnout.rollout.sampler import TRIES_MAX, Ask, Routes, Sampler
from turnout.rollout.worker import Generator, GroupFailed, Samples

GROUP = RolloutGroup("g00000005.0", 5, 0, prompts(6)[5])


def seed_of(member: int, ordinal: int = 5, attempt: int = 0) -> int:
    return SEEDS.child("sample", ordinal, attempt).child(member).seed


def on(use: Callable[[Bench, ScriptedEngine], Awaitable[Any]], **more: Any) -> Any:
    async def main() -> Any:
        async with ScriptedEngine() as engine:
            return await asyncio.wait_for(use(Bench(engine, **more), engine), 20)

    return asyncio.run(main())


def answered(by_member: dict[int, Any], samples: int = 4, **more: Any) -> Any:
    """The group (or the GroupFailed) when some members get these answers, with the bench and engine."""

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        special = {seed_of(member): answer for member, answer in by_member.items()}
        engine.on_generate = lambda body: special.get(
            body["sampling_params"]["sampling_seed"], engine.generated(body)
        )
        try:
            made: Any = await bench.generator.group(
                GROUP, plan(samples, min_group=more.get("min_group")), SEEDS
            )
        except GroupFailed as fault:
            made = fault
        return made, bench, engine

    return on(use, **{key: value for key, value in more.items() if key != "min_group"})


def abort(tokens: int) -> Any:
    return reply(tokens, finish=Finish.ABORT)


def test_a_group_of_scored_members() -> None:
    made, bench, _ = answered({}, reward=lambda label, text: 0.25)
    assert (made.group_id, made.prompt, len(made.trajectories)) == (GROUP.group_id, GROUP.prompt, 4)
    assert made.rewards == [0.25] * 4
    for member, one in enumerate(made.trajectories):
        assert one.seed == seed_of(member)
        assert one.response_ids == tuple(reply(TOKENS, seed=one.seed)["output_ids"])
        assert one.loss_mask == (1,) * TOKENS
        assert (one.finish, one.engines.runs) == (Finish.LENGTH, ((TOKENS, "e0"),))
        assert one.text == " ".join(map(str, one.response_ids)), "decoded here, from the ids that train"
    assert bench.generator.sampler.tokens_made == 4 * TOKENS
    assert [label for label, _ in bench.scored] == [5] * 4


def test_dat_13_what_a_request_carries() -> None:
    """The very ids that train, and no second way from text to ids."""
    made, _, engine = answered({})
    sent = engine.sent("/generate")
    assert [body["input_ids"] for body in sent] == [[5]] * 4 == [list(made.prompt.token_ids)] * 4
    assert sorted(body["sampling_params"]["sampling_seed"] for body in sent) == sorted(map(seed_of, range(4)))
    assert len({body["rid"] for body in sent}) == 4
    assert all(len(body["rid"]) == 32 for body in sent)
    assert all(body["extra_key"] == "none" for body in sent)
    assert all(body["return_logprob"] is True for body in sent)


def test_rol_16_survivors_train_where_the_plan_allows_it() -> None:
    made, _, _ = answered({2: Answer(500, b"boom")}, min_group=2)
    assert [one.seed for one in made.trajectories] == [seed_of(0), seed_of(1), seed_of(3)]
    assert made.rewards == [1.0] * 3


def test_rol_16_all_or_nothing_is_the_default() -> None:
    made, _, _ = answered({2: Answer(500, b"boom")})
    assert isinstance(made, GroupFailed)
    assert str(made) == "engine: /generate answered 500: boom"


class Own:
    """Samples of which one member has a reward already."""

    def __init__(self, sampler: Samples, member: int | None) -> None:
        self._sampler, self._member = sampler, member

    async def sample(self, ask: Ask) -> Trajectory:
        made = await self._sampler.sample(ask)
        mine = self._member is not None and ask.begun.seed == seed_of(self._member)
        return but(made, reward=0.25) if mine else made


def scored_whole(reward: Any, answers: dict[int, Any] | None = None, own: int | None = None) -> Any:
    """What becomes of a group of 4 with a reward of whole groups, and how often that was called. `own`: the member
    whose function gave a reward of its own."""

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        special = {seed_of(member): answer for member, answer in (answers or {}).items()}
        engine.on_generate = lambda body: special.get(
            body["sampling_params"]["sampling_seed"], engine.generated(body)
        )
        calls: list[Any] = []

        def rewards(prompt: str, responses: list[str], label: Any) -> Any:
            calls.append((prompt, responses, label))
            return reward(responses)

        whole = RewardRunner(rewards, RealClock(), whole=True)
        generator = Generator(Own(bench.generator.sampler, own), whole)
        try:
            return await generator.group(GROUP, plan(4), SEEDS), calls
        except GroupFailed as fault:
            return str(fault), calls

    return on(use)


def test_rol_16_a_reward_of_the_group_gets_all_responses_in_one_call() -> None:
    made, calls = scored_whole(lambda responses: [float(n) for n in range(len(responses))])
    assert made.rewards == [0.0, 1.0, 2.0, 3.0]
    assert calls == [(GROUP.prompt.text, [one.text for one in made.trajectories], GROUP.prompt.label)]


def test_a_reward_of_the_group_leaves_those_of_agents_as_they_are() -> None:
    made, calls = scored_whole(lambda responses: [float(n) for n in range(len(responses))], own=2)
    assert [one.reward for one in made.trajectories] == [0.0, 1.0, 0.25, 3.0] and len(calls) == 1


def test_rol_16_a_reward_of_the_group_needs_all_of_it() -> None:
    made, calls = scored_whole(lambda responses: [1.0] * len(responses), {2: Answer(500, b"boom")})
    assert made == "engine: /generate answered 500: boom"
    assert calls == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1.0, 2.0, 3.0], "unscored: returned list of 3, not a list of 4 numbers"),
        (1.0, "unscored: returned float, not a list of 4 numbers"),
        ([1.0, None, 1.0, 1.0], "unscored: returned None"),
        ([1.0, float("nan"), 1.0, 1.0], "unscored: returned nan"),
    ],
)
def test_rol_17_a_reward_of_the_group_that_gives_something_else_is_no_zero(answer: Any, said: str) -> None:
    assert scored_whole(lambda _: answer)[0] == said


def test_rol_16_too_few_survivors_are_no_smaller_group() -> None:
    made, _, _ = answered({n: Answer(500, b"boom") for n in range(3)}, min_group=2)
    assert isinstance(made, GroupFailed)


def test_rol_04_rol_23_a_sample_that_is_always_aborted_is_never_scored() -> None:
    made, bench, engine = answered({1: abort(0)}, min_group=2)
    assert [one.seed for one in made.trajectories] == [seed_of(0), seed_of(2), seed_of(3)]
    assert len(bench.scored) == 3 and len(engine.calls) == 3 + TRIES_MAX
    made, _, _ = answered({1: abort(0)})
    assert str(made) == "aborted by the engine"


@pytest.mark.parametrize("early", [abort(1), reply(1)])
def test_rtr_19_an_abort_or_a_false_length_is_no_end(early: Any) -> None:
    """It says length after one of three tokens: the rest is asked for."""

    async def use(bench: Bench, engine: ScriptedEngine) -> None:
        engine.script("/generate", Answer(body=early))
        made = await bench.generator.sample(GROUP.prompt, plan(1), 7, 0)
        assert (len(made.response_ids), made.finish) == (TOKENS, Finish.LENGTH)
        assert [body["sampling_params"]["max_new_tokens"] for body in engine.sent("/generate")] == [3, 2]

    on(use)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1.0", {"score": 1.0}])
def test_rol_17_an_unscored_sample_is_not_a_zero(value: Any) -> None:
    calls = 0

    def reward(label: int, text: str) -> Any:
        nonlocal calls
        calls += 1
        return value if calls == 2 else 0.5

    made, _, _ = answered({}, reward=reward, min_group=2)
    assert made.rewards == [0.5] * 3
    calls = 0
    made, _, _ = answered({}, reward=reward)
    assert isinstance(made, GroupFailed)
    assert str(made).startswith("unscored: ")


def test_a_reward_that_raises_is_unscored() -> None:
    def reward(label: int, text: str) -> float:
        raise ZeroDivisionError("by zero")

    made, _, _ = answered({}, reward=reward)
    assert "ZeroDivisionError" in str(made)


def test_rol_20_an_empty_response_is_scored() -> None:
    empty = reply(0, finish=Finish.STOP)
    empty["text"] = ""
    made, bench, _ = answered(dict.fromkeys(range(4), empty), reward=lambda label, text: 0.0)
    assert [one.response_ids for one in made.trajectories] == [()] * 4
    assert [len(one.spans) for one in made.trajectories] == [0] * 4
    assert [text for _, text in bench.scored] == [""] * 4


def test_rtr_08_a_refused_request_is_not_retried() -> None:
    made, bench, engine = answered({n: Answer(400, {"error": {"message": "too long"}}) for n in range(4)})
    assert str(made) == "refused by the engine: /generate answered 400: too long"
    assert len(engine.calls) == 4
    assert bench.clock.slept == []


def test_asy_13_versions_by_token_are_kept() -> None:
    mixed = reply(TOKENS)
    mixed["meta_info"]["weight_versions"] = [
        {"version": "v1", "start": 0, "end": 1},
        {"version": "v2", "start": 1, "end": TOKENS},
    ]
    made, _, _ = answered(dict.fromkeys(range(4), mixed))
    assert made.trajectories[0].spans.runs == ((1, "v1"), (TOKENS - 1, "v2"))


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_engine_is_asked_again(status: int) -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        engine.script("/generate", Answer(status, {}), Answer(status, {}))
        made = await bench.generator.sample(GROUP.prompt, plan(), 7, 0)
        sent = engine.sent("/generate")
        assert len({body.pop("rid") for body in sent}) == 3, "half of a pair may still have the one before"
        assert sent[0] == sent[1] == sent[2], "the same request, with the same seed"
        assert bench.clock.slept == [0.2, 0.2]
        return made

    made = on(use)
    assert isinstance(made, Trajectory)
    assert made.seed == 7


def test_a_busy_engine_is_asked_until_the_deadline_and_no_longer() -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        engine.on_generate = lambda body: Answer(503, {"error": {"code": "no_available_workers"}})
        with pytest.raises(GroupFailed, match=r"503: .*no_available_workers"):
            await bench.generator.group(GROUP, plan(1, deadline_s=5.0), SEEDS)
        assert sum(bench.clock.slept) < 5.0
        return len(engine.calls)

    assert on(use) == 25


def test_a_dead_engine_ends_the_group_and_its_other_members_at_once() -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> None:
        async def after_the_others(body: Any) -> Answer:
            if body["sampling_params"]["sampling_seed"] != seed_of(2):
                return HANG
            await engine.until_running(4)
            return RESET

        engine.on_generate = after_the_others
        with pytest.raises(EngineDead):
            await bench.generator.group(GROUP, plan(4), SEEDS)
        await engine.until_running(0)

    on(use)


def test_a_cancelled_group_cancels_its_members() -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> None:
        engine.on_generate = lambda body: HANG
        task = asyncio.ensure_future(bench.generator.group(GROUP, plan(4), SEEDS))
        await engine.until_running(4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.until_running(0)

    on(use)


def test_engines_take_turns_by_group_and_seeds_do_not_depend_on_them() -> None:
    async def main() -> tuple[list[Any], list[Any]]:
        async with ScriptedEngine("e0") as one, ScriptedEngine("e1") as two:
            both, alone = Bench(one, two), Bench(one)
            groups = [RolloutGroup(f"g{n}", n, 0, prompts(9)[n]) for n in range(4)]
            spread = [await both.generator.group(group, plan(2), SEEDS) for group in groups]
            single = [await alone.generator.group(group, plan(2), SEEDS) for group in groups]
            return spread, single

    spread, single = asyncio.run(main())
    assert [group.trajectories[0].engines.labels[0] for group in spread] == ["e0", "e1", "e0", "e1"]
    tokens = [[one.response_ids for one in group.trajectories] for group in spread]
    assert tokens == [[one.response_ids for one in group.trajectories] for group in single]


def test_another_attempt_samples_anew() -> None:
    seeds = {
        seed_of(member, ordinal, attempt)
        for member in range(8)
        for ordinal in range(8)
        for attempt in range(3)
    }
    assert len(seeds) == 8 * 8 * 3


def test_another_engine_makes_the_sample_of_one_that_is_fenced() -> None:
    """The same sample: its seed does not depend on who makes it."""

    async def main() -> None:
        async with ScriptedEngine("e0") as gone, ScriptedEngine("e1") as there:
            bench = Bench(gone, there)
            clients = [gone.client(bench.clock), there.client(bench.clock)]
            asked = iter(
                [clients, clients]
            )  # whoever watches the engines fences the first one after a moment
            routes = Routes(lambda: next(asked, clients[1:]), changed=lambda: asyncio.sleep(0))
            generator = Generator(Sampler(routes, Numbers(), bench.clock), bench.rewards)
            gone.script("/generate", RESET)
            made = await generator.sample(prompts(1)[0], plan(), 5, 0)
            assert made.engines.labels == ("e1",) and made.seed == 5
            assert len(gone.sent("/generate")) == len(there.sent("/generate")) == 1

    asyncio.run(asyncio.wait_for(main(), 30))
