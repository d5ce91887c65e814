"""The lag gate, with the numbers of ASY-07."""

from __future__ import annotations

import pytest

from turnout.core.errors import InvariantBroken
from turnout.core.types import Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans, WeightVersion
from turnout.rollout.ledger_rows import VersionRow
from turnout.rollout.returning import ABANDONED, REMADE
from turnout.rollout.staleness import Fate, StalenessPolicy, Tokens, trained_tokens
from turnout.schedule.lag import LagGate


def version(step: int, root: str = "a") -> WeightVersion:
    return WeightVersion(0, step, root * 32)


def spanning(*steps: int, root: str = "a") -> RolloutGroup:
    """One member with a token of each version."""
    count = len(steps)
    spans = VersionSpans(tuple((1, version(step, root).label) for step in steps))
    engines = Runs().extended(count, "e")
    member = Trajectory((1,) * count, (-0.5,) * count, (1,) * count, spans, Finish.STOP, "", engines, 0, 1.0)
    return RolloutGroup("g7", 7, 0, Prompt("p", (1,), ""), (member,))


def tokens(group: RolloutGroup) -> dict[str, Tokens]:
    """As a batch of this group has them."""
    return {group.group_id: trained_tokens(group)}


def gate(max_lag: int, committed: range = range(7)) -> LagGate:
    """Version k was exported after k train steps."""
    made = LagGate(StalenessPolicy(max_lag), max_lag)
    for step in committed:
        made.committed(version(step), step)
    return made


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_asy_07_a_span_of_v3_to_v5_used_at_6_has_lag_3(max_lag: int) -> None:
    with pytest.raises(InvariantBroken, match=f"group g7 has lag 3, the schedule allows {max_lag}"):
        gate(max_lag).check(tokens(spanning(3, 4, 5)), 6)
    assert gate(3).check(tokens(spanning(3, 4, 5)), 6) == {"g7": 3}


@pytest.mark.parametrize(("max_lag", "accepted"), [(0, False), (1, True), (2, True)])
def test_asy_07_a_span_of_v5_to_v6_at_6_has_lag_1(max_lag: int, accepted: bool) -> None:
    if accepted:
        assert gate(max_lag).check(tokens(spanning(5, 6)), 6) == {"g7": 1}
        return
    with pytest.raises(InvariantBroken, match="lag 1"):
        gate(max_lag).check(tokens(spanning(5, 6)), 6)


def test_asy_07_lag_0_is_one_version_and_the_trainers() -> None:
    assert gate(0).check(tokens(spanning(6)), 6) == {"g7": 0}
    with pytest.raises(InvariantBroken):
        gate(0).check(tokens(spanning(5)), 6)


def test_the_largest_lag_of_a_group_counts_wherever_it_stands() -> None:
    for steps in ((4, 6, 5), (6, 4, 5), (5, 6, 4)):
        assert gate(5).check(tokens(spanning(*steps)), 6) == {"g7": 2}


def test_a_version_that_was_never_committed_does_not_train() -> None:
    with pytest.raises(InvariantBroken, match=r"group g7 holds tokens of .*v000009.*never published"):
        gate(100).check(tokens(spanning(6, 9)), 6)
    with pytest.raises(InvariantBroken, match="never published"):
        gate(100).check(tokens(spanning(6, root="b")), 6)


def test_the_counter_of_a_version_is_not_its_step() -> None:
    """After an aborted update the counter runs ahead of the train steps."""
    made = LagGate(StalenessPolicy(0), 0)
    made.committed(WeightVersion(0, 9, "a" * 32), 6)
    assert made.check(tokens(spanning(9)), 6) == {"g7": 0}


def test_a_group_of_empty_responses_has_no_lag() -> None:
    assert gate(0).check(tokens(spanning()), 6) == {"g7": 0}


def test_a_version_counts_from_its_commit_on_and_not_from_its_publication() -> None:
    made = gate(2)
    made.published(version(9), 6)
    assert [v.fate for v in made.judge([spanning(6, 9)], 6)] == [Fate.DROP]
    with pytest.raises(
        InvariantBroken, match="group g7 was to train: stale: made by a version that never became"
    ):
        made.check(tokens(spanning(6, 9)), 6)
    made.committed(version(9), 6)
    made.published(version(9), 6)  # said again, as after a resume
    assert made.check(tokens(spanning(6, 9)), 6) == {"g7": 0}


def test_an_abandoned_version_counts_once_its_weights_are_made_again() -> None:
    made = gate(2)
    root = version(9).root
    made.restore([VersionRow(version(9).label, 0, 9, root, 5, ABANDONED)])
    assert [v.fate for v in made.judge([spanning(6, 9)], 6)] == [Fate.DROP]
    made.published(WeightVersion(1, 10, root), 5)
    assert made.check(tokens(spanning(6, 9)), 6) == {"g7": 1}


def test_and_where_no_version_of_them_could_be_published_in_later_resumes_too() -> None:
    made = gate(2)
    label, root = version(9).label, version(9).root
    made.restore([VersionRow(label, 0, 9, root, 5, ABANDONED)])
    assert made.awaits(5) and not made.awaits(4)
    made.remade(5, root)
    assert not made.awaits(5)
    later = gate(2)
    later.restore([VersionRow(label, 0, 9, root, 5, REMADE)])
    assert made.check(tokens(spanning(6, 9)), 6) == later.check(tokens(spanning(6, 9)), 6) == {"g7": 1}


def test_with_a_lead_within_the_bound_a_verdict_contradicts_the_schedule() -> None:
    within = LagGate(StalenessPolicy(2), 1, {version(n).label: n for n in range(7)})
    assert within.check(tokens(spanning(5)), 6) == {"g7": 1}
    with pytest.raises(InvariantBroken, match="lag 2, the schedule allows 1"):
        within.judge([spanning(4)], 6)
    with pytest.raises(InvariantBroken, match="lag 2, the schedule allows 1"):
        within.check(tokens(spanning(4)), 6)


def test_with_a_lead_above_the_bound_what_is_judged_is_evicted_and_what_trains_is_checked() -> None:
    above = LagGate(StalenessPolicy(1), 4, {version(n).label: n for n in range(7)})
    assert [v.fate for v in above.judge([spanning(5), spanning(3)], 6)] == [Fate.KEEP, Fate.DROP]
    with pytest.raises(InvariantBroken, match="group g7 was to train: stale: lag 3, --max-staleness 1"):
        above.check(tokens(spanning(3)), 6)
    with pytest.raises(InvariantBroken, match="lag 5, the schedule allows 4"):
        above.judge([spanning(1)], 6)


def test_tokens_that_train_are_counted_by_lag() -> None:
    assert gate(3).count([trained_tokens(spanning(3, 5)), trained_tokens(spanning(5, 6))], 6) == {
        3: 1,
        1: 2,
        0: 1,
    }
    assert gate(3).lags(6)(spanning(3, 5).trajectories[0]) == (3, 1)
