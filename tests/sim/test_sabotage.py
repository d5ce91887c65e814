"""Guards of the production switched off, one at a time: a world notices each of them."""

from __future__ import annotations

import pytest

from turnout.sim.report import WorldOptions
from turnout.sim.sabotage import SABOTAGES, sabotaged
from turnout.sim.simulate import Simulation, simulate

TESTED = (  # the ten of the design; all of them: benchmarks/simulate.py
    "free-slots-at-publish",
    "version-moves-at-publish",
    "send-before-persist",
    "no-write-id-read-back",
    "attempt-not-raised",
    "tentative-tokens-kept",
    "admission-before-attestation",
    "lost-wake-up",
    "resume-without-incarnation",
    "prefix-cache-not-namespaced",
)
SEEDS = 200


@pytest.mark.parametrize("name", TESTED)
def test_a_world_notices_that_a_guard_is_off(name):
    hunt = Simulation(SEEDS, WorldOptions(), 0, name, until_failure=True, processes=1)
    assert any(report.failures for report in simulate(hunt))


def test_a_guard_is_on_again_afterwards():
    for name, found in SABOTAGES.items():
        before = found.owner.__dict__[found.attribute]
        with sabotaged(name):
            assert found.owner.__dict__[found.attribute] is not before
        assert found.owner.__dict__[found.attribute] is before


def test_there_are_at_least_25():
    assert len(SABOTAGES) >= 25 and set(TESTED) <= set(SABOTAGES)
