"""Public reports in virtual worlds: the production's loop, pool and updates, without faults and with."""

from __future__ import annotations

from typing import Any

import pytest

from turnout.sim.plan import plan_of
from turnout.sim.report import SeedReport, WorldOptions
from turnout.sim.world import run_world

EQUAL = {"deterministic": True, "update_weights_interval": 1, "dynamic_sampling": False}


def world(seed: int, schedule: str, faults: bool = False, **fixed: Any) -> SeedReport:
    options = WorldOptions() if faults else WorldOptions(kinds=())
    report = run_world(seed, plan_of(seed, schedule, **fixed), options)
    assert report.failures == []
    return report


def lags(report: SeedReport) -> set[int]:
    return {lag for values in report.lags.values() for lag in values}


def test_asy_08_async_with_a_bound_of_0_is_sync_bit_for_bit() -> None:
    """20 steps on the same seed: the weights that come out depend on every token, its version and its order."""
    free: dict[str, Any] = {"max_lead": None, "max_engine_lag": 0, "rollout_window": None}
    sync = world(1, "sync", max_staleness=0, **EQUAL)
    bounded = world(1, "async", max_staleness=0, **free, **EQUAL)
    ahead = world(1, "async", max_staleness=1, **free, **EQUAL)
    assert lags(sync) == lags(bounded) == {0}
    assert sync.final_root == bounded.final_root
    assert lags(ahead) == {0, 1}
    assert ahead.final_root != sync.final_root


@pytest.mark.parametrize("schedule", ["sync", "pipelined"])
def test_over_sampling_keeps_every_promise(schedule: str) -> None:
    """Slots, conservation, and the schedule's own lag: what was sampled beyond a batch is never trained later."""
    lead = int(schedule == "pipelined")
    more = {"over_sampling_batch_size": 14, "update_weights_interval": 1, "deterministic": False}
    report = world(1, schedule, True, max_staleness=lead, **more)
    assert [report.lags[step] for step in range(20)] == [(0,)] + [(lead,)] * 19
    assert report.happened["groups"] > 10 * 20, "more are sampled than the 20 steps train"


def test_partial_rollouts_beside_training_keep_every_promise() -> None:
    more = {"over_sampling_batch_size": 14, "partial_rollout": True, "update_weights_interval": 1}
    report = world(4, "pipelined", True, max_staleness=2, deterministic=False, **more)
    assert lags(report) == {0, 1, 2}, "what was cut trains a step later"


def test_rol_07_rounds_that_are_skipped_keep_every_promise() -> None:
    filtered = {"dynamic_sampling": True, "dynamic_sampling_max_waves": 1, "on_all_filtered": "skip"}
    world(5, "sync", max_staleness=1, update_weights_interval=1, deterministic=False, **filtered)
