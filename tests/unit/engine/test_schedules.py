"""Random schedules of the engine (tests.engine_schedules): some hundred here, ten thousand in `make soak`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.engine_bugs import BUGS, find_bug
from tests.engine_schedules import coverage, run_schedule

SCHEDULES = 300


def test_random_schedules_keep_every_promise_and_meet_every_pair():
    seen: Counter = Counter()
    for seed in range(SCHEDULES):
        try:
            run_schedule(seed, seen)
        except Exception as fault:
            fault.add_note(f"seed {seed}")
            raise
    missing = [pair for kind in coverage(seen).values() for pair, count in kind.items() if not count]
    assert not missing


@pytest.mark.parametrize("name", BUGS)
def test_each_planted_bug_is_found(name):
    found = find_bug(name, 0, SCHEDULES)
    assert found is not None
