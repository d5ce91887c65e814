"""Advantages, and the trainer's samples made from scored groups. Python floats and numpy only, no torch.

    mean            reward - mean of the group (GRPO), divided by its sample standard deviation where `std`
    leave_one_out   reward - mean of the group's other members (RLOO, Ahmadian et al. 2024, arXiv 2402.14740)
    none            the reward itself, discounted by `gamma` per token from the last trained token back
                    (REINFORCE++, Hu et al. 2025, arXiv 2501.03262)
`normalize` then takes mean and standard deviation over all trained tokens of the batch away. What tokens cost (a KL
in the reward, turnout.train.reward_kl) lowers the reward by its sum; without a baseline each token bears its own,
so that a token's return has those from it on.

Promises: members of a group without a difference in reward get exactly 0 (decided by max == min, never by a
small standard deviation), and so do all tokens of a batch to be normalised; a member alone in its group has no
baseline and gets 0. Baselines are over the members that there are; an empty response counts in them and trains
nothing. The order of samples depends only on the groups' ordinals and the members' places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import TrainError
from turnout.core.types import Finish, RolloutGroup, TrainSample, Trajectory, but
from turnout.train.gae import Doubles, gae, terminal_rewards
from turnout.train.own import own_advantages
from turnout.train.settings import AdvantageSettings, Overlong

Lags = Callable[[Trajectory], tuple[int, ...]]


def no_lags(_: Trajectory) -> tuple[int, ...]:
    """Every token was made by the weights that it trains."""
    return ()


def group_advantages(rewards_G: Sequence[float], settings: AdvantageSettings) -> list[float]:
    """The rewards of one group less the baseline.

    Raises TrainError for a NaN or infinite reward.
    """
    rewards = [float(reward) for reward in rewards_G]
    if not all(map(math.isfinite, rewards)):
        broken = [index for index, reward in enumerate(rewards) if not math.isfinite(reward)]
        raise TrainError(f"rewards of members {broken} are not finite: {[rewards[i] for i in broken]}")
    if settings.baseline == "none":
        return rewards
    if not rewards or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean, count = math.fsum(rewards) / len(rewards), len(rewards)
    centred = [reward - mean for reward in rewards]
    if settings.baseline == "leave_one_out":  # reward - (sum - reward) / (n - 1)
        return [value * count / (count - 1) for value in centred]
    if not settings.std:
        return centred
    # The difference is exact to a rounding, so a spread near the smallest float can not become a division by 0.
    scale = max(map(abs, centred))
    std = scale * math.sqrt(math.fsum([(value / scale) ** 2 for value in centred]) / (count - 1))
    return [value / std for value in centred]


def overlong_punishment(tokens: int, overlong: Overlong) -> float:
    """What a response of so many tokens loses of its reward: from 0 at `limit` - `buffer` linearly to `factor` at
    `limit`. Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13)."""
    over = tokens - (overlong.limit - overlong.buffer)
    return overlong.factor * min(max(over / overlong.buffer, 0.0), 1.0)


def without_truncated(group: RolloutGroup) -> RolloutGroup:
    """The group with responses masked that were cut at their limit (overlong filtering, DAPO): they stay in
    baselines and don't train."""
    masked = [
        but(t, loss_mask=(0,) * len(t.response_ids)) if t.finish is Finish.LENGTH else t
        for t in group.trajectories
    ]
    return but(group, trajectories=tuple(masked))


def build_samples(
    groups: Sequence[RolloutGroup], settings: AdvantageSettings, lags: Lags = no_lags
) -> tuple[TrainSample, ...]:
    """Samples of all members of all groups, ordered by group ordinal and member, with reward and advantages. `lags`
    tells the age of each token of a trajectory.

    Raises TrainError, naming the group and the members, where a member has no reward, or none that is finite.
    """
    samples: list[TrainSample] = []
    for group in sorted(groups, key=lambda g: g.ordinal):
        samples += _samples(group, settings, lags)
    return tuple(samples) if _one_number(settings) else with_advantages(samples, settings)


def _one_number(settings: AdvantageSettings) -> bool:
    """Whether all tokens of a response have its advantage, which follows from its group alone."""
    shaped = settings.baseline == "none" and settings.gamma < 1
    return settings.function is None and not settings.normalize and not shaped


def _shared_opening(group: RolloutGroup) -> int:
    """Tokens that all responses begin with and no model made: they are a part of the prompt, computed once."""
    members = group.trajectories
    if not members or not members[0].opening:
        return 0
    count = min(t.opening for t in members)
    first = members[0].response_ids[:count]
    return count if all(t.response_ids[:count] == first for t in members) else 0


def _samples(group: RolloutGroup, settings: AdvantageSettings, lags: Lags) -> list[TrainSample]:
    """Those of one group; with advantages where they follow from it alone."""
    name, rewards = group.group_id, _rewards(group, settings.overlong)
    values = _relative(name, rewards, settings) if _one_number(settings) else None
    shared, before = _shared_opening(group), group.prompt.token_ids
    prompt = before + group.trajectories[0].response_ids[:shared] if shared else before
    samples: list[TrainSample] = []
    for at, t in enumerate(group.trajectories):
        ids = t.response_ids[shared:]
        samples.append(
            TrainSample(
                name,
                prompt,
                ids,
                t.logprobs[shared:],
                t.loss_mask[shared:],
                () if values is None else (values[at],) * len(ids),
                lags(t)[shared:],
                reward=rewards[at],
                routed=t.routed.sequence(len(before)) if t.routed.width else b"",
            )
        )
    return samples


def _rewards(group: RolloutGroup, overlong: Overlong | None) -> list[float]:
    """Of all members, less what their length costs."""
    rewards = group.rewards
    if len(rewards) < len(group.trajectories):
        unscored = [index for index, t in enumerate(group.trajectories) if t.reward is None]
        raise TrainError(f"group {group.group_id}: members {unscored} have no reward")
    if overlong is None:
        return rewards
    counts = [len(t.response_ids) - t.opening for t in group.trajectories]
    return [reward - overlong_punishment(count, overlong) for reward, count in zip(rewards, counts)]


def _relative(group_id: str, rewards: Sequence[float], settings: AdvantageSettings) -> list[float]:
    """As `group_advantages`; an error names the group."""
    try:
        return group_advantages(rewards, settings)
    except TrainError as fault:
        raise TrainError(f"group {group_id}: {fault}") from None


def with_advantages(
    samples: Sequence[TrainSample], settings: AdvantageSettings, costs: Sequence[Doubles] = ()
) -> tuple[TrainSample, ...]:
    """The samples, all members of their groups, with the advantages of their rewards. `costs`, where they are
    given, are what each token of each sample costs of the reward, 0 where it doesn't train.

    Raises TrainError, naming the group and the members, for a reward that is not finite.
    """
    totals = [s.reward for s in samples]
    if costs and (settings.baseline != "none" or settings.function is not None):
        totals = [total - float(cost.sum()) for total, cost in zip(totals, costs)]
    if settings.function is not None:
        own = own_advantages(settings.function, [but(s, reward=t) for s, t in zip(samples, totals)])
        return _with(samples, own, settings)
    members: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        members.setdefault(sample.group_id, []).append(index)
    for name, places in members.items():
        found = _relative(name, [totals[place] for place in places], settings)
        for place, value in zip(places, found):
            totals[place] = value
    if _one_number(settings) and (settings.baseline != "none" or not costs):
        return tuple(
            but(s, advantages=(float(total),) * len(s.response_ids)) for s, total in zip(samples, totals)
        )
    values = [np.full(len(s.response_ids), total) for s, total in zip(samples, totals)]
    if settings.baseline == "none" and (costs or settings.gamma < 1):
        costs = costs or [np.zeros(len(s.response_ids)) for s in samples]
        values = [_returns(s, cost, settings.gamma) for s, cost in zip(samples, costs)]
    return _with(samples, values, settings)


def _with(
    samples: Sequence[TrainSample], values: list[Doubles], settings: AdvantageSettings
) -> tuple[TrainSample, ...]:
    if settings.normalize:
        values = normalized(values, [np.asarray(s.loss_mask, bool) for s in samples])
    return tuple(but(s, advantages=tuple(v.tolist())) for s, v in zip(samples, values))


def _returns(sample: TrainSample, costs_T: Doubles, gamma: float) -> Doubles:
    """Discounted sums of what comes from each trained token on: its cost, and with the last one the reward."""
    returns, trained = np.zeros(len(costs_T)), np.flatnonzero(sample.loss_mask)
    rewards = terminal_rewards(sample.reward, sample.loss_mask) - costs_T
    returns[trained] = gae(rewards[trained], np.zeros(len(trained)), gamma, 1.0)[0]
    return returns


def normalized(values: list[Doubles], trained: list[NDArray[np.bool_]]) -> list[Doubles]:
    """Less the mean of all trained tokens, divided by their sample standard deviation; 0 where there is none."""
    flat = np.concatenate([v[mask] for v, mask in zip(values, trained)] or [np.zeros(0)])
    if not len(flat) or flat.max() == flat.min():
        return [np.zeros(len(v)) for v in values]
    mean, std = flat.mean(), flat.std(ddof=1)
    return [(v - mean) / std for v in values]
