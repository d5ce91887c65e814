"""The KL to the reference as a part of the reward (--kl-coef)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from turnout.core.types import TrainSample
from turnout.train.advantages import with_advantages
from turnout.train.gae import Doubles
from turnout.train.losses.kl import kl_estimate
from turnout.train.settings import AdvantageSettings


def reward_costs(
    samples: Sequence[TrainSample], policy: Sequence[NDArray[np.float32]], coef: float, kind: str
) -> list[Doubles]:
    """What each token of each sample costs of the reward: `coef` times an estimate of the KL of the policy before
    the train step, whose log-probs are `policy`, to the reference, whose log-probs the samples have; 0 where a
    token is masked."""
    return [
        coef
        * np.asarray(s.loss_mask, np.float64)
        * kl_estimate(torch.from_numpy(mine).double(), torch.tensor(s.reference).double(), kind).numpy()
        for s, mine in zip(samples, policy, strict=True)
    ]


def with_costs(
    batch: Sequence[TrainSample],
    trained: Sequence[TrainSample],
    costs: Sequence[Doubles],
    settings: AdvantageSettings,
) -> list[TrainSample]:
    """`trained`, the samples of `batch` that train, with the advantages of rewards less `costs`. The others of
    `batch` have a part in the baselines by their reward alone."""
    found = iter(zip(trained, costs, strict=True))
    everyone: list[TrainSample] = []
    everyones: list[Doubles] = []
    for sample in batch:
        one, cost = sample, np.zeros(len(sample.response_ids))
        if any(sample.loss_mask):
            one, cost = next(found)
        everyone.append(one)
        everyones.append(cost)
    return [s for s in with_advantages(everyone, settings, everyones) if any(s.loss_mask)]
