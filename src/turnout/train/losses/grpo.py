"""GRPO: the clipped policy-gradient objective with advantages per token and an optional KL to a reference.

Per token, with r = exp(logprob - old) and A its advantage:
    policy = max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A)
    loss   = sum over tokens of weight * (policy + kl_coef * kl)
The weights of one optimizer step sum to 1 (turnout.train.losses.weights), so neither the packing nor the
size of a micro-batch changes the gradient. Shao et al. 2024 (arXiv 2402.03300); the higher upper clip is
DAPO's (arXiv 2503.14476).

Legend: M tokens of one micro-batch; all tensors fp32 [M].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.train.settings import LossSettings


@dataclass(frozen=True)
class LossInputs:
    """`old` None means the detached log-probs of this forward pass; `behaviour` are the engine's."""

    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True)
class TokenSums:
    """Statistics of the tokens of one or more micro-batches, as sums, so that they can be added."""

    tokens: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    approx_kl: float = 0.0
    reference_kl: float = 0.0
    mismatch: float = 0.0
    mismatch_k3: float = 0.0
    importance: float = 0.0
    importance_square: float = 0.0
    mismatch_max: float = 0.0

    def __add__(self, other: TokenSums) -> TokenSums:
        mine, others = vars(self), vars(other)
        sums = {name: mine[name] + others[name] for name in mine if name != "mismatch_max"}
        return TokenSums(**sums, mismatch_max=max(self.mismatch_max, other.mismatch_max))

    def mean(self, name: str) -> float:
        return vars(self)[name] / self.tokens if self.tokens else 0.0

    @property
    def effective_sample_share(self) -> float:
        """(sum of w)^2 / (tokens * sum of w^2) in (0, 1], w = exp(old - behaviour); 1 without tokens."""
        square = self.tokens * self.importance_square
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
    old = logprobs.detach() if inputs.old is None else inputs.old
    ratio = torch.exp(logprobs - old)
    bounded = ratio.clamp(1.0 - settings.eps_clip, 1.0 + settings.eps_clip_high)
    plain, clipped = -ratio * inputs.advantages, -bounded * inputs.advantages
    per_token = torch.maximum(plain, clipped)
    kl = torch.zeros_like(per_token)
    if inputs.reference is not None:
        kl = kl_estimate(logprobs, inputs.reference, settings.kl_kind)
        if settings.kl_coef:
            per_token = per_token + settings.kl_coef * kl
    loss = (per_token * inputs.weights).sum()
    with torch.no_grad():
        gap = old - inputs.behaviour
        importance = torch.exp(gap)
        columns = [
            torch.ones_like(gap),
            entropy,
            (clipped > plain).float(),
            ratio,
            ratio - 1.0 - (logprobs - old),
            kl,
            gap.abs(),
            importance - 1.0 - gap,
            importance,
            importance**2,
        ]
        sums = torch.stack(columns).double().sum(1).tolist()
        worst = float(gap.abs().max()) if gap.numel() else 0.0
    return loss, TokenSums(*sums, mismatch_max=worst)
