"""Tokens on their way to the ledger, and groups that a pool cuts and takes up again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.scripted_engine import Answer, ScriptedEngine, reply
from tests.unit.rollout.parts import NO_LIMITS, SEEDS, TOKENS, Bench, memory_ledger, plan
from tests.unit.rollout.test_sampler import SEED, begun
from turnout.core.errors import InvariantBroken
from turnout.core.events import GroupCut, GroupDropped, GroupResumed
from turnout.core.types import Finish, Prompt, RolloutGroup
from turnout.placement.real import RealClock
from turnout.rollout.book import GroupBook
from turnout.rollout.group_machine import GroupState
from turnout.rollout.journal import PENDING_MAX, TokenJournal
from turnout.rollout.pool import RolloutPool
from turnout.rollout.pool_plan import PoolPlan

GROUP = RolloutGroup("g00000000.0", 0, 0, Prompt("p", (1,), "text"))


def inflight(bench_clock: Any = None, faults: list[Any] | None = None) -> tuple[GroupBook, TokenJournal]:
    faults = [] if faults is None else faults

    class Quiet:
        def emit(self, event: Any) -> None: ...

    book = GroupBook(Quiet(), memory_ledger())
    book.admit(GROUP, 0)
    book.start(GROUP.group_id)
    return book, TokenJournal(book.ledger, bench_clock or RealClock(), faults.append)


def test_pieces_and_the_end_of_a_member_are_the_member_again() -> None:
    async def main() -> None:
        book, journal = inflight()
        keeper = journal.keeper(GROUP)
        whole = replace(begun(10), finish=Finish.STOP, text="text", reward=0.5)
        keeper.tokens(1, begun(4))
        keeper.tokens(1, begun(7))
        keeper.ended(1, whole)
        keeper.ended(0, replace(whole, seed=7))
        assert book.ledger.members(GROUP.group_id) == {}, "many are written at once"
        await journal.close()
        assert book.ledger.members(GROUP.group_id) == {0: replace(whole, seed=7), 1: whole}

    asyncio.run(main())


def test_a_member_that_exists_in_part_goes_on_at_its_place() -> None:
    async def main() -> None:
        book, journal = inflight()
        journal.keeper(GROUP).tokens(0, begun(4))
        journal.write()
        again = replace(GROUP, trajectories=(begun(4),))
        journal.keeper(again).ended(0, replace(begun(6), finish=Finish.STOP))
        await journal.close()
        assert book.ledger.members(GROUP.group_id)[0].response_ids == begun(6).response_ids

    asyncio.run(main())


def test_the_end_of_a_member_is_written_once_also_where_its_group_is_scored_later() -> None:
    async def main() -> None:
        book, journal = inflight()
        ended = replace(begun(6), finish=Finish.STOP, text="text")
        keeper = journal.keeper(GROUP)
        for made in (ended, replace(ended, reward=0.5)):
            keeper.ended(0, made)
            journal.write()
            assert book.ledger.members(GROUP.group_id) == {0: ended}, "a group's rewards are made again"
        journal.keeper(replace(GROUP, trajectories=(ended,))).ended(0, ended)  # by a resume
        await journal.close()
        assert book.ledger.members(GROUP.group_id) == {0: ended}

    asyncio.run(main())


def test_what_is_reported_is_written_soon_and_at_once_when_it_is_much() -> None:
    async def main() -> None:
        slept: list[float] = []
        gate = asyncio.Event()

        class Held(RealClock):
            async def sleep(self, seconds: float) -> None:
                slept.append(seconds)
                await gate.wait()

        book, journal = inflight(Held())
        keeper = journal.keeper(GROUP)
        keeper.tokens(0, begun(1))
        await asyncio.sleep(0)
        assert book.ledger.token_count(GROUP.group_id) == 0
        gate.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert book.ledger.token_count(GROUP.group_id) == 1 and slept == [0.25]
        gate.clear()
        for member in range(1, PENDING_MAX + 1):
            keeper.tokens(member, replace(begun(1), seed=SEED + member))
        assert book.ledger.token_count(GROUP.group_id) == PENDING_MAX + 1
        await journal.close()

    asyncio.run(main())


def test_pieces_of_a_group_that_has_ended_otherwise_are_forgotten() -> None:
    async def main() -> None:
        book, journal = inflight()
        journal.keeper(GROUP).tokens(0, begun(4))
        journal.forget(GROUP.group_id)
        book.drop(GROUP.group_id, "reason")
        await journal.close()
        assert book.ledger.token_count(GROUP.group_id) == 0
        journal.keeper(GROUP).tokens(0, begun(4))
        with pytest.raises(InvariantBroken, match="not in flight"):
            journal.write()
        await journal.close()

    asyncio.run(main())


@pytest.mark.parametrize("taken_back", [False, True])
def test_after_a_write_that_failed_nothing_of_a_member_is_missing(taken_back: bool) -> None:
    async def main() -> None:
        book, journal = inflight()
        keeper = journal.keeper(GROUP)
        keeper.tokens(0, begun(4))
        if taken_back:
            with pytest.raises(InvariantBroken, match="later"), book.transaction():
                journal.write()
                raise InvariantBroken("what comes later in the transaction")
        else:
            journal.keeper(replace(GROUP, group_id="gone")).tokens(0, begun(4))
            with pytest.raises(InvariantBroken, match="not in flight"):
                journal.write()
        assert book.ledger.members(GROUP.group_id) == {}
        keeper.tokens(0, begun(6))
        await journal.close()
        assert book.ledger.members(GROUP.group_id)[0].response_ids == begun(6).response_ids

    asyncio.run(main())


@pytest.mark.parametrize("members", [1, PENDING_MAX])
def test_a_write_that_failed_and_that_nobody_waits_for_is_told(members: int) -> None:
    async def main() -> None:
        class Quick(RealClock):
            async def sleep(self, seconds: float) -> None:
                await asyncio.sleep(0)

        faults: list[Any] = []
        _, journal = inflight(Quick(), faults)
        keeper = journal.keeper(replace(GROUP, group_id="gone"))
        for member in range(members):
            keeper.tokens(member, replace(begun(1), seed=SEED + member))
        await asyncio.sleep(0.01)
        assert [type(fault) for fault in faults] == [InvariantBroken]
        await journal.close()

    asyncio.run(main())


def stalls(after: int) -> Callable[[Any], Any]:
    """An engine that makes so many tokens of a member's response and then nothing more."""

    def answer(body: Any) -> Any:
        row = reply(after, "v000000-0000000000000000", body["sampling_params"]["sampling_seed"])
        row["meta_info"]["finish_reason"] = None
        return Answer(body=f"data: {json.dumps(row)}\n\n".encode(), ending="stall")

    return answer


async def cut_pool(bench: Bench, engine: ScriptedEngine, partial: bool) -> RolloutPool:
    """A pool of two groups in flight that was cut after two of the three tokens of each member."""
    engine.on_generate = stalls(2)
    bench.every_token()
    pool = RolloutPool(bench.ports, PoolPlan(2, 2, 1, None, plan(), NO_LIMITS, 20.0, 1, partial=partial))
    taking = asyncio.ensure_future(pool.take(2))
    ledger = bench.book.ledger
    while sum(ledger.token_count(f"g{n:08d}.0") for n in range(2)) < 8:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    taking.cancel()
    await pool.cut()
    assert pool.in_flight == 0
    await engine.until_running(0)
    return pool


def on(use: Callable[[Bench, ScriptedEngine], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with ScriptedEngine() as engine:
            return await asyncio.wait_for(use(Bench(engine), engine), 20)

    return asyncio.run(main())


def test_groups_that_were_cut_go_on_before_others_from_their_tokens() -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> None:
        pool = await cut_pool(bench, engine, partial=True)
        assert set(bench.book.open_groups.values()) == {GroupState.PARTIAL}
        assert [event.tokens for event in bench.log.of(GroupCut)] == [4, 4]
        cut = bench.book.ledger.members("g00000000.0")
        asked = len(engine.calls)

        def rest(body: Any) -> Any:
            made = len(body["input_ids"]) - 1
            whole = reply(TOKENS, engine.label, body["sampling_params"]["sampling_seed"])
            whole["output_ids"] = whole["output_ids"][made:]
            meta = whole["meta_info"]
            meta["output_token_logprobs"] = meta["output_token_logprobs"][made:]
            meta |= {"completion_tokens": TOKENS - made, "weight_versions": []}
            return whole

        engine.on_generate = rest
        taken = await pool.take(2)
        await pool.close()
        assert [group.ordinal for group in taken.groups] == [0, 1] and bench.source.position == 2
        for group in taken.groups:
            for member in group.trajectories:
                assert member.response_ids == tuple(reply(TOKENS, seed=member.seed)["output_ids"])
                assert [tokens for tokens, _ in member.spans.runs] == [2, 1]
        assert [made.cut(2) for made in taken.groups[0].trajectories] == list(cut.values())
        assert [len(body["input_ids"]) for body in engine.sent("/generate")[asked:]] == [3] * 4
        assert [(event.tokens, event.samples) for event in bench.log.of(GroupResumed)] == [(4, 2), (4, 2)]
        assert SEEDS.child("sample", 0, 0).child(1).seed == taken.groups[0].trajectories[1].seed

    on(use)


def test_without_partial_rollout_a_surplus_is_dropped_and_counted() -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> None:
        pool = await cut_pool(bench, engine, partial=False)
        assert [event.reason for event in bench.log.of(GroupDropped)] == ["surplus"] * 2
        assert bench.book.ledger.token_count("g00000000.0") == 0
        await pool.close()

    on(use)


def test_a_pool_that_is_closed_leaves_what_it_had_in_the_ledger() -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> None:
        engine.on_generate = stalls(2)
        pool = RolloutPool(bench.ports, PoolPlan(2, 2, 1, None, plan(), NO_LIMITS, 20.0, 1))
        taking = asyncio.ensure_future(pool.take(2))
        await engine.until_running(4)
        while not bench.generator.sampler.tokens_made and len(engine.calls) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        taking.cancel()
        await pool.close()
        assert set(bench.book.open_groups.values()) == {GroupState.PARTIAL}
        assert [bench.book.ledger.token_count(f"g{n:08d}.0") for n in range(2)] == [4, 4]

    on(use)


def test_a_journal_that_cannot_be_written_ends_the_wait_for_groups() -> None:
    async def use(bench: Bench, engine: ScriptedEngine) -> None:
        def fails(pieces: Any) -> None:
            raise InvariantBroken("a full disk")

        engine.on_generate = stalls(2)
        bench.every_token()
        pool = RolloutPool(bench.ports, PoolPlan(2, 2, 1, None, plan(), NO_LIMITS, 20.0, 1))
        journal, bench.book.ledger.journal = bench.book.ledger.journal, fails
        with pytest.raises(InvariantBroken, match="a full disk"):
            await asyncio.wait_for(pool.take(2), 5)
        bench.book.ledger.journal = journal
        await pool.close()

    on(use)
