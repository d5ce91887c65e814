"""Samples of several turns by a function, on a scripted engine: tokens, masks, budgets, faults, cuts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.scripted_engine import HANG, Answer, ScriptedEngine
from tests.unit.rollout.parts import Numbers, prompts
from tests.unit.rollout.test_sampler import SEED, V1, V2, row
from turnout.core.errors import EngineRefused, GenerateFailed
from turnout.core.types import ENVIRONMENT, Finish, Trajectory
from turnout.placement.real import RealClock
from turnout.protocol.sglang import SamplingParams
from turnout.protocol.stream import PartialReply
from turnout.rollout.cut import Cut
from turnout.rollout.draft import Desk, Draft, Pace
from turnout.rollout.episode import Episode, Generate, Turns
from turnout.rollout.sampler import Ask, Routes, Sampler, SamplingPlan
from turnout.weights.routing import Standing

PROMPT = replace(prompts(1)[0], token_ids=(90, 91, 92, 93))
EOS = 7


class Words(Numbers):
    """Texts are ids with spaces between them."""

    size, eos_ids = 1000, (EOS,)

    def encode(self, text: str, special: bool) -> list[int]:
        assert not special
        return [int(word) for word in text.split()]

    def render(self, messages: Any, tools: Any, options: Any) -> str:
        raise NotImplementedError


class World:
    """One engine that makes of each turn what is asked for, and a sampler; `journal` is what a ledger would get."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine, self.journal = engine, list[Trajectory]()
        engine.on_generate = self.made
        client = engine.client()
        self.sampler = Sampler(Routes(lambda: [client]), Words(), RealClock())

    def made(self, body: Any) -> Any:
        first, count = len(body["input_ids"]) - 4, body["sampling_params"]["max_new_tokens"]
        return row(first, count, Finish.LENGTH)

    async def sample(self, generate: Generate, begun: Trajectory | None = None, **more: Any) -> Trajectory:
        new, deadline = more.pop("new", 20), more.pop("deadline", 20.0)
        plan = SamplingPlan(1, SamplingParams(max_new_tokens=new), deadline, 1)
        begun = Trajectory.unbegun(SEED) if begun is None else begun
        turns = Turns(self.sampler, generate, Words(), more.pop("most", 5))
        return await turns.sample(Ask(PROMPT, plan, begun, 0, self._news, **more))

    def _news(self, draft: Draft) -> None:
        self.journal.append(draft.after(sum(len(piece.response_ids) for piece in self.journal)))

    def sent(self) -> list[tuple[tuple[int, ...], int]]:
        """What followed the prompt in each request, and how many tokens it asked for."""
        bodies = self.engine.sent("/generate")
        return [(tuple(b["input_ids"][4:]), b["sampling_params"]["max_new_tokens"]) for b in bodies]


def on(use: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with ScriptedEngine() as engine:
            await asyncio.wait_for(use(World(engine)), 20)

    asyncio.run(main())


def test_turns_and_what_the_environment_says_are_one_exact_sequence() -> None:
    async def use(world: World) -> None:
        told: list[tuple[int, ...]] = []

        async def two(episode: Episode) -> None:
            told.append((await episode.generate(max_new_tokens=3)).ids)
            episode.append("500 501")
            turn = await episode.generate(max_new_tokens=2)
            told.append(turn.ids)
            assert (turn.text, turn.finish, episode.left) == ("45 46", Finish.LENGTH, 13)

        made = await world.sample(two)
        assert made.response_ids == (40, 41, 42, 500, 501, 45, 46) and told == [(40, 41, 42), (45, 46)]
        assert made.loss_mask == (1, 1, 1, 0, 0, 1, 1)
        assert made.logprobs == (-0.4, -0.41, -0.42, 0.0, 0.0, -0.45, -0.46)
        assert made.engines.runs == ((3, "e0"), (2, ENVIRONMENT), (2, "e0"))
        assert made.spans.runs == ((7, V1),) and made.finish is Finish.STOP
        assert made.text == "40 41 42 500 501 45 46"
        assert world.sent() == [((), 3), ((40, 41, 42, 500, 501), 2)]
        assert world.sampler.later_turns() == (4, 0), (
            "the scripted engine says 4 prompt tokens, 0 of them cached"
        )
        assert sum((piece.response_ids for piece in world.journal), ()) == made.response_ids

    on(use)


def test_a_stop_text_of_one_turn_does_not_end_the_next() -> None:
    async def use(world: World) -> None:
        async def two(episode: Episode) -> None:
            assert (await episode.generate(stop=["41"])).finish is Finish.STOP
            episode.append([600])
            await episode.generate(max_new_tokens=2, stop=["41"])

        world.engine.script("/generate", Answer(body=row(0, 2, Finish.STOP)))
        assert (await world.sample(two)).response_ids == (40, 41, 600, 43, 44)
        assert [body["sampling_params"]["stop"] for body in world.engine.sent("/generate")] == [
            ["41"],
            ["41"],
        ]

    on(use)


@pytest.mark.parametrize(
    "limits, ids", [({"new": 7}, (40, 41, 42, 500, 501, 45, 46)), ({"most": 1}, (40, 41, 42, 500, 501)),
                    ({"new": 4}, (40, 41, 42, 500))],
)  # fmt: skip
def test_rol_05_a_sample_ends_by_length_where_tokens_or_turns_are_used_up(limits: Any, ids: Any) -> None:
    async def use(world: World) -> None:
        async def endless(episode: Episode) -> None:
            while True:
                await episode.generate(max_new_tokens=3)
                episode.append([500, 501])

        made = await world.sample(endless, **limits)
        assert (made.response_ids, made.finish) == (ids, Finish.LENGTH)

    on(use)


async def raises(episode: Episode) -> None:
    await episode.generate(max_new_tokens=1)
    raise KeyError("tool")


async def hangs(episode: Episode) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if episode.over is not None:
                await asyncio.sleep(2)
                raise


async def cancels(episode: Episode) -> None:
    await episode.generate(max_new_tokens=1)
    raise asyncio.CancelledError


async def nothing(episode: Episode) -> None: ...


async def speaks_first(episode: Episode) -> None:
    episode.append("1")


@pytest.mark.parametrize(
    "generate, said",
    [(raises, "KeyError: 'tool'"), (hangs, "not ended after 0.2 s"), (nothing, "made no turn"),
     (speaks_first, "ValueError: the first turn"), (cancels, "raised CancelledError")],
)  # fmt: skip
def test_a_function_that_fails_fails_its_sample(generate: Generate, said: str) -> None:
    async def use(world: World) -> None:
        with pytest.raises(GenerateFailed, match=said):
            await world.sample(generate, deadline=0.2 if generate is hangs else 20.0)

    on(use)


def test_what_an_engine_refuses_is_told_as_such() -> None:
    async def use(world: World) -> None:
        async def one(episode: Episode) -> None:
            await episode.generate()

        world.engine.script("/generate", Answer(400))
        with pytest.raises(EngineRefused):
            await world.sample(one)
        world.engine.script("/generate", *[Answer(body=row(0, 0, Finish.ABORT))] * 3)
        assert (await world.sample(one)).partial

    on(use)


@pytest.mark.parametrize("again", [[500, 501], [700], [500]], ids=["equal", "other", "shorter"])
def test_a_sample_that_was_cut_in_a_tool_goes_on_with_what_exists(again: list[int]) -> None:
    """The first turn and what the tool said are told again, not made again; the second turn is then made."""

    async def use(world: World) -> None:
        reached, cut, calls = asyncio.Event(), Cut(), list[list[int]]()

        async def tool(episode: Episode) -> None:
            first = await episode.generate(max_new_tokens=3)
            assert first.ids == (40, 41, 42)
            calls.append(again if calls else [500, 501])
            episode.append(calls[-1])
            if len(calls) == 1:
                reached.set()
                await asyncio.Event().wait()
            if len(again) == 1 and again[0] == 500:
                episode.append([501])
            await episode.generate(max_new_tokens=2)

        task = asyncio.ensure_future(world.sample(tool, cut=cut))
        await reached.wait()
        cut()
        partial = await task
        assert partial.partial and partial.response_ids == (40, 41, 42, 500, 501)
        made = await world.sample(tool, partial)
        assert made.response_ids == (40, 41, 42, 500, 501, 45, 46) and made.loss_mask == (1, 1, 1, 0, 0, 1, 1)
        assert world.sent() == [((), 3), ((40, 41, 42, 500, 501), 2)]

    on(use)


@pytest.mark.parametrize("ended", [False, True])
def test_a_turn_that_was_cut_gets_its_rest_and_one_that_had_ended_is_not_made_longer(ended: bool) -> None:
    async def use(world: World) -> None:
        async def one(episode: Episode) -> None:
            await episode.generate(max_new_tokens=5)

        ids = (40, 41, EOS if ended else 42)
        begun = Trajectory.unbegun(SEED)
        begun = replace(
            begun, response_ids=ids, logprobs=(-0.5,) * 3, loss_mask=(1,) * 3, kv_mixed=(0,) * 3,
            spans=begun.spans.extended(3, V1), engines=begun.engines.extended(3, "old"),
        )  # fmt: skip
        made = await world.sample(one, begun)
        assert made.response_ids == (ids if ended else (40, 41, 42, 43, 44))
        assert world.sent() == ([] if ended else [(ids, 2)])

    on(use)


async def limits(episode: Episode) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(episode.generate(), 0.05)


async def limits_and_goes_on(episode: Episode) -> None:
    await limits(episode)
    episode.append([500])


async def two_at_once(episode: Episode) -> None:
    await asyncio.gather(episode.generate(), episode.generate())


async def leaves_one(episode: Episode) -> None:
    LEFT.append(asyncio.ensure_future(episode.generate()))
    await asyncio.sleep(0.05)


LEFT: list[Any] = []


@pytest.mark.parametrize("generate", [limits, limits_and_goes_on, two_at_once, leaves_one])
def test_a_function_that_goes_on_without_its_turn_fails_and_the_turn_is_ended(generate: Generate) -> None:
    async def use(world: World) -> None:
        world.engine.on_generate = lambda body: HANG
        with pytest.raises(GenerateFailed, match="a turn had not ended"):
            await world.sample(generate, deadline=60.0)
        await asyncio.wait_for(world.engine.until_running(0), 5)
        await asyncio.gather(*LEFT, return_exceptions=True)

    LEFT.clear()
    on(use)


def test_what_an_engine_refuses_is_told_where_the_function_keeps_it_to_itself() -> None:
    async def use(world: World) -> None:
        async def one(episode: Episode) -> None:
            await episode.generate(max_new_tokens=2)
            with contextlib.suppress(Exception):
                await episode.generate()

        world.engine.script("/generate", Answer(body=row(0, 2, Finish.LENGTH)), Answer(400))
        with pytest.raises(EngineRefused):
            await world.sample(one)

    on(use)


def test_what_comes_before_the_first_turn_is_no_part_of_a_sample_before_a_token_is() -> None:
    """It outlives tokens that are taken back, and is the first version's that stays."""
    standings = {V1: Standing.VOID, V2: Standing.COMMITTED}
    desk = Desk(lambda label, _engine: standings[label], RealClock(), Pace())
    draft = Draft(Trajectory.unbegun(SEED), desk, lambda _draft: None)
    draft.begin([8, 9])
    assert draft.trajectory(Finish.ABORT, "").response_ids == () and draft.after(0).response_ids == ()
    draft.extend(PartialReply((1,), (-0.5,), ((1, V1),), (0,), "e0"))
    assert draft.ids == [8, 9], "the token was of a version that never will be"
    draft.extend(PartialReply((2, 3), (-0.5, -0.5), ((2, V2),), (0, 0), "e1"))
    made = draft.trajectory(Finish.STOP, "")
    assert (made.response_ids, made.loss_mask, made.opening) == ((8, 9, 2, 3), (0, 0, 1, 1), 2)
    assert made.spans.runs == ((4, V2),) and made.engines.runs == ((2, ENVIRONMENT), (2, "e1"))
    draft.end_at(3)
    assert draft.trajectory(Finish.STOP, "").response_ids == (8, 9, 2)


@pytest.mark.parametrize("masked", [False, True])
def test_marks_begin_with_the_first_token_that_needs_one(masked: bool) -> None:
    desk = Desk(lambda _label, _engine: Standing.COMMITTED, RealClock(), Pace())
    draft = Draft(Trajectory.unbegun(SEED), desk, lambda _draft: None, masked)
    draft.extend(PartialReply((1, 2), (-0.5, -0.5), ((2, V1),), (0, 0), "e0"))
    assert draft.after(1).loss_mask == (1,) and draft.after(1).kv_mixed == (0,)
    draft.extend(PartialReply((3, 4), (-0.5, -0.5), ((2, V2),), (0, 1), "e0"))
    draft.append([5])
    draft.extend(PartialReply((6,), (-0.5,), ((1, V2),), (0,), "e0"))
    made = draft.trajectory(Finish.STOP, "")
    assert made.loss_mask == (1, 1, 1, 0 if masked else 1, 0, 1)
    assert made.kv_mixed == (0, 0, 0, 1, 0, 0)
    draft.mask_old(V2)
    assert draft.after(0).loss_mask == (0, 0, 1, 0 if masked else 1, 0, 1)
