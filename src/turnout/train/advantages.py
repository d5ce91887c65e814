"""Advantages by group, and the trainer's samples made from scored groups. float64 and Python only, no torch.

Promises: members of a group without a difference in reward get exactly 0 (decided by max == min, never by a
small standard deviation); an empty response counts in its group's mean and trains nothing; the order of
samples depends only on the groups' ordinals and the members' places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from turnout.core.errors import TrainError
from turnout.core.types import RolloutGroup, TrainSample, Trajectory

Lags = Callable[[Trajectory], tuple[int, ...]]


def no_lags(_: Trajectory) -> tuple[int, ...]:
    """Every token was made by the weights that it trains."""
    return ()


def group_advantages(rewards_G: Sequence[float], normalize_std: bool) -> list[float]:
    """reward - group mean, divided by the group's sample standard deviation where `normalize_std`.

    A group of one, or with equal rewards, gives exact zeros. Raises TrainError for a NaN or infinite reward.
    """
    rewards = [float(reward) for reward in rewards_G]
    broken = [index for index, reward in enumerate(rewards) if not math.isfinite(reward)]
    if broken:
        raise TrainError(f"rewards of members {broken} are not finite: {[rewards[i] for i in broken]}")
    if not rewards or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    # The difference is exact to a rounding, so a spread near the smallest float can not become a division by 0.
    scale = max(abs(value) for value in centred)
    std = scale * math.sqrt(math.fsum((value / scale) ** 2 for value in centred) / (len(rewards) - 1))
    return [value / std for value in centred]


def build_samples(
    groups: Sequence[RolloutGroup], normalize_std: bool, lags: Lags = no_lags
) -> tuple[TrainSample, ...]:
    """Samples of all groups, ordered by group ordinal and member; empty responses are left out. `lags` tells the
    age of each token of a trajectory.

    Raises TrainError, naming the group and the members, where a member has no reward.
    """
    samples: list[TrainSample] = []
    for group in sorted(groups, key=lambda g: g.ordinal):
        unscored = [index for index, t in enumerate(group.trajectories) if t.reward is None]
        if unscored:
            raise TrainError(f"group {group.group_id}: members {unscored} have no reward")
        try:
            advantages = group_advantages(group.rewards, normalize_std)
        except TrainError as fault:
            raise TrainError(f"group {group.group_id}: {fault}") from None
        samples += [
            TrainSample(
                group_id=group.group_id,
                prompt_ids=group.prompt.token_ids,
                response_ids=t.response_ids,
                logprobs=t.logprobs,
                loss_mask=t.loss_mask,
                advantages=(advantage,) * len(t.response_ids),
                lags=lags(t),
                reward=reward,
            )
            for t, advantage, reward in zip(group.trajectories, advantages, group.rewards, strict=True)
            if t.response_ids
        ]
    return tuple(samples)
