"""THE loop with recorded parts: the seven verbs in order, the last step, the end of the data, and failures."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from turnout.core.errors import InvariantBroken, NothingToTrain, TrainError, WeightError
from turnout.core.types import Finish, Prompt, RolloutGroup, TrainBatch, Trajectory
from turnout.core.version import Runs, VersionSpans, WeightVersion
from turnout.placement.real import RealClock
from turnout.rollout.staleness import StalenessPolicy, trained_tokens
from turnout.schedule.lag import LagGate
from turnout.schedule.loop import Parts, StepBatch, run_loop
from turnout.schedule.phases import Phases
from turnout.schedule.schedule import SYNC, Schedule
from turnout.schedule.updates import Around, Updates

BASE = WeightVersion(0, 0, "0" * 32)


@dataclass
class World:
    """Every part of the loop in one: notes what is asked of it. `rows` prompts in batches of `size`; steps in
    `fail` raise there; the batch of step `empty` has lost all its groups."""

    rows: int = 100
    size: int = 2
    fail: dict[str, Exception] = field(default_factory=dict)
    empty: int | None = None
    stale: bool = False
    schedule: Schedule = SYNC
    detached = follow = False
    in_flight = False

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.phase_of: dict[str, str] = {}
        self.current = BASE
        self.taken = 0
        self.phases = Phases(RealClock())
        self.gate = LagGate(StalenessPolicy(0), 0)
        self.gate.committed(BASE, 0)

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.phase_of[text.split(maxsplit=1)[0]] = self.phases.current
        if text in self.fail:
            raise self.fail[text]

    async def take(self, step: int) -> StepBatch | None:
        self.note(f"take {step}")
        count = min(self.size, self.rows - self.taken)
        self.taken += count
        if not count or self.empty == step:
            return None
        label = (BASE if self.stale else self.current).label
        spans, made_by = VersionSpans(((1, label),)), Runs(((1, "e"),))
        member = Trajectory((1,), (-0.5,), (1,), spans, Finish.STOP, "", made_by, 0, 1.0)
        groups = [RolloutGroup(f"g{n}", n, 0, Prompt("p", (1,), ""), (member,)) for n in range(count)]
        trained = {group.group_id: trained_tokens(group) for group in groups}
        return StepBatch(
            step, groups, TrainBatch(step, label, ()), 0, 0, "", self.taken >= self.rows, trained
        )

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        self.note(f"train {batch.step}")
        return {"loss": 1.0}

    def trained(self, batch: StepBatch, lags: dict[str, int]) -> None:
        self.note(f"trained {batch.step} {sorted(lags.values())}")

    retries = 0

    async def recovered(self) -> None: ...

    def begin(self, train_step: int) -> Any:
        world = self

        class Update:
            version = WeightVersion(0, train_step, f"{train_step:032d}")

            async def publish(self) -> Any:
                world.note(f"publish {train_step}")
                return self

            async def prepare(self) -> None:
                world.note(f"prepare {train_step}")

            async def unserved(self) -> None:
                await asyncio.sleep(60)

            async def abandon(self, reason: str) -> None: ...

            def extend(self, seconds: float) -> None:
                pass

            async def commit(self) -> WeightVersion:
                world.note(f"commit {train_step}")
                world.current = self.version
                return world.current

        return Update()

    async def digest(self) -> str:
        raise AssertionError("no resume, no digest is asked for")

    async def drain(self) -> None:
        assert not self.in_flight, "nothing is in flight when a version is put into place"

    def published(self, steps_done: int, root: str) -> None: ...

    def remade(self, steps_done: int, root: str) -> None: ...

    def committed(self, steps_done: int, root: str) -> None:
        self.notes.append(f"free {steps_done}")

    def changed(self) -> None:
        self.notes.append("look again")

    async def settled(self) -> None:
        pass

    def renewed(self) -> None:
        pass

    def due(self, steps_done: int, last: bool) -> bool:
        return True

    async def save_if_due(self, steps_done: int, last: bool) -> None:
        self.note(f"save {steps_done}{' last' if last else ''}")

    async def caught_up(self, steps_done: int) -> None:
        assert steps_done

    async def run_if_due(self, steps_done: int, last: bool) -> None:
        self.note(f"evaluate {steps_done}{' last' if last else ''}")

    def step(self, batch: StepBatch, metrics: dict[str, float], version: WeightVersion) -> None:
        self.note(f"report {batch.step} {version.counter}")

    def run(self, first: int = 0, end: int | None = None) -> int:
        async def main() -> int:
            around = Around(self, self, self.gate, self.phases, RealClock())
            updates = Updates(self, self.schedule, around)
            updates.adopt(self.current, first)
            parts = Parts(self, self, updates, self, self, self, self.gate, self.phases)
            return await run_loop(parts, first, end)

        return asyncio.run(main())


def one_step(step: int, lags: str = "[0, 0]", last: bool = False) -> list[str]:
    mark = " last" if last else ""
    done = step + 1
    return [
        f"take {step}", f"train {step}", f"trained {step} {lags}", f"publish {done}", f"prepare {done}",
        f"commit {done}", f"free {done}",
        f"report {step} {done}", f"save {done}{mark}", f"evaluate {done}{mark}",
    ]  # fmt: skip


def test_the_verbs_of_every_step_in_order() -> None:
    world = World()
    assert world.run(end=3) == 3
    assert world.notes == ["evaluate 0", *one_step(0), *one_step(1), *one_step(2, last=True)]


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("schedule", [SYNC, Schedule("pipelined", 1, True), Schedule("async", 2, False)])
def test_asy_05_the_last_step_saves_and_evaluates_and_starts_no_other_rollout(
    schedule: Schedule, rounds: int
) -> None:
    world = World(schedule=schedule)
    assert world.run(end=rounds) == rounds
    assert [note for note in world.notes if note.startswith("take")] == [f"take {n}" for n in range(rounds)]
    assert [note for note in world.notes if "last" in note] == [
        f"save {rounds} last",
        f"evaluate {rounds} last",
    ]
    assert world.current.counter == rounds


def test_every_verb_has_its_phase() -> None:
    world = World()
    world.run(end=1)
    wanted = {
        "take": "rollout",
        "train": "train",
        "publish": "publish",
        "prepare": "prepare",
        "commit": "activate",
        "save": "checkpoint",
    }
    assert wanted.items() <= world.phase_of.items()
    assert set(world.phases.take()) == {*wanted.values(), "drain"}


@pytest.mark.parametrize(("rows", "steps"), [(4, 2), (6, 3)])
def test_asy_02_data_that_ends_on_a_batch_boundary(rows: int, steps: int) -> None:
    world = World(rows=rows)
    assert world.run() == steps
    assert world.notes[-10:] == one_step(steps - 1, last=True)
    assert f"take {steps}" not in world.notes


def test_asy_02_data_that_ends_inside_a_batch() -> None:
    world = World(rows=7, size=4)
    assert world.run(end=10) == 2
    assert world.notes[-10:] == one_step(1, "[0, 0, 0]", last=True)


def test_the_data_and_the_steps_may_end_together() -> None:
    world = World(rows=4)
    assert world.run(end=2) == 2
    assert [note for note in world.notes if "last" in note] == ["save 2 last", "evaluate 2 last"]


def test_a_last_batch_that_lost_all_its_groups_still_ends_with_a_checkpoint_and_an_evaluation() -> None:
    world = World(rows=6, empty=2)
    assert world.run() == 2
    assert world.notes[-3:] == ["take 2", "save 2 last", "evaluate 2 last"]


def test_a_run_without_any_batch_does_nothing() -> None:
    world = World(rows=0)
    assert world.run() == 0
    assert world.notes == ["evaluate 0", "take 0"]


def test_a_resume_goes_on_at_its_step() -> None:
    world = World()
    world.current = WeightVersion(0, 5, "5" * 32)
    world.gate.committed(world.current, 5)
    assert world.run(first=5, end=7) == 7
    assert world.notes == ["evaluate 5", *one_step(5), *one_step(6, last=True)]


def test_nothing_to_do_is_nothing_done() -> None:
    world = World()
    assert world.run(first=3, end=3) == 3
    assert world.notes == ["evaluate 3"]


@pytest.mark.parametrize(
    ("at", "fault", "phase"),
    [
        ("take 1", TrainError("no groups"), "rollout"),
        ("train 1", TrainError("nan"), "train"),
        ("publish 2", WeightError("disk full"), "publish"),
        ("commit 2", WeightError("e1 attested another root"), "activate"),
        ("save 2", OSError("disk full"), "checkpoint"),
    ],
)
def test_after_a_failure_nothing_more_happens(at: str, fault: Exception, phase: str) -> None:
    world = World(fail={at: fault})
    with pytest.raises(type(fault)) as caught:
        world.run(end=5)
    assert caught.value is fault
    assert world.notes[-1] == at
    assert world.phases.current == phase


def test_after_a_failed_commit_the_old_version_is_current_and_the_new_one_never_trains() -> None:
    world = World(fail={"commit 2": WeightError("aborted")})
    with pytest.raises(WeightError):
        world.run(end=5)
    assert world.current.counter == 1
    assert list(world.gate.exported_at.values()) == [0, 1, None]


def test_a_batch_that_is_too_old_does_not_reach_the_trainer() -> None:
    world = World(stale=True)
    with pytest.raises(InvariantBroken, match="lag 1, the schedule allows 0"):
        world.run(end=5)
    assert world.notes[-1] == "take 1"


def test_rol_07_a_run_that_finds_nothing_to_train_saves_first() -> None:
    world = World(fail={"take 2": NothingToTrain("all filtered")})
    with pytest.raises(NothingToTrain, match="all filtered"):
        world.run(end=5)
    assert world.notes == ["evaluate 0", *one_step(0), *one_step(1), "take 2", "save 2 last"]


def test_rol_07_where_nothing_was_trained_there_is_nothing_to_save() -> None:
    world = World(fail={"take 4": NothingToTrain("all filtered")})
    with pytest.raises(NothingToTrain):
        world.run(first=4, end=9)
    assert world.notes == ["evaluate 4", "take 4"]


def test_met_04_the_run_ends_by_train_steps_and_not_by_prompts() -> None:
    """Ten steps are asked; that half of the groups of a rollout were dropped on the way takes none of them."""
    world = World(rows=1000)
    assert world.run(end=10) == 10
    assert [note for note in world.notes if note.startswith("train ")] == [f"train {n}" for n in range(10)]
