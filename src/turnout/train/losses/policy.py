"""What all policy-gradient losses share: the off-policy weight, the KL to a reference, the statistics.

Per token, with w its importance weight (turnout.train.off_policy) and the surrogate of the algorithm:
    loss = sum over tokens of weight * (w surrogate + kl_coef * kl - entropy_coef * entropy)
The weights of one optimizer step (turnout.train.losses.weights) depend on all of its samples and not on packing, so
neither the packing nor the size of a micro-batch changes the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.train.losses.inputs import LossInputs, TokenSums, sample_means
from turnout.train.losses.kl import kl_estimate
from turnout.train.off_policy import Importance, importance, interpolated
from turnout.train.settings import LossSettings


@dataclass(frozen=True)
class Terms:
    """What a surrogate is made of, [M] each; only `logprobs` and `ratio` = exp(logprobs - old) carry a gradient."""

    logprobs: Tensor
    old: Tensor
    ratio: Tensor
    advantages: Tensor
    sample: Tensor


# The loss of each token, with gradient, and whether its clip binds; both [M].
Surrogate = Callable[[Terms, LossSettings], tuple[Tensor, Tensor]]


def policy_loss(
    logprobs: Tensor, entropy: Tensor, inputs: LossInputs, settings: LossSettings, surrogate: Surrogate
) -> tuple[Tensor, TokenSums]:
    """The micro-batch's part of the loss (a scalar with gradient) and its statistics."""
    off = settings.off_policy
    start = logprobs.detach() if inputs.old is None else inputs.old
    old = inputs.behaviour if off.rollout_logprobs else start
    if off.interpolates:
        old = interpolated(inputs.behaviour, logprobs, inputs.lags)
    gap = start - inputs.behaviour
    with torch.no_grad():
        corrected = importance(old - inputs.behaviour if off.interpolates else gap, inputs.sample, off)
        if settings.opsm_delta is not None:
            corrected = _without_diverged(corrected, logprobs, inputs, settings.opsm_delta)
    ratio = torch.exp(logprobs - old)
    policy, clipped = surrogate(Terms(logprobs, old, ratio, inputs.advantages, inputs.sample), settings)
    per_token = corrected.weights * policy
    kl = torch.zeros_like(per_token)
    if inputs.reference is not None:
        kl = kl_estimate(logprobs, inputs.reference, settings.kl_kind)
        if settings.unbiased_kl:
            kl = ratio * kl
        if settings.kl_coef:
            per_token = per_token + settings.kl_coef * kl
    if settings.entropy_coef:
        per_token = per_token - settings.entropy_coef * entropy
    loss = (per_token * inputs.weights).sum()
    with torch.no_grad():
        columns = [
            torch.ones_like(gap),
            entropy,
            clipped.float(),
            ratio,
            ratio - 1.0 - (logprobs - old),
            kl,
            gap.abs(),
            torch.exp(gap) - 1.0 - gap,
            corrected.weights,
            corrected.bounded.float(),
        ]
        sums = torch.stack(columns).double().sum(1).tolist()
        units = corrected.units.double()
    return loss, TokenSums(
        *sums,
        units=len(units),
        importance=float(units.sum()),
        importance_square=float((units**2).sum()),
        mismatch_max=float(gap.abs().max()) if len(gap) else 0.0,
        weight_max=float(corrected.weights.max()) if len(gap) else 0.0,
    )


def _without_diverged(
    corrected: Importance, logprobs: Tensor, inputs: LossInputs, delta: float
) -> Importance:
    """Weight 0 where the advantage is negative and the response has moved away from the policy that made it: mean
    of behaviour - logprob over it above `delta`. Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556)."""
    away = sample_means(inputs.behaviour - logprobs, inputs.sample) > delta
    masked = away & (inputs.advantages < 0)
    weights = corrected.weights.masked_fill(masked, 0.0)
    return Importance(weights, corrected.units, corrected.bounded | masked)
