"""The machine of one side of a split request: every pair of its tables, deadlines, and what failures lead to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.core.errors import IllegalTransition
from turnout.engine.pd_machine import (
    FAILURES,
    LIVE,
    TABLES,
    Deadlines,
    Effect,
    Event,
    Side,
    SplitRequest,
    State,
)

LIMITS = Deadlines(pair_s=7.0, request_s=100.0)
PATH = {
    Side.PREFILL: {
        (State.QUEUED, Event.JOINED): State.PREFILL,
        (State.PREFILL, Event.COMPUTED): State.KV_TRANSFER,
        (State.KV_TRANSFER, Event.TAKEN): State.DONE,
    },
    Side.DECODE: {
        (State.QUEUED, Event.JOINED): State.PREFILL,
        (State.PREFILL, Event.COMPUTED): State.KV_TRANSFER,
        (State.KV_TRANSFER, Event.TAKEN): State.DECODE,
        (State.DECODE, Event.FINISHED): State.DONE,
    },
}


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_every_pair_of_the_tables(side, state, event):
    reachable = LIVE if side is Side.DECODE else LIVE[:3]
    expected = PATH[side].get((state, event))
    if event in FAILURES and state in reachable:
        alone = state is State.DECODE and event is Event.PEER_LOST
        expected = State.DECODE if alone else State.ABORTED
    if expected is None:
        with pytest.raises(IllegalTransition):
            TABLES[side].after(state, event)
    else:
        assert TABLES[side].after(state, event) is expected


@given(st.sampled_from(list(Side)), st.lists(st.tuples(st.sampled_from(list(Event)), st.floats(0, 50))))
def test_any_history_has_deadlines_and_returns_the_pages_once(side, history):
    now, returned = 0.0, 0
    machine = SplitRequest(side, LIMITS, now)
    for event, later in history:
        now += later
        before = (machine.state, machine.since)
        try:
            effects = machine.on(event, now)
        except IllegalTransition:
            assert (machine.state, machine.since) == before
            continue
        returned += effects.count(Effect.RETURN)
        if machine.over:
            # a decode side that is done ended in its scheduler, which returned the pages
            assert returned == (0 if (side, machine.state) == (Side.DECODE, State.DONE) else 1)
            assert machine.state is State.DONE or Effect.CLOSE in effects
        else:
            assert now <= machine.expires < math.inf and returned == 0
        if event in FAILURES and machine.state is State.ABORTED:
            told = event is not Event.PEER_LOST and before[0] is not State.DECODE
            assert (Effect.TELL in effects) == told
    if not machine.over:
        machine.on(Event.DEADLINE, machine.expires)
        assert machine.state is State.ABORTED


def test_waits_for_the_other_side_are_short_and_what_is_computed_alone_is_not():
    machine = SplitRequest(Side.DECODE, LIMITS, 10.0)
    expires = [machine.expires]
    for at, event in ((11.0, Event.JOINED), (12.0, Event.COMPUTED), (13.0, Event.TAKEN)):
        machine.on(event, at)
        expires.append(machine.expires)
    assert expires == [17.0, 111.0, 19.0, 113.0]
