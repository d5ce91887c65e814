"""Seeded worlds of weight updates, and bugs planted to see that the worlds notice (tests.update_worlds)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.update_bugs import BUGS, find_bug
from tests.update_worlds import FAULTS, run_world

WORLDS = 200


def test_worlds_keep_every_promise() -> None:
    totals = Counter[str]()
    for seed in range(WORLDS):
        totals.update(run_world(seed))
    assert totals["committed"] > 4 * WORLDS and totals["aborted"] > WORLDS
    for fault in FAULTS:
        assert totals[fault] > 20, fault
    for who in ("trainer", "engine"):
        for phase in ("preparing", "activating"):
            assert totals[f"{who} killed while {phase}"] >= 3, (who, phase)


def test_a_world_repeats() -> None:
    assert run_world(7) == run_world(7)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    found = find_bug(name, 0, 150)
    assert found is not None
