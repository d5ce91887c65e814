"""What a resume brings back to a pool: in the order of the first attempts, and never stuck behind what waits for a
version that only this step can make."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.rollout.parts import NO_LIMITS, Bench, plan
from tests.unit.rollout.test_pool_faults import Maker, conserved, finished
from turnout.core.events import GroupTrained
from turnout.core.types import RolloutGroup, Trajectory
from turnout.core.version import VersionSpans
from turnout.placement.real import RealClock
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger_rows import VersionRow
from turnout.rollout.pool import RolloutPool
from turnout.rollout.pool_plan import PoolPlan, Taken
from turnout.rollout.returning import Returned, Returning
from turnout.rollout.staleness import Fate

VERSIONS = {
    f"v{step}": VersionRow(f"v{step}", 0, step, f"root-{step}", step, "abandoned" if step else "committed")
    for step in range(3)
}
PLAN = PoolPlan(2, 4, 1, None, plan(), NO_LIMITS, 5.0)


def made_by(group: RolloutGroup, label: str) -> RolloutGroup:
    """The group with members all of one version."""

    def of_it(made: Trajectory) -> Trajectory:
        return replace(made, spans=VersionSpans().extended(len(made.response_ids), label))

    return replace(group, trajectories=tuple(map(of_it, finished(group).trajectories)))


class Resumed:
    """A pool of 2 groups a step that goes on from step 0; `labels` made the complete groups 0, 1, ... before, `due`
    are the steps of the versions that they were admitted with, `batches` as they were recorded."""

    def __init__(self, labels: str, due: str, policy: Fate, **batches: tuple[int, ...]) -> None:
        self.bench, groups = Bench(), list[RolloutGroup]()
        for (ordinal, prompt), label in zip(self.bench.source.take(len(labels)), labels, strict=True):
            group = RolloutGroup(f"g{ordinal:08d}.0", ordinal, 0, prompt)
            whole = made_by(group, f"v{label}")
            with self.bench.book.transaction():
                self.bench.book.admit(group, 0)
                self.bench.book.start(group.group_id)
                self.bench.book.complete(whole)
            groups.append(whole)
        back: list[Any] = [
            Returned(group, GroupState.COMPLETED, int(step)) for group, step in zip(groups, due, strict=True)
        ]
        recorded = {int(k[1:]): tuple(groups[at].group_id for at in ids) for k, ids in batches.items()}

        async def answer(group: RolloutGroup) -> Any:
            return made_by(group, "now")

        maker: Any = Maker(answer)
        ports = replace(self.bench.ports, generator=maker, clock=RealClock())
        self.pool = RolloutPool(ports, PLAN)
        self.pool.restore(Returning(back, VERSIONS, recorded, policy), 0)
        self.pool.release(0, "root-0")

    async def step(self, number: int, root: str) -> Taken:
        """Takes a batch, trains it and commits its version."""
        got = await self.pool.take(2)
        self.pool.end_step()
        with self.bench.book.transaction():
            self.bench.book.take(number, got.groups)
            for group in got.groups:
                self.bench.book.train([GroupTrained(group.group_id, number, [], 0)])
        self.pool.committed(number + 1, root)
        return got


def steps(world: Resumed, *roots: str) -> list[list[str]]:
    """The batches of as many steps, whose versions have these roots."""

    async def main() -> list[list[str]]:
        found = [await world.step(number, root) for number, root in enumerate(roots)]
        await world.pool.close()
        assert conserved(world.bench)
        return [[group.group_id[-3:] for group in got.groups] for got in found]

    return asyncio.run(main())


@pytest.mark.parametrize("batches", [{}, {"s0": (0, 1), "s1": (2, 3)}])
def test_a_replayed_group_keeps_the_place_of_its_first_attempt(batches: Any) -> None:
    """Group 0 has tokens of unknown weights; 2 and 3 wait for the version that step 0 makes. Behind them, with a
    window of 1, its next attempt would wait for ever."""
    world = Resumed("x011", "0011", Fate.REPLAY, **batches)
    assert steps(world, "root-1", "root-2") == [["0.1", "1.0"], ["2.0", "3.0"]]


def test_the_place_of_a_dropped_group_is_taken_by_one_that_waits() -> None:
    """Group 2 waits for a version that needs two groups at step 0, and one of them is dropped: it goes on without
    that version, and what the version made of it is gone too."""
    world = Resumed("x011", "0011", Fate.DROP)
    assert steps(world, "other-1", "root-2") == [["1.0", "4.0"], ["5.0", "6.0"]]


@pytest.mark.parametrize(("root", "batch"), [("root-1", ["2.0", "3.0"]), ("other-1", ["4.0", "5.0"])])
def test_a_recorded_batch_stands_although_the_version_before_it_could_not_be_published(
    root: str, batch: list[str]
) -> None:
    world = Resumed("0011", "0011", Fate.DROP, s0=(0, 1), s1=(2, 3))

    async def main() -> list[str]:
        await world.pool.take(2)
        world.pool.end_step()
        world.pool.remade(1, root)
        world.pool.committed(2, "root-2")
        got = await world.pool.take(2)
        await world.pool.close()
        return [group.group_id[-3:] for group in got.groups]

    assert asyncio.run(main()) == batch


def test_masked_tokens_leave_every_batch_as_it_was() -> None:
    world = Resumed("x011", "0011", Fate.MASK, s0=(0, 1), s1=(2, 3))
    assert steps(world, "root-1", "root-2") == [["0.0", "1.0"], ["2.0", "3.0"]]


def test_a_group_that_is_sent_back_is_taken_before_younger_ones() -> None:
    """Groups 1 to 3 are complete while group 0 is sampled anew: with a window of 1 they wait for it."""

    async def main() -> Any:
        bench, begun = Bench(), list[str]()

        async def answer(group: RolloutGroup) -> Any:
            begun.append(group.group_id[-3:])
            return made_by(group, "now")

        maker: Any = Maker(answer)
        ports = replace(bench.ports, generator=maker, clock=RealClock())
        pool = RolloutPool(ports, PLAN)
        first = (await pool.take(2)).groups
        pool.send_back(first[0], "too old")
        again = (await pool.take(1)).groups
        await pool.close()
        assert conserved(bench) and begun == ["0.0", "1.0", "2.0", "3.0", "0.1"]
        return [group.group_id[-3:] for group in [*first, *again]]

    assert asyncio.run(main()) == ["0.0", "1.0", "0.1"]


def test_a_group_is_admitted_at_the_version_that_is_current_then() -> None:
    """What a resume waits for before the group goes on: a later version would sample something else."""

    async def main() -> list[int]:
        bench = Bench()

        async def answer(group: RolloutGroup) -> Any:
            return made_by(group, "now")

        maker: Any = Maker(answer)
        pool = RolloutPool(replace(bench.ports, generator=maker, clock=RealClock()), PLAN)
        await pool.take(2)
        pool.end_step()
        pool.drop(
            (await pool.take(2)).groups[0], "filtered"
        )  # group 4 takes its place, version 1 is not made yet
        pool.committed(1)
        await pool.close()
        return [row.admitted for row in bench.book.ledger.rows()]

    assert asyncio.run(main()) == [0, 0, 0, 0, 0, 1, 1]


class Slow:
    """An admission under which nothing may start yet."""

    free = False

    def may_start(self, in_flight: int, ahead: int) -> bool:
        return self.free


def over_sampled(*states: GroupState) -> tuple[Bench, RolloutPool, Slow]:
    """A pipelined pool of 2 groups a step and 2 more that drops these, which goes on from step 0 with groups in
    these states: complete and cut ones have tokens of its version, one that waits is of the version after."""
    bench, slow, back = Bench(), Slow(), list[Any]()
    for (ordinal, prompt), state in zip(bench.source.take(len(states)), states, strict=True):
        group = RolloutGroup(f"g{ordinal:08d}.0", ordinal, 0, prompt)
        with bench.book.transaction():
            bench.book.admit(group, 0)
            if state is not GroupState.WAITING:
                group = made_by(group, "v0")
                bench.book.start(group.group_id)
            if state is GroupState.PARTIAL:
                bench.book.cut(group.group_id)
            elif state is GroupState.COMPLETED:
                bench.book.complete(group)
        back.append(Returned(group, state, int(state is GroupState.WAITING)))

    async def answer(group: RolloutGroup) -> Any:
        return made_by(group, "v1")

    ports: Any = replace(bench.ports, generator=Maker(answer), clock=RealClock(), admission=slow)
    pool = RolloutPool(ports, PoolPlan(2, 6, 5, None, plan(), NO_LIMITS, 5.0, surplus=2, beside=True))
    pool.restore(Returning(back, VERSIONS), 0)
    pool.release(0, "root-0")
    return bench, pool, slow


def two_steps(*states: GroupState) -> tuple[list[list[int]], int]:
    """The batches of two steps with a change of weights between them, after which all that may start has ended; how
    many groups were dropped before it."""

    async def main() -> tuple[list[list[int]], int]:
        bench, pool, slow = over_sampled(*states)
        first = await pool.take(2)
        pool.end_step()
        await pool.drain()
        dropped = bench.book.dropped["surplus"]
        slow.free = True
        pool.committed(1, "root-1")
        while pool.in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0)
        second = await pool.take(2)
        await pool.close()
        assert conserved(bench)
        return [[group.ordinal for group in got.groups] for got in (first, second)], dropped

    return asyncio.run(main())


COMPLETED, PARTIAL, WAITING = GroupState.COMPLETED, GroupState.PARTIAL, GroupState.WAITING


def test_a_cut_group_of_a_resume_that_never_went_on_is_dropped_when_the_weights_change() -> None:
    """Its tokens would be too old in the end, as those of what is in flight would."""
    assert two_steps(COMPLETED, COMPLETED, PARTIAL, COMPLETED, COMPLETED) == ([[0, 1], [3, 4]], 1)


def test_what_was_complete_when_the_weights_changed_trains_before_an_older_group_that_begins_then() -> None:
    assert two_steps(WAITING, COMPLETED, COMPLETED, COMPLETED, COMPLETED) == ([[1, 2], [3, 4]], 0)
