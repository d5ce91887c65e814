"""Versions beside the loop: what frees slots, what a failure means, and what waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from turnout.core.errors import InvariantBroken, WeightError
from turnout.core.version import WeightVersion
from turnout.placement.real import RealClock
from turnout.rollout.ledger_rows import VersionRow
from turnout.rollout.returning import ABANDONED
from turnout.rollout.staleness import StalenessPolicy
from turnout.schedule.lag import LagGate
from turnout.schedule.phases import Phases
from turnout.schedule.schedule import Schedule
from turnout.schedule.updates import Around, Updates
from turnout.transfer.transport import Ready

BASE = WeightVersion(0, 0, "0" * 32)
SYNC, ASYNC = Schedule("sync", 0, True), Schedule("async", 2, False)


def version_of(train_step: int) -> WeightVersion:
    return WeightVersion(0, train_step, f"{train_step:032d}")


class World:
    """Updates whose verbs are noted; those in `fail` raise, those in `slow` wait for `go`."""

    retries, follow = 0, False

    def __init__(self, detached: bool = True, fail: tuple[str, ...] = (), slow: tuple[str, ...] = ()) -> None:
        self.detached, self.fail, self.slow = detached, fail, slow
        self.notes: list[str] = []
        self.made: list[tuple[int, str]] = []
        self.root: str | None = None
        self.go = asyncio.Event()
        self.gone = asyncio.Event()
        self.extended = 0.0

    async def verb(self, text: str) -> None:
        self.notes.append(text)
        if text in self.slow:
            await self.go.wait()
        if text in self.fail:
            raise WeightError(f"{text} failed")

    def begin(self, train_step: int) -> Any:
        world = self

        class Update:
            async def publish(self) -> Ready:
                await world.verb(f"publish {train_step}")
                return Ready(version_of(train_step), 0)

            async def prepare(self) -> None:
                await world.verb(f"prepare {train_step}")

            async def commit(self) -> WeightVersion:
                await world.verb(f"commit {train_step}")
                return version_of(train_step)

            async def unserved(self) -> None:
                await world.gone.wait()

            async def abandon(self, reason: str) -> None:
                world.notes.append(f"abandon {train_step}: {reason}")

            def extend(self, seconds: float) -> None:
                world.extended += seconds

        return Update()

    async def digest(self) -> str:
        assert self.root is not None, "no digest is asked for"
        return self.root

    async def recovered(self) -> None:
        self.fail = self.fail[1:]
        await self.verb("recovered")

    async def drain(self) -> None:
        await self.verb("drain")

    async def settled(self) -> None:
        await self.verb("evaluations")

    def published(self, steps_done: int, root: str) -> None:
        self.made.append((steps_done, root))

    def remade(self, steps_done: int, root: str) -> None:
        self.made.append((steps_done, root))

    def committed(self, steps_done: int, root: str) -> None:
        self.notes.append(f"free {steps_done}")

    def changed(self) -> None:
        self.notes.append("look again")

    def renewed(self) -> None: ...


def on(schedule: Schedule, world: World, use: Callable[[Updates], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        clock = RealClock()
        updates = Updates(
            world, schedule, Around(world, world, LagGate(StalenessPolicy(9)), Phases(clock), clock)
        )
        updates.adopt(BASE, 0)
        return await asyncio.wait_for(use(updates), 10)

    return asyncio.run(main())


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to hold")


def test_where_the_schedule_drains_all_is_in_line_and_slots_are_free_after_the_commit() -> None:
    world = World()
    version = on(SYNC, world, lambda updates: updates.publish(1, last=False))
    assert version.counter == 1
    assert world.notes == ["publish 1", "prepare 1", "evaluations", "drain", "commit 1", "free 1"]


def test_an_update_that_must_be_is_tried_again_when_the_engines_have_recovered() -> None:
    world = World(fail=("commit 1", "prepare 1"))
    world.retries = 2
    version = on(SYNC, world, lambda updates: updates.publish(1, last=False))
    assert version.counter == 1
    tries = (
        ["publish 1", "prepare 1"],
        ["publish 1", "prepare 1", "evaluations", "drain", "commit 1", "free 1"],
    )
    assert world.notes == [*tries[0], "recovered", *tries[0], "recovered", *tries[1]]


def test_and_ends_the_run_when_no_try_is_left() -> None:
    world = World(fail=("prepare 1", "prepare 1"))
    world.retries = 1
    with pytest.raises(WeightError, match="prepare 1 failed"):
        on(SYNC, world, lambda updates: updates.publish(1, last=False))
    assert world.notes.count("publish 1") == 2


def test_one_that_waits_for_requests_that_no_engine_can_end_gives_up() -> None:
    world = World(slow=("drain",))
    world.gone.set()
    with pytest.raises(WeightError, match="no engine is left"):
        on(SYNC, world, lambda updates: updates.publish(1, last=False))
    assert world.notes[-1].startswith("abandon 1: requests are in flight")


def test_one_that_failed_beside_training_is_tried_again_when_rollouts_wait_for_it() -> None:
    world = World(fail=("prepare 1",))
    world.retries = 1

    async def use(updates: Updates) -> None:
        await updates.publish(1, last=False)
        await updates.settled()
        assert isinstance(updates.failure, WeightError)
        await updates.retry(1)
        assert updates.failure is None and updates.current.counter == 1

    on(ASYNC, world, use)
    assert world.notes.count("publish 1") == 2 and world.notes[-1] == "free 1"


def test_and_is_told_where_nothing_is_tried_again() -> None:
    world = World(fail=("prepare 1",))

    async def use(updates: Updates) -> None:
        await updates.publish(1, last=False)
        await updates.settled()
        with pytest.raises(WeightError, match="prepare 1 failed"):
            await updates.retry(1)

    on(ASYNC, world, use)
    assert world.made == [(1, version_of(1).root)]  # the weights are there all the same


def test_beside_training_the_old_version_is_current_until_the_commit() -> None:
    world = World(slow=("prepare 1",))

    async def use(updates: Updates) -> None:
        assert await updates.publish(1, last=False) == BASE
        await until(lambda: "prepare 1" in world.notes)
        assert updates.under_way
        assert "free 1" not in world.notes
        world.go.set()
        await updates.settled()
        assert updates.current.counter == 1

    on(ASYNC, world, use)
    assert world.notes == ["publish 1", "prepare 1", "evaluations", "commit 1", "free 1"]


def test_weights_that_the_way_still_reads_are_not_trained_meanwhile() -> None:
    world = World(detached=False)
    assert on(ASYNC, world, lambda updates: updates.publish(1, last=False)).counter == 1
    assert "drain" not in world.notes


def test_evaluations_end_before_a_version_is_published_that_engines_come_to_by_themselves() -> None:
    world = World()
    world.follow = True

    async def use(updates: Updates) -> None:
        await updates.publish(1, last=False)
        await updates.settled()

    on(ASYNC, world, use)
    assert world.notes[:3] == ["evaluations", "publish 1", "prepare 1"] and world.notes[-1] == "free 1"


def test_one_update_at_a_time() -> None:
    world = World(slow=("commit 1",))

    async def use(updates: Updates) -> None:
        await updates.publish(1, last=False)
        second = asyncio.ensure_future(updates.publish(2, last=False))
        await until(lambda: "commit 1" in world.notes)
        await asyncio.sleep(0)
        assert "publish 2" not in world.notes
        world.go.set()
        await second
        await updates.settled()

    on(ASYNC, world, use)
    assert world.notes.index("free 1") < world.notes.index("publish 2")


@pytest.mark.parametrize("at", ["publish 1", "prepare 1", "commit 1"])
def test_where_rollouts_wait_for_the_version_its_failure_ends_the_run(at: str) -> None:
    with pytest.raises(WeightError, match=at):
        on(SYNC, World(fail=(at,)), lambda updates: updates.publish(1, last=False))


@pytest.mark.parametrize("at", ["publish 1", "prepare 1", "commit 1"])
def test_a_failed_update_keeps_the_old_version_and_its_slots_and_the_next_one_heals(at: str) -> None:
    world = World(fail=(at,))

    async def use(updates: Updates) -> None:
        await updates.publish(1, last=False)
        await updates.settled()
        assert updates.current == BASE
        assert str(updates.failure) == f"{at} failed"
        assert world.notes[-1] == "look again", "whoever waits for slots hears of it"
        assert "free 1" not in world.notes
        await updates.publish(2, last=False)
        await updates.settled()
        assert updates.current.counter == 2
        assert updates.failure is None

    on(ASYNC, world, use)
    assert world.notes[-1] == "free 2"


def test_the_last_version_must_come_in_every_schedule() -> None:
    with pytest.raises(WeightError, match="commit 3"):
        on(ASYNC, World(fail=("commit 3",)), lambda updates: updates.publish(3, last=True))


def test_an_interval_skips_versions_but_not_the_last() -> None:
    world, every3 = World(), Schedule("sync", 2, True, interval=3)

    async def use(updates: Updates) -> None:
        for step in range(1, 8):
            await updates.publish(step, last=step == 7)

    on(every3, world, use)
    assert [note for note in world.notes if note.startswith("publish")] == [
        "publish 3",
        "publish 6",
        "publish 7",
    ]


def test_the_same_weights_are_not_published_twice() -> None:
    world = World()

    async def use(updates: Updates) -> None:
        await updates.publish(1, last=False)
        await updates.publish(1, last=True)

    on(SYNC, world, use)
    assert world.notes.count("publish 1") == 1


def test_waiting_for_rollouts_does_not_eat_the_updates_own_deadline() -> None:
    world = World(slow=("drain",))

    async def use(updates: Updates) -> None:
        task = asyncio.ensure_future(updates.publish(1, last=False))
        await until(lambda: "drain" in world.notes)
        await asyncio.sleep(0.02)
        world.go.set()
        await task

    on(SYNC, world, use)
    assert world.extended > 0.01


def test_closing_ends_what_is_under_way() -> None:
    world = World(slow=("commit 1",))

    async def use(updates: Updates) -> None:
        await updates.publish(1, last=False)
        await until(lambda: "commit 1" in world.notes)
        await updates.close()
        assert not updates.under_way

    on(ASYNC, world, use)
    assert "free 1" not in world.notes


def test_nothing_is_current_before_a_base_is_adopted() -> None:
    clock, world = RealClock(), World()
    updates = Updates(world, SYNC, Around(world, world, LagGate(0), Phases(clock), clock))
    with pytest.raises(InvariantBroken, match="base version"):
        _ = updates.current


@pytest.mark.parametrize(("step", "root", "counts"), [(1, "made", 1), (1, "other", None), (2, "made", None)])
def test_weights_that_a_resume_makes_again_are_told_although_nothing_could_be_published(
    step: int, root: str, counts: int | None
) -> None:
    """Found by seed 9: a disk was full, and the batch that was recorded after it was sampled anew."""
    world = World(fail=("publish 1",))
    world.root = "made" if step == 1 else None  # nothing of this step is waited for: nothing is digested
    gate = LagGate(StalenessPolicy(9))
    gate.restore([VersionRow("v9", 0, 9, root, step, ABANDONED)])

    async def main() -> None:
        clock = RealClock()
        updates = Updates(world, ASYNC, Around(world, world, gate, Phases(clock), clock))
        updates.adopt(BASE, 0)
        await updates.publish(1, last=False)
        assert isinstance(updates.failure, WeightError)

    asyncio.run(main())
    assert world.made == ([(1, "made")] if step == 1 else [])
    assert gate.exported_at["v9"] == counts
