"""GRPO: the clipped policy-gradient objective with advantages per token and an optional KL to a reference.

Per token, with r = exp(logprob - old), A its advantage and w its importance weight (turnout.train.off_policy):
    policy = w max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A)
    loss   = sum over tokens of weight * (policy + kl_coef * kl)
The weights of one optimizer step sum to 1 (turnout.train.losses.weights), so neither the packing nor the
size of a micro-batch changes the gradient. Shao et al. 2024 (arXiv 2402.03300); the higher upper clip is
DAPO's (arXiv 2503.14476).

Legend: M tokens of one micro-batch; all tensors fp32 [M].
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.train.off_policy import importance, interpolated
from turnout.train.settings import LossSettings


@dataclass(frozen=True)
class LossInputs:
    """`old` None means the detached log-probs of this forward pass; `behaviour` are the engine's. `sample` int64
    numbers the response that a token belongs to, `lags` is the age of its version in train steps."""

    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    sample: Tensor
    lags: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True)
class TokenSums:
    """Statistics of the tokens of one or more micro-batches, as sums, so that they can be added. `units` are what
    importance weights are given to, tokens or sequences; `importance` and its square are sums over them, before
    truncation and masking; `weight` and `bounded` are of tokens, after it."""

    tokens: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    approx_kl: float = 0.0
    reference_kl: float = 0.0
    mismatch: float = 0.0
    mismatch_k3: float = 0.0
    weight: float = 0.0
    bounded: float = 0.0
    units: float = 0.0
    importance: float = 0.0
    importance_square: float = 0.0
    mismatch_max: float = 0.0
    weight_max: float = 0.0

    def __add__(self, other: TokenSums) -> TokenSums:
        mine, others = vars(self), vars(other)
        return TokenSums(
            **{n: (max if n.endswith("_max") else operator.add)(mine[n], others[n]) for n in mine}
        )

    def mean(self, name: str) -> float:
        return vars(self)[name] / self.tokens if self.tokens else 0.0

    @property
    def effective_sample_share(self) -> float:
        """(sum of w)^2 / (N * sum of w^2) in (0, 1] over the N units' weights w before truncation; 1 without any.
        Kish's effective sample size; arXiv 2602.17616 uses it to foresee a collapse."""
        square = self.units * self.importance_square
        return self.importance**2 / square if square else 1.0


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Per token estimate of KL(policy || reference) from the policy's samples (Schulman's k1, k2, k3)."""
    difference = logprobs - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    return torch.exp(-difference) - 1.0 + difference


def grpo_loss(
    logprobs: Tensor, entropy: Tensor, inputs: LossInputs, settings: LossSettings
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
    ratio = torch.exp(logprobs - old)
    bounded = ratio.clamp(1.0 - settings.eps_clip, 1.0 + settings.eps_clip_high)
    plain, clipped = -ratio * inputs.advantages, -bounded * inputs.advantages
    per_token = corrected.weights * torch.maximum(plain, clipped)
    kl = torch.zeros_like(per_token)
    if inputs.reference is not None:
        kl = kl_estimate(logprobs, inputs.reference, settings.kl_kind)
        if settings.kl_coef:
            per_token = per_token + settings.kl_coef * kl
    loss = (per_token * inputs.weights).sum()
    with torch.no_grad():
        columns = [
            torch.ones_like(gap),
            entropy,
            (clipped > plain).float(),
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
