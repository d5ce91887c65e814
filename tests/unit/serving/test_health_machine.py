"""The health of an engine: every pair of the table, probes in a row, the budget of restarts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.core.errors import IllegalTransition
from turnout.serving.health_machine import (
    HEALTH_TABLE,
    PAUSE_MAX_S,
    PAUSE_S,
    WINDOW_S,
    Health,
    Life,
    Sign,
)

FAILURES = 3


@pytest.mark.parametrize("state", Life)
@pytest.mark.parametrize("sign", Sign)
def test_every_pair_leads_somewhere_or_is_refused(state, sign):
    health = Health(state)
    if HEALTH_TABLE.allows(state, sign):
        assert health.after(sign, FAILURES).state is HEALTH_TABLE.after(state, sign)
    else:
        with pytest.raises(IllegalTransition):
            health.after(sign, FAILURES)


def test_only_probes_in_a_row_are_an_end():
    health = Health().after(Sign.SERVES, FAILURES)
    for sign in (Sign.SILENT, Sign.SILENT, Sign.ANSWERED, Sign.SILENT, Sign.SILENT):
        health = health.after(sign, FAILURES)
    assert health.state is Life.SUSPECT
    assert health.after(Sign.SILENT, FAILURES).state is Life.DOWN


def test_one_silent_probe_is_an_end_where_that_is_asked():
    assert Health(Life.UP).after(Sign.SILENT, 1).state is Life.DOWN


def test_no_engine_is_started_again_where_none_may():
    health, pause = Health(Life.DOWN).again(0, 5.0)
    assert (health.state, pause) == (Life.GONE, None)


@given(st.integers(1, 8), st.lists(st.floats(0, 2 * WINDOW_S), min_size=1, max_size=40))
def test_no_window_holds_more_restarts_than_the_budget(budget, gaps):
    now, health, begun = 0.0, Health(Life.DOWN), []
    for gap in gaps:
        now += gap
        health, pause = health.again(budget, now)
        if pause is None:
            assert health.state is Life.GONE
            assert sum(now - at < WINDOW_S for at in begun) == budget
            break
        assert health.state is Life.STARTING and PAUSE_S <= pause <= PAUSE_MAX_S
        now += pause
        begun.append(now)
        health = health.after(Sign.ENDED, FAILURES)
    for first in begun:
        assert sum(first <= at < first + WINDOW_S for at in begun) <= budget


def test_pauses_double_while_ends_follow_each_other():
    now, health, pauses = 0.0, Health(Life.DOWN), []
    for _ in range(8):
        health, pause = health.again(20, now)
        assert pause is not None
        pauses.append(pause)
        now += pause
        health = health.after(Sign.ENDED, FAILURES)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
