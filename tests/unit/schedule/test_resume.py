"""A run of the real pool, book and ledger that is killed after every one of its verbs, and goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.parts import SEEDS, Log, QuickClock, memory_ledger, plan, prompts
from turnout.config.rundir import RunPaths
from turnout.core.errors import RunStopped
from turnout.core.events import GroupTrained
from turnout.core.rng import SeedTree
from turnout.core.types import Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans, WeightVersion
from turnout.placement.real import RealClock
from turnout.rollout.book import GroupBook
from turnout.rollout.ledger_owner import Claim
from turnout.rollout.ledger_schema import Database, open_database
from turnout.rollout.pool import RolloutPool
from turnout.rollout.pool_plan import CollectLimits, PoolPlan, Ports
from turnout.rollout.source import PromptSource
from turnout.rollout.staleness import Fate
from turnout.schedule.checkpoint_state import Checkpoint, CheckpointState
from turnout.schedule.resume import Beginning
from turnout.schedule.resume_ledger import open_ledger, returning_groups

P, ROWS, EPOCHS, SAVE = 4, 8, 2, 2
STEPS = ROWS * EPOCHS // P


class Killed(Exception):
    """The process ended here."""


@dataclass
class World:
    """What outlives a process: the ledger, and the step of the newest checkpoint. `same`: weights that are made
    again are the same."""

    lead: int = 0
    same: bool = True
    policy: Fate = Fate.REPLAY
    database: Database = field(default_factory=lambda: open_database(None))
    saved: int | None = None
    lives: int = 0
    verbs: int = 0

    def live(self, die_at: int | None) -> int:
        """One process, killed at its verb number `die_at`; the steps done."""
        self.verbs = 0
        return asyncio.run(Life(self, die_at).run())


class Life:
    def __init__(self, world: World, die_at: int | None) -> None:
        self.world, self._die_at = world, die_at
        self.ledger = memory_ledger(world.database)
        self.book = GroupBook(Log(), self.ledger)
        self.source = PromptSource(prompts(ROWS), SeedTree(3), True, EPOCHS)
        self.label = "none"
        slots = (world.lead + 1) * P
        limits = CollectLimits(9)
        ports = Ports(self.source, self.book, self, SEEDS, QuickClock())  # type: ignore[arg-type]
        self.pool = RolloutPool(ports, PoolPlan(P, slots, 1, STEPS, plan(1), limits, 20.0))

    async def group(self, group: RolloutGroup, *_: Any) -> RolloutGroup:
        """Stands for the generator."""
        label = self.label
        await asyncio.sleep(0)
        made = Trajectory(
            (group.ordinal,), (0.5,), (1,), VersionSpans(((1, label),)), Finish.STOP, "", Runs(((1, "e"),)), 7, 1.0
        )  # fmt: skip
        return replace(group, trajectories=(made,))

    async def run(self) -> int:
        world = self.world
        first = 0 if world.saved is None else world.saved
        try:
            if world.lives:
                about = self.source.prompt, first, 1, world.policy
                self.pool.restore(returning_groups(self.book, *about), first)
                self.source.seek(self.ledger.next_ordinal())
            root = self._version(first)
            self.pool.release(first, root)
            return await self._loop(first)
        except Killed:
            copy = open_database(None)
            self.ledger._connection.backup(copy.connection)
            world.database = copy
            return -1
        finally:
            world.lives += 1
            await self.pool.close()

    async def _loop(self, step: int) -> int:
        while step < STEPS:
            self._verb()
            got = await self.pool.take(P)
            self._verb()
            self.book.take(step, got.groups)
            self.pool.end_step()
            for group in got.groups:
                self._verb()
                self.book.train([GroupTrained(group.group_id, step, [], 0)])
            step += 1
            self._verb()
            root = self._version(step)
            while self.pool.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0)  # drained
            self.pool.committed(step, root)
            self._verb()
            if step % SAVE == 0:
                self.world.saved = step
                self.ledger.put_checkpoint(step, self.label)
        return step

    def _version(self, step: int) -> str:
        """The version of a step: the same weights in every life, or others."""
        root = f"{step:04d}" + ("" if self.world.same else f"-{self.world.lives}")
        version = WeightVersion(self.ledger.incarnation, 100 * self.world.lives + step, root)
        self.label = version.label
        self.ledger.put_version(version, step, "committed")
        return root

    def _verb(self) -> None:
        self.world.verbs += 1
        if self.world.verbs == self._die_at:
            raise Killed


def trained(world: World) -> dict[int, list[str]]:
    """Groups by the step that trained them, as the ledger holds them."""
    rows = world.database.connection.execute(
        "SELECT trained, group_id FROM groups WHERE state = 'trained' ORDER BY trained, ordinal, attempt"
    )
    found: dict[int, list[str]] = {}
    for step, name in rows:
        found.setdefault(step, []).append(name)
    return found


def ended(world: World) -> Counter[str]:
    rows = world.database.connection.execute("SELECT state, count(*) FROM groups GROUP BY state")
    return Counter(dict(rows.fetchall()))


def whole(lead: int) -> tuple[dict[int, list[str]], int]:
    world = World(lead)
    assert world.live(None) == STEPS
    return trained(world), world.verbs


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_ckp_01_ckp_04_ckp_05_killed_after_every_verb_a_run_trains_each_prompt_once_in_the_same_steps(
    lead: int,
) -> None:
    wanted, verbs = whole(lead)
    assert sorted(len(groups) for groups in wanted.values()) == [P] * STEPS
    for die_at in range(1, verbs + 1):
        world = World(lead)
        assert world.live(die_at) == -1
        assert world.live(None) == STEPS
        assert trained(world) == wanted, f"killed at verb {die_at}"
        assert ended(world) == {"trained": P * STEPS}


@pytest.mark.parametrize("lead", [0, 2])
def test_ckp_05_killed_again_while_it_makes_up_for_the_first_time(lead: int) -> None:
    wanted, verbs = whole(lead)
    for first in range(3, verbs, 5):
        for second in range(1, verbs, 4):
            world = World(lead)
            world.live(first)
            world.live(second)
            world.live(None)
            assert trained(world) == wanted, (first, second)


@pytest.mark.parametrize("policy", [Fate.REPLAY, Fate.MASK, Fate.DROP])
def test_weights_that_come_out_otherwise_lose_no_prompt_without_a_word(policy: Fate) -> None:
    """Each prompt is trained once (by a new attempt, or masked), or dropped with its reason."""
    changed = 0
    for die_at in range(2, whole(2)[1]):
        world = World(2, same=False, policy=policy)
        world.live(die_at)
        world.live(None)
        states = ended(world)
        ordinals = [int(name[1:9]) for groups in trained(world).values() for name in groups]
        assert len(set(ordinals)) == len(ordinals), f"trained twice, killed at {die_at}"
        assert set(states) <= {"trained", "dropped", "requeued"}
        assert states["trained"] + states["dropped"] == P * EPOCHS * ROWS // P
        if policy is not Fate.DROP:
            assert states["dropped"] == 0
        changed += states["requeued"] + states["dropped"]
    assert (changed > 0) == (policy is not Fate.MASK)


def test_ckp_10_groups_carry_the_tokens_that_were_stored_and_not_new_ones() -> None:
    world = World(1)
    world.live(whole(1)[1] - 2)
    ledger = memory_ledger(world.database)
    before = {row.group_id: ledger.members(row.group_id) for row in ledger.trained_since(0)}
    assert before
    world.live(None)
    again = memory_ledger(world.database)
    for name, members in before.items():
        assert again.members(name) in (members, {}), name  # or forgotten, by two checkpoints


# Which ledger


def paths(root: Path) -> RunPaths:
    return RunPaths(root, root / "weights", root / "checkpoints", True)


def claim() -> Claim:
    return Claim(RealClock(), "here", 1, lives=lambda pid: False)


def ledger_with(root: Path, ordinals: int, run_id: str = "run") -> None:
    ledger = open_ledger(paths(root), run_id, Beginning(0), claim())
    book = GroupBook(Log(), ledger)
    for ordinal in range(ordinals):
        book.admit(RolloutGroup(f"g{ordinal:08d}.0", ordinal, 0, Prompt("p", (1,), "")), 0)
    ledger.close()


def checkpoint(root: Path, ordinals: int) -> Beginning:
    """A checkpoint whose ledger has so many groups."""
    folder = root / "checkpoints" / "step_000002"
    folder.mkdir(parents=True)
    (root / "copy").mkdir()
    ledger_with(root / "copy", ordinals)
    ledger = open_ledger(paths(root / "copy"), "run", Beginning(1), claim())
    ledger.backup(folder / "ledger.sqlite")
    ledger.close()
    state = CheckpointState("run", 0, 2, 8, 1, WeightVersion(0, 2, "a"), "d")
    return Beginning(5, Checkpoint(folder, state))


def taken(root: Path, beginning: Beginning) -> int:
    ledger = open_ledger(paths(root), "run", beginning, claim())
    found = ledger.next_ordinal()
    assert ledger.meta("run_id") == "run" and ledger.incarnation == 5
    ledger.close()
    return found


def test_the_ledger_of_the_run_is_gone_on_with_where_it_is_as_new_as_the_checkpoint(tmp_path: Path) -> None:
    beginning = checkpoint(tmp_path, 3)
    ledger_with(tmp_path, 7)
    assert taken(tmp_path, beginning) == 7


@pytest.mark.parametrize("what", ["missing", "older", "foreign", "torn"])
def test_ckp_13_else_the_checkpoints_copy_is_taken_and_what_is_lost_is_said(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beginning = checkpoint(tmp_path, 3)
    if what in ("older", "foreign"):
        ledger_with(tmp_path, 2 if what == "older" else 7, "run" if what == "older" else "another")
    elif what == "torn":
        (tmp_path / "ledger.sqlite").write_bytes(b"torn" * 1000)
    assert taken(tmp_path, beginning) == 3
    assert "takes its place; groups and tokens since step 2 are lost" in caplog.text
    kept = [path.name for path in tmp_path.iterdir() if ".lost-" in path.name]
    assert bool(kept) == (what != "missing"), "what was there is kept beside it"


# Stopping


def test_a_run_that_is_told_to_stop_ends_at_the_next_step_and_goes_on_as_if_nothing_had_happened() -> None:
    wanted, _ = whole(2)
    for step in range(STEPS):
        world = World(2)

        async def stopped(world: World = world, step: int = step) -> None:
            life = Life(world, None)
            take = life.pool.take

            async def stop_at(count: int) -> Any:
                if life.pool.step == step:
                    life.pool.stop()
                return await take(count)

            life.pool.take = stop_at  # type: ignore[method-assign]
            await life.run()

        with pytest.raises(RunStopped, match=f"stopped after {step} steps"):
            asyncio.run(stopped())
        assert set(ended(world)) <= {"trained", "partial", "completed"}, "nothing is dropped"
        world.saved = step
        world.live(None)
        assert trained(world) == wanted


def test_an_update_under_way_still_drains_when_the_run_is_told_to_stop() -> None:
    async def use() -> None:
        life = Life(World(0), None)
        life.pool.release(0, life._version(0))
        taking = asyncio.ensure_future(life.pool.take(P))
        await asyncio.sleep(0)
        life.pool.stop()
        await life.pool.drain()
        with pytest.raises(RunStopped):
            await taking
        assert ended(life.world) == {"completed": P}
        await life.pool.close()

    asyncio.run(use())
