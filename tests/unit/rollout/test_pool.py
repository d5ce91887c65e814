"""A rollout takes as many prompts as it needs, gives groups in source order, and ends with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.scripted_engine import HANG, RESET, Answer, ScriptedEngine
from tests.unit.rollout.parts import NO_LIMITS, Bench, plan, prompts
from turnout.core.errors import EngineDead, InvariantBroken, NothingToTrain, RunStopped, TrainError
from turnout.core.events import GroupDropped, GroupTaken
from turnout.core.rng import SeedTree
from turnout.rollout.filters import FilterPlan, load_filter, of_no_variance
from turnout.rollout.pool import RolloutPool
from turnout.rollout.pool_plan import CollectLimits, PoolPlan, Taken
from turnout.rollout.source import PromptSource

BOOM = Answer(500, b"boom")


def on(use: Callable[[Bench, ScriptedEngine], Awaitable[Any]], **more: Any) -> Any:
    async def main() -> Any:
        async with ScriptedEngine() as engine:
            return await asyncio.wait_for(use(Bench(engine, **more), engine), 20)

    return asyncio.run(main())


def collected(count: int, limits: CollectLimits = NO_LIMITS, bad: Any = (), **more: Any) -> Any:
    """One collect where the prompts in `bad` fail: what it gave or raised, the bench."""

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        engine.on_generate = lambda body: BOOM if body["input_ids"][0] in bad else engine.generated(body)
        try:
            return await bench.collect(0, count, plan(), limits), bench
        except TrainError as fault:
            return fault, bench

    return on(use, **more)


def ordinals(got: Taken) -> list[int]:
    return [group.ordinal for group in got.groups]


def limits(failed: int = 100, filtered: int = 100, equal: bool = True) -> CollectLimits:
    return CollectLimits(failed, FilterPlan(of_no_variance if equal else lambda _: None, filtered))


def by_prompt(wins: Any) -> Any:
    """A reward that differs within the groups in `wins` and is equal in all others."""
    seen: dict[int, int] = {}

    def reward(label: int, text: str) -> float:
        seen[label] = seen.get(label, 0) + 1
        return float(seen[label] % 2) if label in wins else 1.0

    return reward


def test_exactly_as_many_prompts_are_taken_as_needed() -> None:
    got, bench = collected(8)
    assert ordinals(got) == list(range(8))
    assert bench.source.position == 8
    assert (got.failed, got.filtered, got.short) == (0, 0, "")


def test_cfg_16_one_filtered_group_is_replaced_by_one_prompt() -> None:
    got, bench = collected(8, limits(), reward=by_prompt(set(range(20)) - {3}))
    assert ordinals(got) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert bench.source.position == 9
    assert (got.failed, got.filtered, got.short) == (0, 1, "")
    assert bench.book.dropped == {"all rewards equal": 1}


def test_one_failed_group_is_replaced_by_one_prompt() -> None:
    got, bench = collected(8, bad={3, 8})
    assert ordinals(got) == [0, 1, 2, 4, 5, 6, 7, 9]
    assert bench.source.position == 10
    assert got.failed == 2
    assert bench.log.of(GroupDropped) == [
        GroupDropped(f"g0000000{n}.0", "engine: /generate answered 500: boom") for n in (3, 8)
    ]


def test_every_group_is_told_with_its_step() -> None:
    _, bench = collected(3)
    assert bench.log.of(GroupTaken) == [GroupTaken(f"g0000000{n}.0", f"p{n}", 0) for n in range(3)]
    assert bench.book.counts() == {"taken": 3, "trained": 0, "dropped": 0, "requeued": 0, "lost": 0}
    assert len(bench.book.open_groups) == 3


def test_rol_07_failures_have_a_limit_that_names_the_commonest_reason() -> None:
    fault, bench = collected(4, limits(failed=5), bad=range(100))
    assert isinstance(fault, TrainError)
    text = str(fault)
    assert "--max-failed-groups 5" in text
    assert "engine: /generate answered 500: boom" in text
    assert 6 <= bench.book.dropped.total() <= 9, "a limit, and at most one wave over it"
    assert bench.source.position <= 13


def test_failures_up_to_the_limit_are_no_error() -> None:
    got, _ = collected(4, limits(failed=5, equal=False), bad=range(5))
    assert (ordinals(got), got.failed) == ([5, 6, 7, 8], 5)


def test_rol_07_a_filter_that_drops_everything_is_an_error() -> None:
    fault, bench = collected(4, limits(filtered=12))
    assert isinstance(fault, TrainError)
    assert "all rewards equal" in str(fault)
    assert "too easy or too hard" in str(fault)
    assert 12 <= bench.source.position <= 16, "three waves, and no more"


def test_rol_07_at_the_limit_of_the_filter_the_batch_is_what_passed() -> None:
    got, bench = collected(4, limits(filtered=6), reward=by_prompt({1, 2}))
    assert ordinals(got) == [1, 2]
    assert got.short == (
        f"2 of 4 groups of the batch: 2 of {got.filtered + 2} groups passed the filter, {got.filtered} were "
        "dropped: all rewards equal"
    )
    assert 6 <= got.filtered <= 9
    assert bench.book.counts()["lost"] == 0


@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.3] * 6, [0.9] * 3])
def test_rol_08_equal_rewards_are_equal_whatever_their_rounding(rewards: list[float]) -> None:
    left = list(rewards)

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        with pytest.raises(TrainError, match="0 of 1 groups passed"):
            await bench.collect(0, 1, plan(len(rewards)), limits(filtered=1))

    on(use, reward=lambda label, text: left.pop())


def test_rol_08_nearly_equal_rewards_are_kept() -> None:
    left = [0.1] * 7 + [0.1001]

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        return await bench.collect(0, 1, plan(8), limits())

    assert len(on(use, reward=lambda label, text: left.pop()).groups) == 1


def test_without_the_filter_equal_rewards_train() -> None:
    got, _ = collected(4, limits(equal=False))
    assert (len(got.groups), got.filtered) == (4, 0)


def test_asy_02_the_last_batch_is_what_is_left_and_says_so() -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        return [await bench.collect(step, 4, plan(), NO_LIMITS) for step in range(3)]

    first, second, third = on(use, rows=7)
    assert (ordinals(first), first.short) == ([0, 1, 2, 3], "")
    assert (ordinals(second), second.short) == ([4, 5, 6], "end of the data")
    assert (ordinals(third), third.short) == ([], "end of the data")


def test_a_batch_that_the_data_fills_exactly_is_not_short() -> None:
    got, bench = collected(4, rows=4)
    assert (ordinals(got), got.short) == ([0, 1, 2, 3], "")
    assert bench.source.exhausted


def test_a_failure_at_the_end_of_the_data_leaves_a_short_batch() -> None:
    got, _ = collected(4, rows=4, bad={2})
    assert (ordinals(got), got.short, got.failed) == ([0, 1, 3], "end of the data", 1)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_groups_come_in_source_order_with_the_same_samples_whatever_the_order_of_answers(
    order: list[int],
) -> None:
    """Answers are held until all requests are in, then given prompt by prompt in this order."""

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        gates = {n: asyncio.Event() for n in order}

        async def held(body: Any) -> Any:
            await gates[body["input_ids"][0]].wait()
            return engine.generated(body)

        engine.on_generate = held
        task = asyncio.ensure_future(bench.collect(0, 4, plan(), NO_LIMITS))
        await engine.until_running(8)
        for left, n in enumerate(order, 1):
            gates[n].set()
            await engine.until_running(8 - 2 * left)
        got = await task
        completed = [event.group for event in bench.log.events if type(event).__name__ == "GroupCompleted"]
        assert sorted(completed) == [group.group_id for group in got.groups]
        return [(g.ordinal, [t.response_ids for t in g.trajectories]) for g in got.groups]

    straight = collected(4)[0]
    assert on(use) == [(g.ordinal, [t.response_ids for t in g.trajectories]) for g in straight.groups]


def test_a_dead_engine_ends_the_rollout_and_every_request_of_it() -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> None:
        async def last_words(body: Any) -> Answer:
            if body["input_ids"][0] != 2:
                return HANG
            await engine.until_running(8)
            return RESET

        engine.on_generate = last_words
        with pytest.raises(EngineDead) as caught:
            await bench.collect(0, 4, plan(), NO_LIMITS)
        assert caught.value.phase == "rollout"
        await engine.until_running(0)
        assert len(bench.book.open_groups) == 4, "whoever ends the run gives each its end"

    on(use)


def test_a_cancelled_rollout_cancels_every_request() -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> None:
        engine.on_generate = lambda body: HANG
        task = asyncio.ensure_future(bench.collect(0, 4, plan(), NO_LIMITS))
        await engine.until_running(8)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.until_running(0)

    on(use)


def test_invariant_1_holds_with_failures_and_filters_mixed() -> None:
    got, bench = collected(10, limits(), bad={1, 4, 9}, reward=by_prompt(set(range(50)) - {2, 3, 11}))
    assert len(got.groups) == 10
    taken = {event.group for event in bench.log.of(GroupTaken)}
    dropped = [event.group for event in bench.log.of(GroupDropped)]
    assert len(dropped) == len(set(dropped)) == got.failed + got.filtered
    assert taken == {g.group_id for g in got.groups} | set(dropped)
    assert set(bench.book.open_groups) == {g.group_id for g in got.groups}
    assert bench.source.position == len(taken)


def test_a_short_step_holds_the_slots_of_the_groups_that_it_lacks() -> None:
    """Rule 4 of docs/staleness.md: else the next groups would begin on weights that lack this step."""

    async def use(bench: Bench, _engine: ScriptedEngine) -> list[int]:
        pool = RolloutPool(bench.ports, PoolPlan(4, 4, 1, None, plan(), limits(filtered=3), 20.0))
        taken = [len((await pool.take(4)).groups)]
        pool.end_step()
        taken.append(bench.source.position)
        pool.committed(1)
        taken.append(bench.source.position)
        await pool.close()
        return taken

    assert on(use, reward=by_prompt({0})) == [1, 6, 10]


async def quiet(pool: RolloutPool) -> None:
    """Returns when nothing is in flight; the test's own deadline bounds it."""
    for _ in range(1000):
        if not pool.in_flight:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{pool.in_flight} groups still in flight")


def filtering(otherwise: Any, filtered: int = 6, wins: Any = (), reject: Any = of_no_variance) -> Any:
    """One collect of 4 with a filter that ends its rounds this way."""
    return collected(
        4, CollectLimits(100, FilterPlan(reject, filtered, otherwise, 2)), reward=by_prompt(set(wins))
    )


def test_rol_07_best_fills_the_batch_with_rejected_groups() -> None:
    got, bench = filtering("best", wins={2})
    assert (len(got.groups), got.short) == (4, "")
    assert ordinals(got)[0] == 2, "what passed comes first"
    taken = {group.group_id for group in got.groups}
    assert set(bench.book.open_groups) == taken, "the others that were kept aside have ended"
    assert bench.book.dropped.total() == got.filtered - 3


def test_rol_07_best_holds_no_more_slots_than_there_are() -> None:
    """Groups kept aside leave their slots and take them back: 4 of 4 are taken by the batch, no more can come."""

    async def use(bench: Bench, _engine: ScriptedEngine) -> Any:
        few = CollectLimits(100, FilterPlan(of_no_variance, 6, "best", 2))
        pool = RolloutPool(bench.ports, PoolPlan(4, 4, 1, None, plan(), few, 20.0))
        await pool.take(4)
        pool.end_step()
        position = bench.source.position
        await asyncio.sleep(0.05)
        assert (pool.in_flight, bench.source.position) == (0, position)
        pool.committed(1)
        assert (pool.in_flight, bench.source.position) == (4, position + 4)
        await pool.close()

    on(use)


def test_rol_07_skip_goes_on_with_what_passed_and_stops_after_its_rounds() -> None:
    got, _ = filtering("skip", wins={1, 9, 16, 17})
    assert ordinals(got) == [1, 9, 16, 17]
    assert got.filtered == 14
    fault, _ = filtering("skip", wins={1})
    assert isinstance(fault, NothingToTrain)
    assert "2 rounds in a row were skipped" in str(fault)


def test_rol_07_stop_stops() -> None:
    fault, _ = filtering("stop", wins={1})
    assert isinstance(fault, NothingToTrain)
    assert "all rewards equal (--on-all-filtered stop)" in str(fault)


@pytest.mark.parametrize("otherwise", ["train", "best", "skip", "stop"])
def test_rol_07_a_data_set_smaller_than_a_round_ends(otherwise: Any) -> None:
    """5 prompts, nothing passes, 6 rejections allowed: the end of the data, and no waiting."""
    limits = CollectLimits(100, FilterPlan(of_no_variance, 6, otherwise, 2))
    got, bench = collected(4, limits, rows=5)
    assert (got.groups, got.short, got.last) == ([], "end of the data", True)
    assert bench.source.position == 5


def test_a_users_filter_gives_the_reasons(tmp_path: Any) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def keep(group):\n    return True if group.ordinal != 2 else 'short'\n")
    got, bench = filtering("train", reject=load_filter(f"{path}:keep"))
    assert ordinals(got) == [0, 1, 3, 4]
    assert bench.book.dropped == {"short": 1}


@pytest.mark.parametrize(("body", "said"), [("1 / 0", "ZeroDivisionError"), ("None", "gave None")])
def test_a_users_filter_that_fails_ends_the_run_with_its_fault(tmp_path: Any, body: str, said: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(f"def keep(group):\n    return {body}\n")
    fault, _ = filtering("train", reject=load_filter(f"{path}:keep"))
    assert isinstance(fault, TrainError)
    assert said in str(fault)


def test_complete_groups_beside_the_batch_are_surplus_too() -> None:
    """In the next batch they would be a step old."""

    async def use(bench: Bench, _engine: ScriptedEngine) -> Any:
        pool = RolloutPool(bench.ports, replace(SURPLUS, slots=6, surplus=4))
        pool.committed(0)
        await quiet(pool)
        got = await pool.take(2)
        pool.end_step()
        await pool.drain()
        rest = set(bench.book.open_groups) - {group.group_id for group in got.groups}
        await pool.close()
        return ordinals(got), len(rest), bench.book.dropped["surplus"]

    assert on(use) == ([0, 1], 0, 4)


SURPLUS = PoolPlan(2, 4, 3, None, plan(), NO_LIMITS, 20.0, surplus=2)


def test_over_sampling_takes_the_first_groups_and_counts_the_rest_as_surplus() -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        engine.on_generate = lambda body: HANG if body["input_ids"][0] in (0, 2) else engine.generated(body)
        pool = RolloutPool(bench.ports, SURPLUS)
        got = await pool.take(2)
        assert set(bench.book.open_groups) == {group.group_id for group in got.groups}
        await engine.until_running(0)
        pool.end_step()
        assert pool.in_flight == 0, "nothing new before the weights that the step made"
        engine.on_generate = engine.generated
        pool.committed(1)
        second = await pool.take(2)
        await pool.close()
        return got, second, bench

    got, second, bench = on(use)
    assert ordinals(got) == [1, 3]
    assert ordinals(second) == [4, 5]
    assert bench.book.dropped["surplus"] == 4
    assert bench.book.counts()["lost"] == 0


@pytest.mark.parametrize("partial", [False, True])
def test_over_sampling_beside_training_cuts_what_is_beside_the_next_batch_before_the_weights_change(
    partial: bool,
) -> None:
    """Two groups a step and two more: 0 and 1 train, 2 and 3 are next, 4 and 5 hang until they are cut."""

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        hang = {4, 5}
        engine.on_generate = lambda body: HANG if body["input_ids"][0] in hang else engine.generated(body)
        made = PoolPlan(2, 6, 3, None, plan(), NO_LIMITS, 20.0, surplus=2, beside=True, partial=partial)
        pool = RolloutPool(bench.ports, made)
        first = await pool.take(2)
        pool.end_step()
        assert pool.in_flight >= 2, "the batch is taken, and the others go on"
        await pool.drain()
        assert (pool.in_flight, bench.source.position, len(bench.book.open_groups)) == (0, 6, 4 + 2 * partial)
        hang.clear()
        pool.committed(1)
        assert (pool.in_flight, bench.source.position) == (4, 8 if partial else 10), "what was cut goes first"
        second, position = await pool.take(2), bench.source.position
        pool.end_step()
        await pool.drain()
        pool.committed(2)
        third = await pool.take(2)
        await pool.close()
        assert bench.book.counts()["lost"] == 0
        return [ordinals(one) for one in (first, second, third)], position, bench.book.dropped["surplus"]

    if partial:
        assert on(use) == ([[0, 1], [2, 3], [4, 5]], 8, 0)
    else:
        assert on(use) == ([[0, 1], [2, 3], [6, 7]], 10, 4)


def test_over_sampling_ends_with_the_last_step() -> None:
    """The last update waits for nothing: no batch comes after it."""

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        engine.on_generate = lambda body: HANG if body["input_ids"][0] > 3 else engine.generated(body)
        pool = RolloutPool(bench.ports, PoolPlan(2, 6, 3, 2, plan(), NO_LIMITS, 20.0, surplus=2, beside=True))
        for step in range(2):
            await pool.take(2)
            pool.end_step()
            await pool.drain()
            pool.committed(step + 1)
        assert (pool.in_flight, bench.source.position) == (0, 6), "no prompt is taken that no step can use"
        await pool.close()

    on(use)


def test_asy_01_a_batch_takes_what_it_needs_and_the_rest_stays() -> None:
    """9 groups are ready, a step needs 3: three calls give three each, oldest first, without generation."""

    async def use(bench: Bench, engine: ScriptedEngine) -> Any:
        pool = RolloutPool(bench.ports, PoolPlan(3, 9, 1, 3, plan(), NO_LIMITS, 20.0))
        first = await pool.take(3)
        await quiet(pool)
        sent = len(engine.calls)
        taken = [first]
        for _ in range(2):
            pool.end_step()
            taken.append(await pool.take(3))
        await pool.close()
        return [ordinals(one) for one in taken], len(engine.calls) - sent, bench.source.position

    assert on(use) == ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], 0, 9)


def test_asy_01_submissions_stop_where_the_slots_are_taken() -> None:
    async def use(bench: Bench, _engine: ScriptedEngine) -> int:
        pool = RolloutPool(bench.ports, PoolPlan(1, 2, 1, None, plan(), NO_LIMITS, 20.0))
        for _ in range(5):
            await pool.take(1)
            pool.end_step()
        await asyncio.sleep(0.05)
        await pool.close()
        return bench.source.position

    with pytest.raises(InvariantBroken, match="slots that nothing frees"):
        on(use)


def test_met_04_prompts_batches_and_steps_are_counted_apart() -> None:
    """Every other group is dropped by the filter: ten steps take twenty groups' worth of prompts."""

    async def use(bench: Bench, _engine: ScriptedEngine) -> Any:
        pool = RolloutPool(bench.ports, PoolPlan(2, 2, 1, 10, plan(), limits(), 20.0))
        sizes, filtered = [], 0
        for step in range(10):
            got = await pool.take(2)
            sizes.append(len(got.groups))
            filtered += got.filtered
            pool.end_step()
            pool.committed(step + 1)
        await pool.close()
        return sizes, filtered, bench.source.position

    sizes, filtered, position = on(use, reward=by_prompt(range(0, 100, 2)))
    assert sizes == [2] * 10
    assert (position, filtered) == (39, 19)


@pytest.mark.parametrize(("slots", "window", "steps"), [(4, 1, 6), (8, 1, 6), (11, 3, 6), (11, 3, None)])
def test_asy_02_epochs_are_repeated_shuffled_anew_to_their_end(
    slots: int, window: int, steps: int | None
) -> None:
    """7 prompts, batches of 4, 3 epochs: 5 full batches and one of a single prompt, whatever the lead."""

    async def use(bench: Bench, _engine: ScriptedEngine) -> Any:
        source = PromptSource(prompts(7), SeedTree(3), True, 3)
        ahead = PoolPlan(4, slots, window, steps, plan(), NO_LIMITS, 20.0)
        pool = RolloutPool(replace(bench.ports, source=source), ahead)
        taken = []
        for step in range(6):
            got = await pool.take(4)
            taken.append([group.prompt.prompt_id for group in got.groups])
            pool.end_step()
            pool.committed(step + 1)
        await pool.close()
        return taken, got.short, got.last

    taken, short, last = on(use)
    assert [len(batch) for batch in taken] == [4, 4, 4, 4, 4, 1]
    assert (short, last) == ("end of the data", True)
    if window > 1:
        return  # groups may overtake one another
    order = [name for batch in taken for name in batch]
    epochs = [order[at : at + 7] for at in range(0, 21, 7)]
    assert all(sorted(epoch) == [f"p{n}" for n in range(7)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_a_version_owes_is_made_by_it_also_where_the_run_is_told_to_stop(deterministic: bool) -> None:
    """A group that the filter drops while the update drains is replaced before the weights change."""

    async def use(bench: Bench, _: ScriptedEngine) -> Any:
        sampling = PoolPlan(4, 4, 1, None, plan(), limits(), 20.0, deterministic=deterministic)
        pool = RolloutPool(bench.ports, sampling, 0)
        pool.release(0, "")
        pool.changed()
        taking = asyncio.ensure_future(pool.take(4))
        await asyncio.sleep(0)  # four groups are admitted
        pool.stop()
        await pool.drain()
        complete = [row.ordinal for row in bench.book.ledger.rows() if row.state == "completed"]
        with pytest.raises(RunStopped):
            await taking
        await pool.close()
        return complete

    made = on(use, reward=by_prompt({0, 1, 3, 4}))
    assert made == ([0, 1, 3, 4] if deterministic else [0, 1, 3])
