"""One sample on scripted engines: cut, aborted, left by its engine, refused, taken back; what the journal gets."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.scripted_engine import HANG, RESET, Answer, ScriptedEngine
from tests.unit.rollout.parts import Numbers, QuickClock, prompts
from turnout.core.errors import DataError, EngineBusy, EngineDead, EngineRefused, WeightError
from turnout.core.rng import SeedTree
from turnout.core.routed import RoutedExperts
from turnout.core.types import Finish, RolloutGroup, Trajectory
from turnout.protocol.sglang import GenerateReply, SamplingParams
from turnout.rollout.cut import Cut
from turnout.rollout.draft import Draft, Pace
from turnout.rollout.rewards import RewardRunner
from turnout.rollout.sampler import TRIES_MAX, Ask, Routes, Sampler, SamplingPlan
from turnout.rollout.worker import Generator
from turnout.weights.routing import Standing

V1, V2 = "v000001-0123456789abcdef", "v000002-0123456789abcdef"
SEED = 40
PROMPT = replace(prompts(1)[0], token_ids=(90, 91, 92, 93))
PLAN = SamplingPlan(1, SamplingParams(max_new_tokens=10), 20.0, 1)


def token(at: int, seed: int = SEED) -> int:
    """What any engine makes at this position of the response: a function of seed and position."""
    return seed + at


def row(first: int, count: int, finish: Finish | None, label: str = V1, **meta: Any) -> Any:
    """A reply or event with the tokens `first` to `first + count` of the response, told as one request's."""
    ids = tuple(token(first + at) for at in range(count))
    spans = ((count, label),) if count else ()
    made = GenerateReply("", ids, tuple(-i / 100 for i in ids), finish or Finish.STOP, "", spans, 4, 0)
    made = made.to_json("rid")
    made["meta_info"] |= {} if finish is not None else {"finish_reason": None}
    made["meta_info"] |= meta
    return made


def behaves(body: Any, label: str = V1, stop_after: int | None = None) -> Any:
    """A good engine: the rest of what is asked for, in one event."""
    made = len(body["input_ids"]) - len(PROMPT.token_ids)
    left = body["sampling_params"]["max_new_tokens"]
    assert left > 0, "no request asks for 0 tokens"
    if stop_after is not None and made + left > stop_after:
        return row(made, stop_after - made, Finish.STOP, label)
    return row(made, left, Finish.LENGTH, label)


def broken(*rows: Any) -> Answer:
    """Events, and then the connection ends without a last one."""
    return Answer(body="".join(f"data: {json.dumps(each)}\n\n" for each in rows).encode())


class World:
    """Scripted engines and what a sample sees of them."""

    def __init__(self, *engines: ScriptedEngine) -> None:
        self.clock = QuickClock()
        self.engines = engines
        self.clients = [engine.client(self.clock) for engine in engines]
        self.standing: dict[str, Standing] = {}
        self.journal: list[Trajectory] = []
        for engine in engines:
            engine.on_generate = behaves
        self.sampler = self.sampler_at(Pace())

    def sampler_at(self, pace: Pace) -> Sampler:
        def routable() -> Sequence[Any]:
            return self.routable()

        def standing(label: str, engine: str) -> Standing:
            return self.standing.get(label, Standing.COMMITTED)

        async def changed() -> None:
            await self.clock.sleep(0.2)

        routes = Routes(routable, standing, changed)
        self.sampler = Sampler(routes, Numbers(), self.clock, pace=pace)
        return self.sampler

    def routable(self) -> list[Any]:
        return self.clients

    def ask(self, begun: Trajectory | None = None, **more: Any) -> Ask:
        plan = replace(PLAN, **{key: more.pop(key) for key in list(more) if hasattr(PLAN, key)})
        begun = Trajectory.unbegun(SEED) if begun is None else begun
        return Ask(PROMPT, plan, begun, 0, self._news, **more)

    def _news(self, draft: Draft) -> None:
        self.journal.append(draft.after(sum(len(piece.response_ids) for piece in self.journal)))

    async def sample(self, begun: Trajectory | None = None, **more: Any) -> Trajectory:
        return await self.sampler.sample(self.ask(begun, **more))

    def sent(self, at: int = 0) -> list[tuple[int, int]]:
        """(tokens of the response that were sent along, tokens asked for) of each request to an engine."""
        return [
            (len(b["input_ids"]) - len(PROMPT.token_ids), b["sampling_params"]["max_new_tokens"])
            for b in self.engines[at].sent("/generate")
        ]


def on(use: Callable[[World], Awaitable[Any]], engines: int = 1) -> Any:
    async def main() -> Any:
        async with ScriptedEngine("e0") as one, ScriptedEngine("e1") as two:
            return await asyncio.wait_for(use(World(*(one, two)[:engines])), 20)

    return asyncio.run(main())


def whole(made: Trajectory, count: int = 10) -> None:
    """All tokens of the response, each once, with what belongs to it."""
    assert made.response_ids == tuple(token(at) for at in range(count))
    assert made.logprobs == tuple(-token(at) / 100 for at in range(count))


def begun(count: int, label: str = V1, engine: str = "old") -> Trajectory:
    ids = tuple(token(at) for at in range(count))
    from_nothing = Trajectory.unbegun(SEED)
    return replace(
        from_nothing,
        response_ids=ids,
        logprobs=tuple(-i / 100 for i in ids),
        loss_mask=(1,) * count,
        spans=from_nothing.spans.extended(count, label),
        engines=from_nothing.engines.extended(count, engine),
        kv_mixed=(0,) * count,
    )


def test_rol_01_a_resumed_sample_has_what_is_left_of_its_budget() -> None:
    """Limit 10, context 16, prompt 4."""

    async def use(world: World) -> None:
        whole(await world.sample(begun(7), context=16))
        assert world.sent() == [(7, 3)]
        made = await world.sample(begun(7), context=12)
        assert (world.sent()[-1], made.finish, len(made.response_ids)) == ((7, 1), Finish.LENGTH, 8)
        (sent,) = world.engines[0].sent("/generate")[:1]
        assert sent["sampling_params"]["sampling_seed"] == SEED and sent["input_ids"][:4] == [90, 91, 92, 93]

    on(use)


@pytest.mark.parametrize("plan", [{}, {"context": 14}])
def test_rol_01_rol_20_nothing_left_is_an_end_by_length_without_a_request(plan: Any) -> None:
    async def use(world: World) -> None:
        made = await world.sample(begun(10), **plan)
        assert made.finish is Finish.LENGTH and made.text == " ".join(map(str, made.response_ids))
        assert not world.engines[0].calls

    on(use)


def test_the_least_length_counts_what_exists() -> None:
    async def use(world: World) -> None:
        params = SamplingParams(max_new_tokens=10, min_new_tokens=9)
        for count in (7, 9):
            await world.sample(begun(count), params=params)
        least = [b["sampling_params"]["min_new_tokens"] for b in world.engines[0].sent("/generate")]
        assert least == [2, 0]

    on(use)


@pytest.mark.parametrize(("masked", "mask"), [(True, (0,) * 5 + (1,) * 3), (False, (1,) * 8)])
def test_rol_02_the_mask_grows_with_the_tokens(masked: bool, mask: tuple[int, ...]) -> None:
    """5 tokens at v1, cut, 3 tokens at v2."""

    async def use(world: World) -> None:
        world.clients[0].version = V2
        world.engines[0].on_generate = lambda body: behaves(body, V2)
        made = await world.sample(begun(5), mask_offpolicy=masked, params=SamplingParams(max_new_tokens=8))
        assert made.loss_mask == mask and made.spans.runs == ((5, V1), (3, V2))
        assert made.engines.runs == ((5, "old"), (3, "e0"))
        same = await world.sample(begun(5, V2), mask_offpolicy=masked)
        assert same.loss_mask == (1,) * 10, "what the serving version made is not old"

    on(use)


def routed_row(body: Any, count: int, finish: Finish, **meta: Any) -> Any:
    """A reply with rows of 2 values: position, and 100 more where the request came later."""
    made, start = len(body["input_ids"]) - len(PROMPT.token_ids), body["routed_experts_start_len"]
    assert body["return_routed_experts"] is True
    told = [[at, at + 100 * bool(made)] for at in range(start, len(body["input_ids"]) + count - 1)]
    text = base64.b64encode(np.array(told, np.int32).tobytes()).decode()
    reply = row(made, count, finish, routed_experts=text, **meta)
    reply["meta_info"]["prompt_tokens"] = len(body["input_ids"])
    return reply


def rows_of(made: Trajectory) -> list[list[int]]:
    return np.frombuffer(made.routed.sequence(4), np.int16).reshape(-1, 2).tolist()


def test_the_experts_of_a_resumed_sample_are_joined() -> None:
    """6 tokens, aborted; the rest from a second request, which is asked for the experts of new tokens only."""

    async def use(world: World) -> None:
        counts = iter(((6, Finish.ABORT), (4, Finish.LENGTH)))
        world.engines[0].on_generate = lambda body: routed_row(body, *next(counts))
        made = await world.sample(routed=True)
        whole(made)
        asked = [b["routed_experts_start_len"] for b in world.engines[0].sent("/generate")]
        assert asked == [0, 9]
        assert rows_of(made) == [[at, at + 100 * (at >= 9)] for at in range(13)]
        assert made.cut(3).joined(made.after(3)) == made

    on(use)


def test_tokens_of_a_request_that_told_no_experts_have_none() -> None:
    """Journalled before a kill, or left by an engine that died."""

    async def use(world: World) -> None:
        world.engines[0].on_generate = lambda body: routed_row(body, 3, Finish.LENGTH)
        ended = SamplingParams(max_new_tokens=10)
        made = await world.sample(begun(7), routed=True, params=ended)
        assert rows_of(made) == [[at, at + 100] for at in range(13)], "the engine computed all of it anew"
        known = replace(begun(3), routed=RoutedExperts(2, bytes(12), bytes(12)))
        joined = known.joined(begun(7).after(3))
        made = await world.sample(joined, routed=True)
        assert rows_of(made) == [[0, 0]] * 6 + [[-1, -1]] * 4 + [[at, at + 100] for at in range(10, 13)]

    on(use)


def test_a_stop_string_leaves_the_experts_of_what_is_kept() -> None:
    """One over a seam, which the engine does not see: found in the tokens, before the reply tells the experts."""

    async def use(world: World) -> None:
        world.engines[0].on_generate = lambda body: routed_row(body, 8, Finish.LENGTH)
        params = SamplingParams(max_new_tokens=10, stop=("41 42",))
        made = await world.sample(begun(2), routed=True, params=params)
        assert (made.finish, len(made.response_ids)) == (Finish.STOP, 3)
        assert rows_of(made) == [[at, at + 100] for at in range(6)]

    on(use)


@pytest.mark.parametrize("told", [None, base64.b64encode(bytes(8)).decode()])
def test_a_reply_without_the_experts_that_were_asked_for_is_one_error(told: str | None) -> None:
    async def use(world: World) -> None:
        world.engines[0].on_generate = lambda _body: row(0, 10, Finish.LENGTH, routed_experts=told)
        with pytest.raises(DataError, match="--enable-return-routed-experts"):
            await world.sample(routed=True)

    on(use)


@pytest.mark.parametrize("masked", [True, False])
def test_tokens_on_kv_of_older_weights_are_marked_and_masked_where_asked(masked: bool) -> None:
    async def use(world: World) -> None:
        mixed = row(0, 10, Finish.LENGTH, kv_mixed=[[2, 4], [9, 10]])
        world.engines[0].script("/generate", Answer(body=mixed))
        made = await world.sample(mask_kv_mixed=masked)
        assert made.kv_mixed == (0, 0, 1, 1, 0, 0, 0, 0, 0, 1)
        assert made.loss_mask == tuple(1 - mark if masked else 1 for mark in made.kv_mixed)

    on(use)


def test_rol_13_rol_23_an_abort_that_nobody_asked_for_is_resumed() -> None:
    async def use(world: World) -> None:
        world.engines[0].script("/generate", *(Answer(body=row(at, 3, Finish.ABORT)) for at in (0, 3, 6)))
        made = await world.sample()
        whole(made)
        assert (made.finish, world.sent()) == (Finish.LENGTH, [(0, 10), (3, 7), (6, 4), (9, 1)])
        assert (world.sampler.resumes, world.sampler.tokens_made) == (3, 10)

    on(use)


def test_rol_13_so_many_aborts_in_a_row_without_a_token_end_the_sample() -> None:
    async def use(world: World) -> None:
        world.engines[0].script("/generate", Answer(body=row(0, 3, Finish.ABORT)))
        world.engines[0].on_generate = lambda body: row(0, 0, Finish.ABORT)
        made = await world.sample()
        assert made == begun(3, engine="e0") and len(world.engines[0].calls) == 1 + TRIES_MAX

    on(use)


def test_rol_14_a_token_without_log_prob_is_cut_off_and_made_again() -> None:
    async def use(world: World) -> None:
        lame = row(0, 4, Finish.ABORT)
        lame["meta_info"]["output_token_logprobs"].pop()
        world.engines[0].script("/generate", Answer(body=lame))
        whole(await world.sample())
        assert world.sent() == [(0, 10), (3, 7)]

    on(use)


def test_rtr_11_a_dead_engines_tokens_are_kept_and_the_next_one_goes_on() -> None:
    async def use(world: World) -> None:
        first = world.engines[0]
        first.script("/generate", broken(row(0, 2, None), row(0, 6, None)))
        world.routable = lambda: world.clients[1:] if first.calls else world.clients  # fenced at once
        made = await world.sample()
        whole(made)
        assert made.engines.runs == ((6, "e0"), (4, "e1")) and world.sent(1) == [(6, 4)]
        assert world.journal and sum(len(piece.response_ids) for piece in world.journal) == 10

    on(use, 2)


def test_a_dead_engine_that_nobody_fences_is_told_as_dead() -> None:
    async def use(world: World) -> None:
        world.engines[0].on_generate = lambda body: RESET
        with pytest.raises(EngineDead):
            await world.sample()
        assert len(world.engines[0].calls) == TRIES_MAX

    on(use)


def test_engines_that_die_and_are_fenced_do_not_use_up_a_samples_tries() -> None:
    async def use(world: World) -> None:
        one, two = world.engines
        deaths = TRIES_MAX + 2

        def dies(body: Any) -> Any:
            return RESET if len(one.calls) + len(two.calls) <= deaths else behaves(body)

        def routable() -> list[Any]:  # who was asked last is fenced, and back once the other one is
            gone = (len(one.calls) + len(two.calls)) % 2
            return [world.clients[gone]]

        one.on_generate = two.on_generate = dies
        world.routable = routable
        whole(await world.sample())
        assert len(one.calls) + len(two.calls) == deaths + 1

    on(use, 2)


def test_rtr_10_an_update_that_leaves_no_engine_is_waited_for() -> None:
    async def use(world: World) -> None:
        asked = 0

        def routable() -> Sequence[Any]:
            nonlocal asked
            asked += 1
            if asked < 4:
                raise WeightError("no engine may serve")
            return world.clients

        world.routable = routable
        whole(await world.sample())
        assert len(world.clock.slept) == 3
        asked = -1000
        with pytest.raises(EngineBusy, match="no engine may serve"):
            await world.sample()

    on(use)


def test_an_engine_of_another_version_is_not_asked_twice_in_a_row() -> None:
    async def use(world: World) -> None:
        served = {"error": {"message": "asks for"}, "served": {"version": V2, "root": "ab"}}
        world.engines[0].on_generate = lambda body: Answer(409, served)
        whole(await world.sample())
        assert world.sent(0) == world.sent(1) == [(0, 10)]
        world.engines[1].on_generate = world.engines[0].on_generate
        with pytest.raises(EngineRefused, match="409"):
            await world.sample(deadline_s=1.0)

    on(use, 2)


def test_the_journal_gets_each_token_once_and_not_too_late() -> None:
    async def use(world: World) -> None:
        world.sampler_at(Pace(tokens=4, seconds=1.0))
        rows = [row(0, at, None) for at in (1, 3, 5, 6, 9)]
        world.engines[0].script("/generate", Answer(body=[*rows, row(0, 10, Finish.LENGTH)]))
        made = await world.sample()
        assert [len(piece.response_ids) for piece in world.journal] == [5, 4, 1]
        together = Trajectory.unbegun(SEED)
        for piece in world.journal:
            assert piece.partial
            together = together.joined(piece)
        assert replace(together, finish=made.finish, text=made.text) == made
        assert world.engines[0].sent("/generate")[0]["sampling_params"]["stream_interval"] == 4

    on(use)


def test_the_journal_gets_what_comes_late_by_the_clock() -> None:
    async def use(world: World) -> None:
        now = iter(range(100))
        world.clock.now = lambda: float(next(now))  # every look at it is a second later
        world.engines[0].script("/generate", Answer(body=[row(0, 1, None), row(0, 2, None), behaves_whole()]))
        await world.sampler.sample(world.ask(deadline_s=1000.0))
        assert [len(piece.response_ids) for piece in world.journal] == [1, 1, 8]

    on(use)


def behaves_whole() -> Any:
    return row(0, 10, Finish.LENGTH)


def test_a_cut_keeps_what_came_and_a_resume_makes_only_the_rest() -> None:
    async def use(world: World) -> None:
        cut, engine = Cut(), world.engines[0]
        world.sampler_at(Pace(tokens=1))
        engine.script("/generate", replace(broken(row(0, 4, None), row(0, 6, None)), ending="stall"))
        task = asyncio.ensure_future(world.sample(cut=cut))
        while sum(len(piece.response_ids) for piece in world.journal) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cut()
        made = await task
        assert made == begun(6, engine="e0")
        await engine.until_running(0)
        resumed = await world.sample(made)
        whole(resumed)
        assert world.sent()[-1] == (6, 4) and not resumed.partial

    on(use)


def test_after_a_cut_nothing_is_asked_for() -> None:
    async def use(world: World) -> None:
        cut = Cut()
        cut()
        assert await world.sample(cut=cut) == Trajectory.unbegun(SEED)
        assert not world.engines[0].calls

    on(use)


def test_what_is_cut_ends_in_the_order_in_which_it_began() -> None:
    async def main() -> list[int]:
        cut, ended = Cut(), list[int]()

        async def work(number: int) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(number)

        tasks = [asyncio.ensure_future(cut.under(work(number))) for number in range(40)]
        await asyncio.sleep(0)
        cut()
        await asyncio.gather(*tasks)
        return ended

    assert asyncio.run(main()) == list(range(40))


def test_a_task_that_is_cancelled_besides_stays_cancelled() -> None:
    async def use(world: World) -> None:
        cut = Cut()
        world.engines[0].on_generate = lambda body: HANG
        task = asyncio.ensure_future(world.sample(cut=cut))
        await world.engines[0].until_running(1)
        cut()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    on(use)


def test_tokens_of_a_version_that_never_is_committed_are_made_again() -> None:
    async def use(world: World) -> None:
        first = world.engines[0]
        world.standing[V2] = Standing.VOID
        spans = [{"version": V1, "start": 0, "end": 4}, {"version": V2, "start": 4, "end": 6}]
        first.script("/generate", Answer(body=[row(0, 6, None, weight_versions=spans), behaves_whole()]))
        made = await world.sample()
        whole(made)
        assert made.spans.runs == ((10, V1),) and made.engines.runs == ((4, "e0"), (6, "e1"))
        assert all(piece.spans.labels == (V1,) for piece in world.journal)
        assert sum(len(piece.response_ids) for piece in world.journal) == 10

    on(use, 2)


@pytest.mark.parametrize("ends", [Standing.COMMITTED, Standing.VOID])
def test_tokens_of_a_version_under_way_wait_for_its_end(ends: Standing) -> None:
    async def use(world: World) -> None:
        world.sampler_at(Pace(tokens=1))
        world.standing[V2] = Standing.TENTATIVE
        spans = [{"version": V1, "start": 0, "end": 4}, {"version": V2, "start": 4, "end": 10}]
        world.engines[0].script("/generate", Answer(body=row(0, 10, Finish.LENGTH, weight_versions=spans)))
        told: list[int] = []

        async def sleep(seconds: float) -> None:
            told.append(sum(len(piece.response_ids) for piece in world.journal))
            if len(told) == 3:
                world.standing[V2] = ends

        world.clock.sleep = sleep
        made = await world.sample()
        assert told == [4, 4, 4] and len(made.response_ids) == 10
        kept = ((4, V1), (6, V2)) if ends is Standing.COMMITTED else ((10, V1),)
        assert made.spans.runs == kept

    on(use)


@pytest.mark.parametrize("last", ["42 43", "43 44"])
def test_a_stop_text_over_the_seam_of_two_requests_ends_the_response(last: str) -> None:
    """Tokens decode to their numbers: the first request made 40 41 42 43, and `last` lies in it or across."""

    async def use(world: World) -> None:
        made = await world.sample(begun(4), params=SamplingParams(max_new_tokens=10, stop=(last,)))
        whole(made, 4 if last == "42 43" else 5)
        assert made.finish is Finish.STOP and made.text.endswith(last)
        assert len(world.engines[0].calls) == (0 if last == "42 43" else 1)

    on(use)


def test_a_group_makes_only_what_is_missing() -> None:
    async def use(world: World) -> None:
        scored: list[str] = []

        async def reward(prompt: str, response: str, label: Any) -> float:
            scored.append(response)
            return 1.0

        generator = Generator(world.sampler, RewardRunner(reward, world.clock))
        node = SeedTree(3).child("sample", 0, 0)
        seeds = [node.child(member).seed for member in range(4)]
        done = replace(begun(10), seed=seeds[0], finish=Finish.LENGTH, text="done", reward=0.5)
        unscored = replace(done, seed=seeds[1], text="unscored", reward=None)
        half = replace(begun(6), seed=seeds[3])
        group = RolloutGroup("g", 0, 0, PROMPT, (done, unscored, half))
        kept: list[tuple[int, str]] = []

        class Keep:
            def tokens(self, member: int, draft: Draft) -> None:
                kept.append((member, "tokens"))

            def ended(self, member: int, made: Trajectory) -> None:
                kept.append((member, "ended"))

        made = await generator.group(group, replace(PLAN, samples=4, min_group=4), SeedTree(3), Keep())
        assert [t.seed for t in made.trajectories] == seeds and made.rewards == [0.5, 1.0, 1.0, 1.0]
        assert made.trajectories[0] is done
        assert sorted(world.sent()) == [(0, 10), (6, 4)] and scored.count("unscored") == 1
        assert sorted(kept) == [(1, "ended"), (2, "ended"), (2, "tokens"), (3, "ended"), (3, "tokens")]

    on(use)


def test_a_group_that_is_cut_has_finished_members_and_partial_ones() -> None:
    async def use(world: World) -> None:
        scored = asyncio.Event()

        async def reward(prompt: str, response: str, label: Any) -> float:
            scored.set()
            return 1.0

        cut, engine = Cut(), world.engines[0]
        node = SeedTree(3).child("sample", 0, 0)
        first = node.child(0).seed

        def answer(body: Any) -> Any:
            return behaves(body) if body["sampling_params"]["sampling_seed"] == first else HANG

        engine.on_generate = answer
        generator = Generator(world.sampler, RewardRunner(reward, world.clock))
        group = RolloutGroup("g", 0, 0, PROMPT)
        plan = replace(PLAN, samples=3, min_group=3)
        task = asyncio.ensure_future(generator.group(group, plan, SeedTree(3), None, cut))
        while engine.running != 2 or len(engine.calls) != 3 or not scored.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cut()
        made = await task
        assert made.partial and [t.partial for t in made.trajectories] == [False, True, True]
        engine.on_generate = behaves
        again = await generator.group(made, plan, SeedTree(3))
        assert not again.partial and again.rewards == [1.0] * 3 and len(engine.calls) == 5

    on(use)


@pytest.mark.parametrize(
    "params, goes_on",
    [({}, False), ({"stop_token_ids": (token(3),)}, False), ({"min_new_tokens": 3}, False),
     ({"min_new_tokens": 4}, True), ({"ignore_eos": True, "stop_token_ids": (token(3),)}, True)],
)  # fmt: skip
def test_a_sample_whose_end_token_exists_is_not_made_further(params: Any, goes_on: bool) -> None:
    async def use(world: World) -> None:
        if params.get("stop_token_ids") is None:
            world.sampler.decoder = ends_with(token(3))
        for offpolicy in (False, True):
            plan = {"params": SamplingParams(max_new_tokens=10, **params), "mask_offpolicy": offpolicy}
            made = await world.sample(begun(4), **plan)
            if goes_on:
                whole(made)
            else:
                assert (made.response_ids, made.finish) == (begun(4).response_ids, Finish.STOP)
                assert made.loss_mask == (1,) * 4 and made.text == "40 41 42 43"
        assert bool(world.engines[0].calls) is goes_on

    on(use)


def test_an_engine_that_died_with_the_end_token_is_not_asked_again() -> None:
    async def use(world: World) -> None:
        world.sampler.decoder = ends_with(token(3))
        world.engines[0].script("/generate", broken(row(0, 4, None)))
        made = await world.sample()
        assert (len(made.response_ids), made.finish, len(world.engines[0].calls)) == (4, Finish.STOP, 1)

    on(use)


def ends_with(*ids: int) -> Numbers:
    decoder = Numbers()
    decoder.eos_ids = ids
    return decoder


def test_where_the_prompts_engine_had_void_weights_nothing_of_the_pairs_answer_stays() -> None:
    async def use(world: World) -> None:
        prompts, decode = world.clients
        prompts.bootstrap_port = 77
        decode_engine = world.engines[1]

        def standing(label: str, engine: str) -> Standing:
            return Standing.VOID if engine == "e0" else Standing.COMMITTED

        def prefills(_engine: Any) -> Sequence[Any]:
            return () if decode_engine.calls else [prompts]

        async def changed() -> None:
            await world.clock.sleep(0.2)

        routes = Routes(lambda: [decode], standing, changed, prefills=prefills)
        sampler = Sampler(routes, Numbers(), world.clock)
        decode_engine.script("/generate", replace(broken(row(0, 4, None)), ending="stall"))
        made = await sampler.sample(world.ask())
        whole(made)
        assert made.engines.runs == ((10, "e1"),) and world.sent(1) == [(0, 10), (0, 10)]

    on(use, 2)


def test_an_engine_that_is_busy_after_some_tokens_is_asked_for_the_rest() -> None:
    async def use(world: World) -> None:
        busy = {"error": {"message": "none", "code": "no_available_workers"}}
        world.clients[0]._kind = lambda status, text: EngineBusy  # as a router's client reads it
        world.engines[0].script("/generate", broken(row(0, 4, None), busy))
        whole(await world.sample())
        assert world.sent() == [(0, 10), (4, 6)]

    on(use)
