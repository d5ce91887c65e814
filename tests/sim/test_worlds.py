"""The production's control plane in virtual worlds: every promise is kept, whatever goes wrong."""

from __future__ import annotations

import pytest

from turnout.sim.engine import VirtualEngine
from turnout.sim.plan import SCHEDULE_NAMES, plan_of
from turnout.sim.report import WorldOptions
from turnout.sim.world import run_seed, run_world

CALM = WorldOptions(())


@pytest.mark.parametrize("schedule", ("sync", "pipelined"))
def test_a_world_without_faults_keeps_every_promise(schedule):
    for seed in range(4):
        report = run_seed(seed, WorldOptions((), schedule))
        assert report.failures == []
        assert report.happened["train_steps"] == 20 and report.happened["groups"] >= 200


def test_a_world_repeats():
    first, second = (
        run_seed(3, WorldOptions(("request_lost", "slow_engine"), "sync", True)) for _ in range(2)
    )
    assert first.trace and first.trace == second.trace
    assert first.final_root == second.final_root


def deterministic_root(seed, schedule, **options):
    plan = plan_of(
        seed, schedule, deterministic=True, update_weights_interval=1, dynamic_sampling=False, **options
    )
    report = run_world(seed, plan, CALM)
    assert report.failures == []
    return report


def test_async_without_staleness_is_sync_bit_for_bit():
    for seed in range(3):
        sync = deterministic_root(seed, "sync", max_staleness=0)
        ahead = deterministic_root(seed, "async", max_staleness=0, max_lead=0, max_engine_lag=0)
        assert sync.final_root == ahead.final_root


def test_the_lag_of_pipelined_is_exactly_1_from_the_second_step_on():
    report = deterministic_root(5, "pipelined", max_staleness=1)
    assert [lags for _, lags in sorted(report.lags.items())] == [(0,)] + [(1,)] * 19


def test_the_lag_of_async_never_exceeds_its_bound_and_reaches_it():
    for bound in (1, 2):
        report = deterministic_root(6, "async", max_staleness=bound, max_lead=bound, max_engine_lag=0)
        found = [lags for _, lags in sorted(report.lags.items())]
        assert found == [(step,) for step in range(bound)] + [(bound,)] * (20 - bound)


def test_schedules_are_drawn():
    assert {plan_of(seed).config.schedule for seed in range(20)} == set(SCHEDULE_NAMES)


def under_pressure(seed, options=CALM, **more):
    """Engines whose KV space is short; how often they put a request back."""
    lead = {"max_staleness": 2, "max_lead": 2, "max_engine_lag": 0, "rollout_window": 5}
    drawn = {"update_weights_interval": 1, "deterministic": False, "dynamic_sampling": False}
    report = run_world(seed, plan_of(seed, "async", **lead, **drawn, **more), options)
    assert report.failures == []
    return report.happened["retracted"]


def test_fewer_requests_are_put_back_where_admission_looks_at_the_memory():
    assert under_pressure(0, kv_high_watermark=0.7) < 0.7 * under_pressure(0)
    under_pressure(2, WorldOptions(), kv_high_watermark=0.5)  # whatever goes wrong, nothing is stuck


@pytest.mark.parametrize("seed", [346, 424])
def test_an_update_does_not_wait_for_requests_whose_engines_wait_for_it(seed):
    """All engines that could end them died while it drained: those that came again joined only after it."""
    assert run_seed(seed, WorldOptions()).failures == []


def test_pairs_of_prefill_and_decode_engines_keep_every_promise(monkeypatch):
    moved = []
    arrived = VirtualEngine.arrived
    monkeypatch.setattr(VirtualEngine, "arrived", lambda *args: (moved.append(1), arrived(*args)))
    assert plan_of(4).prefills == 2 and plan_of(5).prefills == 0
    report = run_seed(4, WorldOptions(("engine_crash", "stream_cut", "request_aborted", "slow_engine")))
    assert report.failures == [] and report.happened["train_steps"] >= 20
    assert len(moved) >= 400 and report.faults["engine_crash"]
