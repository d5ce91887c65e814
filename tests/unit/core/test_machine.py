"""Transition tables: every pair is either in the table or an error that changes nothing."""

from __future__ import annotations

import pytest

from turnout.core.errors import IllegalTransition
from turnout.core.machine import Table
from turnout.rollout.group_machine import TABLE as GROUP
from turnout.rollout.group_machine import GroupEvent, GroupState

GROUP_ROWS = {
    "waiting start": "inflight",
    "waiting drop": "dropped",
    "waiting requeue": "requeued",
    "inflight complete": "completed",
    "inflight cut": "partial",
    "inflight drop": "dropped",
    "inflight requeue": "requeued",
    "partial resume": "inflight",
    "partial drop": "dropped",
    "partial requeue": "requeued",
    "completed take": "taken",
    "completed drop": "dropped",
    "completed requeue": "requeued",
    "taken train": "trained",
    "taken return": "completed",
    "taken drop": "dropped",
    "taken requeue": "requeued",
    "trained restore": "completed",
}


@pytest.mark.parametrize("state", GroupState)
@pytest.mark.parametrize("event", GroupEvent)
def test_every_pair_of_the_group_machine(state: GroupState, event: GroupEvent) -> None:
    expected = GROUP_ROWS.get(f"{state} {event}")
    assert GROUP.allows(state, event) == (expected is not None)
    if expected is not None:
        assert GROUP.after(state, event) == expected
        return
    with pytest.raises(IllegalTransition) as caught:
        GROUP.after(state, event)
    assert (caught.value.state, caught.value.event) == (state, event)
    assert "group" in str(caught.value)


def test_the_ends_of_a_group_are_final() -> None:
    for end in (GroupState.DROPPED, GroupState.REQUEUED):
        assert not any(GROUP.allows(end, event) for event in GroupEvent)
    assert [event for event in GroupEvent if GROUP.allows(GroupState.TRAINED, event)] == [GroupEvent.RESTORE]


def test_a_table_keeps_its_own_rows() -> None:
    rows = {("a", "go"): "b"}
    table = Table("t", rows)
    rows["b", "go"] = "c"
    assert table.after("a", "go") == "b"
    with pytest.raises(IllegalTransition):
        table.after("b", "go")
