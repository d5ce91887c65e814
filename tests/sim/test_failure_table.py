"""The failure table (docs/guides/failures.md), row by row and schedule by schedule: worlds with exactly that fault.

Each world keeps every promise that the checkers know (turnout.sim.checks); what a row says besides is asserted.
"""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from turnout.core.events import (
    EngineLost,
    GroupCompleted,
    GroupDropped,
    GroupRequeued,
    GroupTaken,
    GroupTrained,
    RunStarted,
    StepTrained,
    VersionAborted,
    VersionCommitted,
)
from turnout.sim.plan import GROUPS, SCHEDULE_NAMES, STEPS, plan_of
from turnout.sim.report import WorldOptions
from turnout.sim.world import World, _report

EVERY = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
CALM = {
    "deterministic": False, "dynamic_sampling": False, "update_weights_interval": 1, "use_fault_tolerance": True,
    "over_sampling_batch_size": None, "partial_rollout": False, "max_staleness": 2, "rollout_max_response_len": 64,
}  # fmt: skip
ALL = {"use_fault_tolerance": False, "min_engines": None}  # no update goes on without an engine
LEAD = {"max_lead": 2, "max_engine_lag": 0, "rollout_window": 3}


RATE = 8.0  # times that of a world of middling luck


class Lived:
    """A world of the seed with these faults, and what was told in it."""

    def __init__(self, tmp_path, schedule, kinds, seed=0, begin=lambda world: None, rate=RATE, **fixed):
        options = CALM | (LEAD if schedule == "async" else {}) | fixed
        self.world = World(seed, plan_of(seed, schedule, **options), WorldOptions(kinds), tmp_path)
        self.world.faults.rates |= dict.fromkeys(kinds, rate)
        begin(self.world)
        self.world.loop.run_until_complete(self.world.live())
        self.world.loop.discard()
        self.report = _report(self.world)
        assert self.report.failures == [] and self.world.loop.faults == []
        assert all(self.report.faults[kind] for kind in kinds), self.report.faults
        self.told = [one.event for one in self.world.record.told]

    def of(self, *kinds):
        return [event for event in self.told if isinstance(event, kinds)]

    @property
    def lives(self):
        return self.report.happened["controllers"]

    def every_step_is_whole(self):
        """Each step trained once in the end, with all of its groups."""
        last = {event.step: event.groups for event in self.of(StepTrained)}
        assert last == dict.fromkeys(range(STEPS), GROUPS)


@EVERY
def test_an_engine_crashes(tmp_path, schedule):
    """Its requests go on elsewhere, or on its next life, from their tokens: no group is lost by it or begun anew,
    and every batch is whole."""
    lived = Lived(tmp_path, schedule, ("engine_crash",), rate=3.0, min_engines=1)
    assert lived.lives == 1 and lived.of(EngineLost)
    lived.every_step_is_whole()
    assert lived.of(GroupDropped) == [] and lived.of(GroupRequeued) == []


@EVERY
def test_a_weight_update_fails(tmp_path, schedule):
    """The version never moves, no token carries it; where rollouts wait for the weights none begins before the next
    commit."""
    lived = Lived(tmp_path, schedule, ("other_weights",), seed=6, **ALL)
    aborted = {event.version for event in lived.of(VersionAborted)}
    assert aborted and not aborted & {event.version for event in lived.of(VersionCommitted)}
    assert not aborted & {label for event in lived.of(GroupCompleted) for label in event.versions}
    if schedule == "sync":
        begun = lived.of(VersionAborted, VersionCommitted, GroupTaken, RunStarted)
        after = [then for this, then in pairwise(begun) if isinstance(this, VersionAborted)]
        assert not any(isinstance(event, GroupTaken) for event in after)


@EVERY
def test_a_verifier_hangs(tmp_path, schedule):
    """The sample ends by its own deadline and costs its group only; no batch waits for longer."""
    lived = Lived(tmp_path, schedule, ("reward_hangs",), seed=1)
    assert lived.lives == 1
    lived.every_step_is_whole()
    reasons = {event.reason for event in lived.of(GroupDropped)}
    assert any("no answer within 10 s" in reason for reason in reasons), reasons


@EVERY
@pytest.mark.parametrize("kind", ["trainer_crash", "controller_crash"])
def test_the_trainer_restarts(tmp_path, schedule, kind):
    """It goes on from its checkpoint; the engines, which stayed up, attest before the first sample; a group trains
    once (turnout.sim.checks)."""

    def begin(world):
        world._crashes = 2 if kind == "controller_crash" else 0
        world.rng = random.Random(1)

    lived = Lived(tmp_path, schedule, (kind,), begin=begin, save_interval=1)
    starts = lived.of(RunStarted)
    assert len(starts) == lived.lives > 1 and any(event.resumed_at for event in starts[1:])
    lived.every_step_is_whole()
    life = lived.of(RunStarted, VersionCommitted, GroupTaken, GroupCompleted)
    assert all(
        isinstance(then, VersionCommitted) for this, then in pairwise(life) if isinstance(this, RunStarted)
    )


@EVERY
def test_the_network_is_split(tmp_path, schedule):
    """Work goes on elsewhere or waits, and goes on by itself; an update that can't wait so long names who is
    missing, and the old version stays."""
    lived = Lived(tmp_path, schedule, ("partition",), seed=4, **ALL, update_weight_timeout_s=5.0)
    lived.every_step_is_whole()
    reasons = [event.reason for event in lived.of(VersionAborted)]
    assert any(re.search(r"waited .* \be\d\b", reason) for reason in reasons), reasons


@EVERY
@pytest.mark.parametrize("kind", ["full_disk", "torn_write", "file_answer_lost"])
def test_the_disk_fails(tmp_path, schedule, kind):
    """Loud and bounded: the run ends, if it must, with what happened, and the next life has all that was said."""
    lived = Lived(tmp_path, schedule, (kind,), seed=3, save_interval=1)
    lived.every_step_is_whole()


@EVERY
def test_it_is_told_to_stop(tmp_path, schedule):
    """The step under way is done and kept: the next life goes on at exactly that step, and trains nothing again."""
    lived = Lived(tmp_path, schedule, (), begin=lambda world: world.later(40.0, world._stop, 0))
    first, second = lived.of(RunStarted)
    steps = [event.step for event in lived.of(StepTrained)]
    assert steps == list(range(STEPS)) and second.resumed_at in steps
    assert (
        len({event.group for event in lived.of(GroupTrained)}) == STEPS * GROUPS and first.resumed_at is None
    )
