"""Adaptive concurrency as arithmetic, and against a model of engines whose memory is short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.rollout.admission import Admission, AdmissionPlan, EngineLoad, predicted_lag

CALM = EngineLoad(running=8, waiting=2, kv_usage=0.5)
FULL = EngineLoad(running=8, waiting=0, kv_usage=0.95)
QUEUED = EngineLoad(running=8, waiting=9, kv_usage=0.5)
PLAN = AdmissionPlan(most=64, per_step=8, max_staleness=2)


def test_it_begins_with_all_and_falls_only_under_pressure() -> None:
    admission = Admission(PLAN)
    assert admission.limit == 64 and admission.may_start(63, 63) and not admission.may_start(64, 64)
    assert admission.report([CALM, CALM], 64) == 0 and admission.limit == 64
    assert admission.report([CALM, FULL], 64) == 16 and admission.limit == 48


def test_a_queue_slows_admission_and_cuts_nothing() -> None:
    admission = Admission(PLAN)
    assert admission.report([CALM, QUEUED], 64) == 0
    assert admission.limit == 48 and not admission.may_start(48, 0)


def test_it_falls_from_what_is_in_flight() -> None:
    admission = Admission(PLAN)
    admission.report([FULL], 20)
    assert admission.limit == 15


def test_it_rises_only_while_it_holds_work_back() -> None:
    admission = Admission(PLAN)
    admission.report([FULL], 40)
    assert admission.limit == 30
    admission.report([CALM], 12)
    assert admission.limit == 30
    admission.report([CALM], 30)
    assert admission.limit == 34


def test_no_report_no_start() -> None:
    admission = Admission(PLAN)
    assert admission.report([], 5) == 0 and not admission.may_start(5, 5)
    admission.report([CALM], 5)
    assert admission.may_start(5, 5) and admission.limit == 64


def test_under_pressure_nothing_starts_that_will_be_too_old() -> None:
    admission = Admission(PLAN)
    assert admission.may_start(5, 24)
    admission.report([QUEUED], 64)
    assert not admission.may_start(5, 24) and admission.may_start(5, 23)
    admission.report([CALM], 5)
    assert admission.may_start(5, 24)


@pytest.mark.parametrize(("ahead", "lag"), [(0, 0), (7, 0), (8, 1), (23, 2), (24, 3)])
def test_predicted_lag(ahead: int, lag: int) -> None:
    assert predicted_lag(ahead, 8) == lag


LOADS = st.builds(EngineLoad, st.integers(0, 50), st.integers(0, 50), st.floats(0, 1))


@given(st.lists(st.tuples(st.lists(LOADS, max_size=3), st.integers(0, 90))))
def test_the_limit_stays_between_its_ends(reports: list[tuple[list[EngineLoad], int]]) -> None:
    admission = Admission(PLAN)
    for loads, in_flight in reports:
        cut = admission.report(loads, in_flight)
        assert PLAN.least <= admission.limit <= PLAN.most
        assert 0 <= cut <= max(0, in_flight - PLAN.least)
        assert not admission.may_start(admission.limit, 0)


@pytest.mark.parametrize("fits", [5, 20, 50])
def test_it_settles_near_what_the_memory_holds(fits: int) -> None:
    """Engines whose cache holds `fits` groups: the limit saws between a half and the whole of that."""
    admission, in_flight, seen = Admission(PLAN), 64, list[int]()
    for _ in range(200):
        in_flight -= admission.report([EngineLoad(in_flight, 0, in_flight / fits * 0.9)], in_flight)
        while admission.may_start(in_flight, 0):
            in_flight += 1
        seen.append(in_flight)
    settled = seen[20:]
    assert max(settled) <= fits + PLAN.most // 16 and min(settled) >= fits // 2
