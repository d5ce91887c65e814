from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.core.errors import TrainError
from turnout.core.types import ENVIRONMENT, Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.train.advantages import (
    build_samples,
    group_advantages,
    overlong_punishment,
    with_advantages,
    without_truncated,
)
from turnout.train.settings import AdvantageSettings, Overlong

STD = AdvantageSettings("mean", std=True)
PLAIN = AdvantageSettings("mean", std=False)
LEAVE_ONE_OUT = AdvantageSettings("leave_one_out", std=False)
NONE = AdvantageSettings("none", std=False)


def trajectory(reward: float | None, tokens: int = 2) -> Trajectory:
    spans = VersionSpans(((tokens, "v"),) if tokens else ())
    engines = Runs().extended(tokens, "e")
    return Trajectory(
        (7,) * tokens, (-1.0,) * tokens, (1,) * tokens, spans, Finish.STOP, "", engines, 0, reward
    )


def group(ordinal: int, *trajectories: Trajectory) -> RolloutGroup:
    return RolloutGroup(f"g{ordinal}", ordinal, 0, Prompt(f"p{ordinal}", (1, ordinal), ""), trajectories)


def test_mean_and_std_by_hand():
    assert group_advantages([1.0, 0.0, 0.0, 1.0], PLAIN) == [0.5, -0.5, -0.5, 0.5]
    std = math.sqrt(4 * 0.25 / 3)
    assert group_advantages([1.0, 0.0, 0.0, 1.0], STD) == pytest.approx(
        [0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std]
    )


@pytest.mark.parametrize("settings", [STD, PLAIN, LEAVE_ONE_OUT])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.3], [], [1e308] * 3, [0.1 + 0.2] * 11])
def test_no_difference_gives_exact_zeros(rewards, settings):
    assert group_advantages(rewards, settings) == [0.0] * len(rewards)


def test_the_smallest_difference_is_seen():
    low = group_advantages([0.0, 5e-324], STD)
    assert low[0] < 0 or low[1] > 0
    assert all(math.isfinite(v) for v in low)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_an_error(bad):
    with pytest.raises(TrainError, match=r"members \[1\]"):
        group_advantages([0.0, bad, 1.0], STD)


@given(st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=2, max_size=12))
def test_advantages_are_centred_and_of_unit_spread(rewards):
    values = group_advantages(rewards, STD)
    if max(rewards) == min(rewards):
        assert values == [0.0] * len(rewards)
        return
    spread = max(rewards) - min(rewards)
    noise = 1e-13 * max(map(abs, rewards)) / spread * len(rewards)
    assert sum(values) == pytest.approx(0.0, abs=1e-9 + 4 * noise)
    assert sum(v * v for v in values) / (len(values) - 1) == pytest.approx(1.0, rel=1e-9 + 4 * noise)


def test_samples_are_ordered_and_empty_responses_count_in_the_mean_and_train_nothing():
    late = group(5, trajectory(1.0), trajectory(0.0, tokens=0), trajectory(0.5))
    early = group(2, trajectory(0.25), trajectory(0.75, tokens=3))
    samples = build_samples([late, early], PLAIN)
    assert [s.group_id for s in samples] == ["g2", "g2", "g5", "g5", "g5"]
    assert [s.advantages for s in samples] == [(-0.25,) * 2, (0.25,) * 3, (0.5,) * 2, (), (0.0,) * 2]
    assert samples[2].prompt_ids == (1, 5) and [s.reward for s in samples] == [0.25, 0.75, 1.0, 0.0, 0.5]


def test_an_unscored_member_and_a_nan_name_the_group():
    with pytest.raises(TrainError, match=r"group g3: members \[1\] have no reward"):
        build_samples([group(3, trajectory(1.0), trajectory(None))], STD)
    with pytest.raises(TrainError, match="group g3"):
        build_samples([group(3, trajectory(1.0), trajectory(math.nan))], STD)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9))
def test_leaving_one_out_is_the_centred_reward_times_n_by_n_less_one(rewards):
    found = group_advantages(rewards, LEAVE_ONE_OUT)
    factor = len(rewards) / (len(rewards) - 1)
    assert found == pytest.approx([factor * v for v in group_advantages(rewards, PLAIN)], abs=1e-9)
    for index, value in enumerate(found):
        others = rewards[:index] + rewards[index + 1 :]
        assert value == pytest.approx(rewards[index] - sum(others) / len(others), abs=1e-9)


def test_without_std_dr_grpo_is_grpo_where_the_std_is_one():
    rewards = [0.0, math.sqrt(2.0)]  # sample standard deviation 1
    assert group_advantages(rewards, PLAIN) == pytest.approx(group_advantages(rewards, STD))


@pytest.mark.parametrize("settings", [STD, PLAIN, LEAVE_ONE_OUT])
def test_a_group_that_lost_members_has_the_baseline_of_those_it_has(settings):
    whole = [s.advantages for s in build_samples([group(1, *map(trajectory, (1.0, 0.0, 0.5)))], settings)]
    assert [v[0] for v in whole] == pytest.approx(group_advantages([1.0, 0.0, 0.5], settings))
    alone = build_samples([group(1, trajectory(1.0))], settings)
    assert alone[0].advantages == (0.0, 0.0)


def test_normalisation_is_over_the_trained_tokens_of_the_whole_batch():
    one = dataclasses.replace(trajectory(1.0, tokens=3), loss_mask=(1, 0, 1))
    groups = [group(1, one, trajectory(0.0)), group(2, trajectory(0.5, tokens=1), trajectory(-1.0))]
    settings = AdvantageSettings("none", std=False, normalize=True)
    found = [s.advantages for s in build_samples(groups, settings)]
    values = [1.0, 1.0, 0.0, 0.0, 0.5, -1.0, -1.0]
    mean = sum(values) / 7
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / 6)
    wanted = [(1.0,) * 3, (0.0,) * 2, (0.5,), (-1.0,) * 2]
    assert [list(f) for f in found] == [pytest.approx([(v - mean) / std for v in w]) for w in wanted]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
def test_a_batch_without_a_difference_normalises_to_exact_zeros(baseline):
    groups = [group(n, trajectory(0.1), trajectory(0.1)) for n in range(3)]
    samples = build_samples(groups, AdvantageSettings(baseline, std=False, normalize=True))
    assert {value for s in samples for value in s.advantages} == {0.0}
    masked = [dataclasses.replace(s, loss_mask=(0, 0)) for s in samples]
    assert with_advantages(masked, AdvantageSettings(normalize=True))[0].advantages == (0.0, 0.0)
    assert with_advantages([], AdvantageSettings(normalize=True)) == ()


def test_without_a_baseline_the_reward_is_discounted_from_the_last_trained_token_back():
    one = dataclasses.replace(trajectory(8.0, tokens=4), loss_mask=(1, 1, 1, 0))
    (sample,) = build_samples([group(1, one)], AdvantageSettings("none", gamma=0.5))
    assert sample.advantages == (2.0, 4.0, 8.0, 0.0)
    (plain,) = build_samples([group(1, one)], NONE)
    assert plain.advantages == (8.0,) * 4


def test_costs_lower_the_reward_before_the_baseline_or_each_return():
    group_of_two = group(1, trajectory(1.0), trajectory(0.0, tokens=3))
    samples = build_samples([group_of_two], PLAIN)
    costs = [np.array([0.1, 0.3]), np.array([0.0, 0.2, 0.0])]
    rewards = [1.0 - 0.4, 0.0 - 0.2]
    for settings in (PLAIN, LEAVE_ONE_OUT, STD):
        found = with_advantages(samples, settings, costs)
        assert [s.advantages[0] for s in found] == pytest.approx(group_advantages(rewards, settings))
    found = with_advantages(samples, NONE, costs)
    assert found[0].advantages == pytest.approx((1.0 - 0.4, 1.0 - 0.3))
    assert found[1].advantages == pytest.approx((-0.2, -0.2, 0.0))


def test_long_responses_lose_reward_linearly_up_to_the_limit():
    overlong = Overlong(limit=10, buffer=4, factor=2.0)
    assert [overlong_punishment(n, overlong) for n in (0, 6, 7, 8, 10, 11)] == [0, 0, 0.5, 1.0, 2.0, 2.0]
    groups = [group(1, trajectory(1.0, tokens=6), trajectory(1.0, tokens=8))]
    settings = AdvantageSettings(std=False, overlong=overlong)
    assert [s.advantages[0] for s in build_samples(groups, settings)] == [0.5, -0.5]


def test_truncated_responses_are_masked_and_stay_in_the_baseline():
    cut = dataclasses.replace(trajectory(0.0), finish=Finish.LENGTH)
    samples = build_samples([without_truncated(group(1, trajectory(1.0), cut))], PLAIN)
    assert [s.loss_mask for s in samples] == [(1, 1), (0, 0)]
    assert samples[0].advantages == (0.5, 0.5)


@pytest.mark.parametrize("same", [True, False])
def test_what_all_agents_of_a_group_began_with_is_computed_once_as_a_part_of_the_prompt(same):
    """An opening that only some share stays in the responses, masked; neither is punished for its length."""

    def opened(reward: float, *opening: int) -> Trajectory:
        n = len(opening)
        engines = Runs(((n, ENVIRONMENT), (2, "e")))
        return Trajectory(
            (*opening, 7, 7), (0.0,) * n + (-1.0,) * 2, (0,) * n + (1, 1), VersionSpans(((n + 2, "v"),)),
            Finish.STOP, "", engines, 0, reward,
        )  # fmt: skip

    members = opened(1.0, 8, 9), opened(0.0, 8, 9 if same else 10)
    settings = dataclasses.replace(PLAIN, overlong=Overlong(limit=4, buffer=1, factor=1.0))
    first, second = build_samples([group(1, *members)], settings, lambda t: (3,) * len(t.response_ids))
    assert [first.prompt_ids, second.prompt_ids] == [(1, 1, 8, 9) if same else (1, 1)] * 2
    assert first.response_ids == ((7, 7) if same else (8, 9, 7, 7)) and first.reward == 1.0
    assert first.loss_mask == ((1, 1) if same else (0, 0, 1, 1))
    sizes = {len(getattr(first, f)) for f in ("response_ids", "logprobs", "loss_mask", "lags", "advantages")}
    assert sizes == {2 if same else 4}
