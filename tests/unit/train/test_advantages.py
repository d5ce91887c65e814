from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.core.errors import TrainError
from turnout.core.types import Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.train.advantages import build_samples, group_advantages


def trajectory(reward: float | None, tokens: int = 2) -> Trajectory:
    spans = VersionSpans(((tokens, "v"),) if tokens else ())
    engines = Runs().extended(tokens, "e")
    return Trajectory(
        (7,) * tokens, (-1.0,) * tokens, (1,) * tokens, spans, Finish.STOP, "", engines, 0, reward
    )


def group(ordinal: int, *trajectories: Trajectory) -> RolloutGroup:
    return RolloutGroup(f"g{ordinal}", ordinal, 0, Prompt(f"p{ordinal}", (1, ordinal), ""), trajectories)


def test_mean_and_std_by_hand():
    assert group_advantages([1.0, 0.0, 0.0, 1.0], False) == [0.5, -0.5, -0.5, 0.5]
    std = math.sqrt(4 * 0.25 / 3)
    assert group_advantages([1.0, 0.0, 0.0, 1.0], True) == pytest.approx(
        [0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std]
    )


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.3], [], [1e308] * 3, [0.1 + 0.2] * 11])
def test_no_difference_gives_exact_zeros(rewards, normalize):
    assert group_advantages(rewards, normalize) == [0.0] * len(rewards)


def test_the_smallest_difference_is_seen():
    low = group_advantages([0.0, 5e-324], True)
    assert low[0] < 0 or low[1] > 0
    assert all(math.isfinite(v) for v in low)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_an_error(bad):
    with pytest.raises(TrainError, match=r"members \[1\]"):
        group_advantages([0.0, bad, 1.0], True)


@given(st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=2, max_size=12))
def test_advantages_are_centred_and_of_unit_spread(rewards):
    values = group_advantages(rewards, True)
    if max(rewards) == min(rewards):
        assert values == [0.0] * len(rewards)
        return
    spread = max(rewards) - min(rewards)
    noise = 1e-13 * max(map(abs, rewards)) / spread * len(rewards)
    assert sum(values) == pytest.approx(0.0, abs=1e-9 + 4 * noise)
    assert sum(v * v for v in values) / (len(values) - 1) == pytest.approx(1.0, rel=1e-9 + 4 * noise)


def test_samples_are_ordered_and_empty_responses_count_in_the_mean_only():
    late = group(5, trajectory(1.0), trajectory(0.0, tokens=0), trajectory(0.5))
    early = group(2, trajectory(0.25), trajectory(0.75, tokens=3))
    samples = build_samples([late, early], False)
    assert [s.group_id for s in samples] == ["g2", "g2", "g5", "g5"]
    assert [s.advantages for s in samples] == [(-0.25,) * 2, (0.25,) * 3, (0.5,) * 2, (0.0,) * 2]
    assert samples[2].prompt_ids == (1, 5)


def test_an_unscored_member_and_a_nan_name_the_group():
    with pytest.raises(TrainError, match=r"group g3: members \[1\] have no reward"):
        build_samples([group(3, trajectory(1.0), trajectory(None))], True)
    with pytest.raises(TrainError, match="group g3"):
        build_samples([group(3, trajectory(1.0), trajectory(math.nan))], True)
