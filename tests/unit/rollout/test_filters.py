"""Which groups pass, and how a round ends when too few do (ROL-07, ROL-08)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from turnout.core.errors import NothingToTrain
from turnout.core.types import Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.rollout.filters import (
    BEST_OF_OTHERS,
    NO_VARIANCE,
    NOT_A_NUMBER,
    FilterPlan,
    FilterRound,
    no_variance,
)


def group(ordinal: int, *rewards: float) -> RolloutGroup:
    members = tuple(
        Trajectory((), (), (), VersionSpans(), Finish.STOP, "", Runs(), 0, value) for value in rewards
    )
    return RolloutGroup(f"g{ordinal}", ordinal, 0, Prompt(f"p{ordinal}", (1,), ""), members)


def round_of(otherwise: Any = "train", limit: int = 3, skips: int = 0) -> FilterRound:
    return FilterRound(FilterPlan(lambda g: no_variance(g.rewards), limit, otherwise, skips))


def judged(made: FilterRound, *groups: RolloutGroup, wanted: int = 2) -> list[tuple[str, str]]:
    """Judges them; the groups to drop at once, with their reasons."""
    return [(one.group_id, why) for g in groups for one, why in made.judge(g, wanted)[1]]


@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.3] * 6, [0.9] * 3, [1.0], []])
def test_rol_08_equal_rewards_have_no_variance_whatever_their_rounding(rewards: list[float]) -> None:
    assert no_variance(rewards) == NO_VARIANCE


def test_rol_08_any_difference_is_variance() -> None:
    assert no_variance([0.1] * 7 + [0.1001]) is None
    assert no_variance([0.1, math.nextafter(0.1, 1)]) is None


@pytest.mark.parametrize("rewards", [[1.0, math.nan], [math.nan, 1.0], [math.nan], [math.nan] * 3])
def test_rol_08_nan_is_a_reason_of_its_own(rewards: list[float]) -> None:
    assert no_variance(rewards) == NOT_A_NUMBER


def test_rol_07_a_round_is_full_after_its_limit() -> None:
    made = round_of()
    assert judged(made, group(0, 1, 1), group(1, 0, 1), group(2, 1, 1)) == [
        ("g0", NO_VARIANCE),
        ("g2", NO_VARIANCE),
    ]
    assert not made.full
    judged(made, group(3, 0, 0))
    assert made.full
    assert made.begin() == ()
    assert not made.full


def test_rol_07_train_takes_what_passed() -> None:
    made = round_of()
    judged(made, group(0, 0, 1), *(group(n, 1, 1) for n in (1, 2, 3)))
    got = made.settle(4, passed=1, wanted=2)
    assert (got.taken, got.dropped, got.skip) == ((), (), False)
    assert got.why == (
        "1 of 2 groups of the batch: 1 of 4 groups passed the filter, 3 were dropped: all rewards equal"
    )


def test_rol_07_nothing_passed_is_nothing_to_train() -> None:
    made = round_of()
    judged(made, *(group(n, 1, 1) for n in range(3)))
    with pytest.raises(
        NothingToTrain, match=r"rollout 4: 0 of 2 .*0 of 3 groups passed.*too easy or too hard"
    ):
        made.settle(4, passed=0, wanted=2)


def by_spread(made: RolloutGroup) -> str | None:
    """A filter that rejects all, as users may write them."""
    return "too short"


def test_rol_07_best_keeps_the_widest_spread_and_then_the_oldest() -> None:
    made = FilterRound(FilterPlan(by_spread, 5, "best"))
    told = judged(made, group(0, 1, 1), group(1, 0, 0.5), group(2, 0, 0), group(3, 0, 1), group(4, 0, 0.2))
    assert told == [
        ("g2", "too short"),
        ("g0", BEST_OF_OTHERS),
        ("g4", "too short"),
    ]
    got = made.settle(4, passed=1, wanted=2)
    assert [g.group_id for g in got.taken] == ["g3"]
    assert [g.group_id for g in got.dropped] == ["g1"]
    assert made.aside == ()


def test_rol_07_best_keeps_groups_of_equal_rewards_in_the_order_of_the_source() -> None:
    made = round_of("best", limit=3)
    judged(made, group(2, 1, 1), group(0, 0, 0), group(1, 1, 1))
    assert [g.group_id for g in made.settle(0, passed=0, wanted=2).taken] == ["g0", "g1"]


def test_rol_07_best_never_takes_a_group_with_nan() -> None:
    made = round_of("best", limit=1)
    assert judged(made, group(0, 1, math.nan)) == [("g0", NOT_A_NUMBER)]
    with pytest.raises(NothingToTrain):
        made.settle(0, passed=0, wanted=2)


def test_what_is_kept_aside_ends_with_the_round() -> None:
    made = round_of("best", limit=9)
    judged(made, group(0, 1, 1))
    assert [g.group_id for g in made.begin()] == ["g0"]
    assert made.begin() == ()


def test_rol_07_skip_begins_another_round_and_stops_in_the_end() -> None:
    made = round_of("skip", limit=1, skips=2)
    for _ in range(2):
        judged(made, group(0, 1, 1))
        assert made.full
        assert made.settle(0, passed=1, wanted=2).skip
        assert not made.full
    judged(made, group(0, 1, 1))
    with pytest.raises(NothingToTrain, match="2 rounds in a row were skipped"):
        made.settle(0, passed=1, wanted=2)


def test_rol_07_a_batch_between_ends_a_row_of_skips() -> None:
    made = round_of("skip", limit=1, skips=1)
    for _ in range(5):
        judged(made, group(0, 1, 1))
        assert made.settle(0, passed=0, wanted=2).skip
        made.begin()


def test_rol_07_stop_stops_though_some_passed() -> None:
    made = round_of("stop", limit=2)
    judged(made, group(0, 0, 1), group(1, 1, 1), group(2, 1, 1))
    with pytest.raises(
        NothingToTrain, match=r"1 of 3 groups passed.*2 were dropped: all rewards equal.*stop"
    ):
        made.settle(0, passed=1, wanted=2)


def test_rol_07_the_commonest_reason_is_told() -> None:
    made = round_of(limit=9)
    judged(made, group(0, 1, math.nan), group(1, 1, 1), group(2, 1, 1))
    assert "2 were dropped: all rewards equal" in made.told(0, 2)
