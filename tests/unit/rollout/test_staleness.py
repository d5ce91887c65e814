"""Verdicts on old tokens: by hand, and on random groups against the definition written out token by token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from turnout.core.errors import InvariantBroken
from turnout.core.types import Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.rollout.staleness import (
    MAX_ATTEMPTS,
    Fate,
    StalenessPolicy,
    judge,
    token_lags,
    trained_lags,
    trained_tokens,
)

EXPORTED = {f"v{step:06d}-{step:016x}": step for step in range(8)}
LABELS = list(EXPORTED)


def trajectory(spans: VersionSpans, reward: float, mask: tuple[int, ...] | None) -> Trajectory:
    count = len(spans)
    engines = Runs(((count, "e"),)) if count else Runs()
    ones = (1,) * count if mask is None else mask
    return Trajectory((1,) * count, (-0.5,) * count, ones, spans, Finish.STOP, "", engines, 0, reward)


def member(*runs: tuple[int, int], mask: tuple[int, ...] | None = None, reward: float = 1.0) -> Trajectory:
    """Runs of (tokens, export step); the mask is all ones where none is given."""
    spans = VersionSpans()
    for tokens, step in runs:
        spans = spans.extended(tokens, LABELS[step])
    return trajectory(spans, reward, mask)


def group(*members: Trajectory) -> RolloutGroup:
    return RolloutGroup("g00000003.0", 3, 0, Prompt("p", (1,), ""), members)


def policy(over: Fate, share: float = 0.5, bound: int = 1) -> StalenessPolicy:
    return StalenessPolicy(bound, over, share)


def test_asy_07_lag_counts_train_steps_since_the_export() -> None:
    """v3 to v5 used at 6: the first token is 3 steps old; an unpublished step counts as any other."""
    assert token_lags(member((1, 3), (2, 4), (1, 5)), EXPORTED, 6) == (3, 2, 2, 1)
    every_second = {LABELS[0]: 0, LABELS[1]: 2}  # --update-weights-interval 2
    assert token_lags(member((1, 0), (1, 1)), every_second, 3) == (3, 1)


def test_tokens_that_train_are_counted_by_version_and_no_other_version_is_named() -> None:
    first, second = member((2, 1), (1, 2), mask=(0, 0, 1)), member((1, 3), mask=(0,))
    third = member((3, 2), mask=(1, 0, 1))
    assert trained_tokens(group(first, second, third, member())) == {LABELS[2]: 3}


@pytest.mark.parametrize("over", [Fate.DROP, Fate.REPLAY, Fate.MASK])
def test_within_the_bound_every_policy_keeps_the_very_group(over: Fate) -> None:
    whole = group(member((2, 4), (2, 5)), member((3, 5)))
    verdict = judge(whole, EXPORTED, 5, policy(over))
    assert verdict.fate is Fate.KEEP and verdict.group is whole and verdict.lag == 1
    assert not verdict.evicted and verdict.masked == 0


@pytest.mark.parametrize("over", [Fate.DROP, Fate.REPLAY])
def test_one_old_token_evicts_the_whole_group_with_the_lag_that_decided(over: Fate) -> None:
    verdict = judge(group(member((4, 5)), member((1, 3), (9, 5))), EXPORTED, 5, policy(over))
    assert (verdict.fate, verdict.lag, verdict.evicted) == (over, 2, True)
    assert verdict.reason == "stale: lag 2, --max-staleness 1"


def test_a_prompt_is_not_sampled_anew_for_ever() -> None:
    old = group(member((1, 3)))
    fates = [judge(replace(old, attempt=n), EXPORTED, 5, policy(Fate.REPLAY)) for n in range(MAX_ATTEMPTS)]
    assert [v.fate for v in fates] == [Fate.REPLAY] * 7 + [Fate.DROP]
    assert fates[-1].reason == "stale: lag 2, --max-staleness 1, in attempt 8"


def test_mask_takes_the_loss_of_the_old_tokens_and_nothing_else() -> None:
    old, young = member((1, 3), (3, 5), reward=0.25), member((4, 5), reward=0.75)
    verdict = judge(group(old, young), EXPORTED, 5, policy(Fate.MASK))
    assert (verdict.fate, verdict.lag, verdict.masked, verdict.evicted) == (Fate.MASK, 2, 1, False)
    first, second = verdict.group.trajectories
    assert first == replace(old, loss_mask=(0, 1, 1, 1)) and second is young
    assert verdict.group.rewards == [0.25, 0.75]  # the baseline stays
    assert trained_lags([trained_tokens(verdict.group)], EXPORTED, 5) == {0: 7}


@pytest.mark.parametrize(("share", "left"), [(0.25, 1), (0.26, 0)])
def test_with_too_little_left_a_member_trains_nothing_and_keeps_its_reward(share: float, left: int) -> None:
    old = member((3, 2), (1, 5), reward=0.25)
    verdict = judge(group(old, member((4, 5))), EXPORTED, 5, policy(Fate.MASK, share))
    assert sum(verdict.group.trajectories[0].loss_mask) == left
    assert verdict.masked == 4 - left and verdict.group.rewards == [0.25, 1.0]


def test_the_share_is_of_what_could_train_before() -> None:
    old = member((2, 2), (2, 5), mask=(1, 0, 1, 0))
    verdict = judge(group(old, member((1, 5))), EXPORTED, 5, policy(Fate.MASK, 0.5))
    assert verdict.group.trajectories[0].loss_mask == (0, 0, 1, 0) and verdict.masked == 1


def test_a_group_of_which_nothing_is_left_is_dropped() -> None:
    verdict = judge(group(member((4, 1)), member((2, 2), (1, 5))), EXPORTED, 5, policy(Fate.MASK))
    assert verdict.fate is Fate.DROP and verdict.evicted
    assert verdict.reason == "stale: no token is left, lag 4, --max-staleness 1"


def test_a_masked_token_is_not_judged_whatever_made_it() -> None:
    """As the old part under --mask-offpolicy-in-partial-rollout, or tokens of a version that was abandoned."""
    foreign = VersionSpans(((1, "v000009-ffffffffffffffff"), (2, LABELS[5])))
    hidden = trajectory(foreign, 1.0, (0, 1, 1))
    verdict = judge(group(hidden, member((1, 1), (1, 5), mask=(0, 1))), EXPORTED, 5, policy(Fate.DROP))
    assert verdict.fate is Fate.KEEP and verdict.lag == 0
    with pytest.raises(
        InvariantBroken, match=r"group g00000003\.0 holds tokens of v000009-f+, never published"
    ):
        judge(group(trajectory(foreign, 1.0, None)), EXPORTED, 5, policy(Fate.DROP))


@pytest.mark.parametrize("over", [Fate.DROP, Fate.REPLAY, Fate.MASK])
def test_tokens_of_a_version_that_never_became_current_are_over_every_bound(over: Fate) -> None:
    """One engine put it into place, another could not: the update failed, what the first one made never trains."""
    exported = {**EXPORTED, "v000008-aborted": None}
    spans = VersionSpans(((3, LABELS[5]), (1, "v000008-aborted")))
    verdict = judge(group(trajectory(spans, 1.0, None)), exported, 5, policy(over, bound=1000))
    if over is Fate.MASK:
        assert verdict.group.trajectories[0].loss_mask == (1, 1, 1, 0)
        assert trained_lags([trained_tokens(verdict.group)], exported, 5) == {0: 3}
    else:
        assert (verdict.fate, verdict.reason) == (over, "stale: made by a version that never became current")


def test_empty_responses_have_no_age() -> None:
    """ROL-20"""
    empty = group(member(), member())
    assert judge(empty, EXPORTED, 7, policy(Fate.DROP)).fate is Fate.KEEP
    assert judge(group(member(), member((2, 1))), EXPORTED, 7, policy(Fate.MASK)).fate is Fate.DROP


@pytest.mark.parametrize("seed", range(200))
def test_random_groups_by_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    members = []
    for _ in range(rng.randint(1, 4)):
        runs = sorted(rng.randint(0, 6) for _ in range(rng.randint(0, 3)))
        made = member(*((rng.randint(1, 4), step) for step in runs))
        members.append(replace(made, loss_mask=tuple(int(rng.random() < 0.8) for _ in made.loss_mask)))
    bound, share, over = rng.randint(0, 4), rng.choice([0.0, 0.3, 0.5, 1.0]), rng.choice(list(Fate)[1:])
    verdict = judge(group(*members), EXPORTED, 6, policy(over, share, bound))
    ages = [[6 - EXPORTED[label] for n, label in m.spans.runs for _ in range(n)] for m in members]
    trainable = [a for m, age in zip(members, ages) for a, on in zip(age, m.loss_mask) if on]
    assert verdict.lag == max(trainable, default=0)
    if max(trainable, default=0) <= bound:
        assert verdict.fate is Fate.KEEP
        return
    if over is not Fate.MASK:
        assert verdict.fate is over
        return
    masks = []
    for m, age in zip(members, ages):
        left = [int(on and a <= bound) for on, a in zip(m.loss_mask, age)]
        masks.append(tuple(left) if sum(left) >= share * sum(m.loss_mask) else (0,) * len(left))
    if not any(map(any, masks)):
        assert verdict.fate is Fate.DROP
        return
    assert verdict.fate is Fate.MASK
    assert [m.loss_mask for m in verdict.group.trajectories] == masks
    assert verdict.masked == len(trainable) - sum(map(sum, masks))
    assert max(trained_lags([trained_tokens(verdict.group)], EXPORTED, 6), default=0) <= bound
