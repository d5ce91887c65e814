"""How a batch is made of groups that may be too old: evicted, as many more taken, masked, counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from turnout.core.errors import TrainError, TurnoutError, WeightError
from turnout.core.events import GroupTrained
from turnout.core.types import Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans, WeightVersion
from turnout.rollout.pool import Taken
from turnout.rollout.staleness import Fate, StalenessPolicy
from turnout.schedule.lag import LagGate
from turnout.schedule.parts import BatchMaker, Freshness
from turnout.train.settings import AdvantageSettings

STEP = 6
LABELS = [WeightVersion(0, step, f"{step:032d}").label for step in range(STEP + 1)]
ADVANTAGE = AdvantageSettings()
UNDER_WAY = WeightVersion(0, STEP + 1, "f" * 32)


def group(ordinal: int, *ages: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> RolloutGroup:
    """Members with a token of each age in train steps; -1 is the version under way."""
    labels = [UNDER_WAY.label if age < 0 else LABELS[STEP - age] for age in ages]
    count, spans = len(ages), VersionSpans()
    for label in labels:
        spans = spans.extended(1, label)
    members = tuple(
        Trajectory(
            (7,) * count,
            (-0.5,) * count,
            (1,) * count,
            spans,
            Finish.STOP,
            "",
            Runs().extended(count, "e"),
            at,
            reward,
        )
        for at, reward in enumerate(rewards)
    )
    return RolloutGroup(f"g{ordinal}", ordinal, 0, Prompt(f"p{ordinal}", (1,), ""), members)


@dataclass
class World:
    """Pool, book and updates in one: gives `groups` in order and notes what becomes of them."""

    groups: list[RolloutGroup]
    policy: StalenessPolicy
    per_step: int = 2
    slots: int = 8
    last_batch: str = "train"
    error: TurnoutError | None = None
    commits: bool = True
    notes: list[str] = field(default_factory=list)

    starved: bool = False
    heals: bool = False

    def __post_init__(self) -> None:
        self.gate = LagGate(self.policy, None, {label: step for step, label in enumerate(LABELS)})
        self.gate.published(UNDER_WAY, STEP)
        self.plan = self

    async def take(self, count: int) -> Taken:
        self.notes.append(f"take {count}")
        if self.starved:
            assert self.error is not None
            raise self.error
        got, self.groups = self.groups[:count], self.groups[count:]
        return Taken(got, 0, 0, "" if len(got) == count else "end of the data", not self.groups)

    def end_step(self) -> None:
        self.notes.append("end")

    def drop(self, group: RolloutGroup, reason: str) -> None:
        self.notes.append(f"drop {group.group_id}: {reason}")

    def send_back(self, group: RolloutGroup, reason: str) -> None:
        self.notes.append(f"replay {group.group_id}")

    def book_take(self, step: int, groups: list[RolloutGroup]) -> None:
        self.notes.append(f"batch {[g.group_id for g in groups]}")

    async def settled(self) -> None:
        self.notes.append("settled")
        if self.commits:
            self.gate.committed(UNDER_WAY, STEP)

    async def retry(self, steps_done: int) -> None:
        self.notes.append(f"retry {steps_done}")
        assert self.error is not None
        if not self.heals:
            raise self.error
        self.error, self.starved = None, False

    def book_train(self, trained: list[GroupTrained]) -> None:
        self.trained = trained

    def maker(self, advantage: AdvantageSettings = ADVANTAGE) -> Any:
        class Book:
            take = staticmethod(self.book_take)
            train = staticmethod(self.book_train)
            transaction = staticmethod(nullcontext[None])

        freshness = Freshness(self.gate, self.settled, lambda: self.error, self.retry)
        maker: Any = BatchMaker
        return maker(self, Book, freshness, advantage)

    def batch(self, advantage: AdvantageSettings = ADVANTAGE) -> Any:
        return asyncio.run(self.maker(advantage).take(STEP))


def test_young_groups_are_taken_once_and_as_they_are() -> None:
    world = World([group(0, 1), group(1, 0, 1)], StalenessPolicy(1))
    batch = world.batch()
    assert world.notes == ["take 2", "end", "batch ['g0', 'g1']"]
    assert (batch.lags, batch.masked, batch.evicted) == (Counter({1: 4, 0: 2}), 0, 0)
    assert [s.lags for s in batch.train.samples] == [(1,), (1,), (0, 1), (0, 1)]


@pytest.mark.parametrize(("over", "verb"), [(Fate.DROP, "drop"), (Fate.REPLAY, "replay")])
def test_exactly_what_was_evicted_is_taken_again(over: Fate, verb: str) -> None:
    world = World([group(0, 2), group(1, 1), group(2, 3), group(3, 0), group(4, 0)], StalenessPolicy(1, over))
    batch = world.batch()
    verbs = [note.split(":")[0] for note in world.notes]
    assert verbs == [
        "take 2", "settled", f"{verb} g0", "take 1", "settled", f"{verb} g2", "take 1", "end", "batch ['g1', 'g3']",
    ]  # fmt: skip
    assert [g.group_id for g in batch.groups] == ["g1", "g3"] and batch.evicted == 2
    assert [g.group_id for g in world.groups] == ["g4"]  # not one more than that
    assert max(batch.lags) == 1


def test_masked_tokens_carry_no_loss_and_the_baseline_stays() -> None:
    world = World([group(0, 2, 1, 1), group(1, 0)], StalenessPolicy(1, Fate.MASK))
    batch = world.batch()
    assert world.notes == ["take 2", "end", "batch ['g0', 'g1']"]
    assert (batch.masked, batch.evicted, batch.lags) == (2, 0, Counter({1: 4, 0: 2}))
    assert [s.loss_mask for s in batch.train.samples][:2] == [(0, 1, 1), (0, 1, 1)]
    assert batch.groups[0].rewards == [0.0, 1.0]
    advantages = [s.advantages[0] for s in batch.train.samples[:2]]
    assert advantages[0] == -advantages[1] != 0


def test_what_is_told_of_trained_groups_are_the_versions_of_the_tokens_that_carried_loss() -> None:
    world = World([group(0, 2, 1, 1), group(1, 0)], StalenessPolicy(1, Fate.MASK))
    batch = world.batch()
    world.maker().trained(batch, world.gate.check(batch.trained, STEP))
    told = [(event.group, event.step, event.versions, event.lag) for event in world.trained]
    assert told == [("g0", STEP, [LABELS[STEP - 1]], 1), ("g1", STEP, [LABELS[STEP]], 0)]


def test_a_member_with_too_little_left_is_outside_the_loss_and_inside_the_baseline() -> None:
    old, young = group(0, 2, 2, 2, 1).trajectories[0], group(0, 0, rewards=(1.0,)).trajectories[0]
    mixed = RolloutGroup("g0", 0, 0, Prompt("p", (1,), ""), (old, young))
    batch = World([mixed], StalenessPolicy(1, Fate.MASK, 0.5), per_step=1).batch()
    assert [sum(s.loss_mask) for s in batch.train.samples] == [0, 1]
    assert batch.train.samples[1].advantages[0] > 0  # above the mean of both


def test_a_response_cut_at_its_limit_is_masked_and_no_token_of_it_counts_as_trained() -> None:
    cut, whole = group(0, 1, 1, rewards=(0.0, 1.0)).trajectories
    mixed = RolloutGroup("g0", 0, 0, Prompt("p", (1,), ""), (replace(cut, finish=Finish.LENGTH), whole))
    batch = World([mixed], StalenessPolicy(1), per_step=1).batch(AdvantageSettings(mask_truncated=True))
    assert [s.loss_mask for s in batch.train.samples] == [(0, 0), (1, 1)] and batch.lags == Counter({1: 2})
    assert batch.train.samples[1].advantages[0] > 0  # above the mean of both


@pytest.mark.parametrize("commits", [True, False])
def test_a_token_of_the_version_under_way_waits_for_it(commits: bool) -> None:
    world = World([group(0, 1, -1), group(1, 0)], StalenessPolicy(1), per_step=1, commits=commits)
    batch = world.batch()
    assert world.notes[:2] == ["take 1", "settled"]
    if commits:
        assert batch.groups[0].group_id == "g0" and batch.lags == Counter({1: 2, 0: 2})
    else:  # the update failed: what it brought to one engine never trains
        assert world.notes[2] == "drop g0: stale: made by a version that never became current"
        assert batch.groups[0].group_id == "g1"


def test_the_end_of_the_data_ends_the_batch() -> None:
    world = World([group(0, 5), group(1, 0)], StalenessPolicy(1))
    batch = world.batch()
    assert [g.group_id for g in batch.groups] == ["g1"] and batch.short == "end of the data"
    assert World([group(0, 5)], StalenessPolicy(1)).batch() is None


@pytest.mark.parametrize("heals", [True, False])
def test_with_no_slot_left_an_update_that_failed_is_tried_again(heals: bool) -> None:
    world = World([group(0, 1), group(1, 0)], StalenessPolicy(1), error=WeightError("no engine left"))
    world.starved, world.heals = True, heals
    if heals:
        assert [g.group_id for g in world.batch().groups] == ["g0", "g1"]
        assert world.notes[:3] == ["take 2", f"retry {STEP}", "take 2"]
    else:
        with pytest.raises(WeightError, match="no engine left"):
            world.batch()


@pytest.mark.parametrize("error", [None, WeightError("e1 attested another root")])
def test_when_even_new_groups_are_too_old_the_run_ends_with_the_cause(error: TurnoutError | None) -> None:
    world = World([group(n, 3) for n in range(50)], StalenessPolicy(1), error=error)
    if error is None:
        with pytest.raises(
            TrainError, match=r"step 6: 10 groups were too old .*no update brings newer weights"
        ):
            world.batch()
    else:
        with pytest.raises(WeightError, match="another root"):
            world.batch()
    assert len(world.groups) == 40  # more than the slots, and no more


def test_asy_02_the_last_batch_is_trained_or_dropped_with_its_reason() -> None:
    world = World([group(0, 1)], StalenessPolicy(1))
    assert [g.group_id for g in world.batch().groups] == ["g0"]
    world = World([group(0, 1)], StalenessPolicy(1), last_batch="drop")
    assert world.batch() is None
    assert world.notes == ["take 2", "drop g0: the last batch is not full", "end"]


def test_asy_02_a_full_batch_at_the_end_of_the_data_is_no_last_one_to_drop() -> None:
    world = World([group(0, 1), group(1, 1)], StalenessPolicy(1), last_batch="drop")
    assert [g.group_id for g in world.batch().groups] == ["g0", "g1"]
