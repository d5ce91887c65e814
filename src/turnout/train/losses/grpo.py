"""The clipped surrogate of PPO, per token: GRPO, Dr. GRPO, DAPO, REINFORCE++ and RLOO differ from it in clip range,
advantages and normalisation only.

With r = exp(logprob - old) and A the token's advantage:
    surrogate = max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A)
Schulman et al. 2017 (arXiv 1707.06347), with groups Shao et al. 2024 (arXiv 2402.03300); the higher upper clip is
DAPO's (arXiv 2503.14476).
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.train.losses.inputs import LossInputs, TokenSums
from turnout.train.losses.policy import Terms, policy_loss
from turnout.train.settings import LossSettings


def clipped(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """The surrogate for `ratio`, and where its clip binds; both [M]."""
    bounded = ratio.clamp(1.0 - settings.eps_clip, 1.0 + settings.eps_clip_high)
    plain, bound = -ratio * advantages, -bounded * advantages
    return torch.maximum(plain, bound), bound > plain


def _surrogate(terms: Terms, settings: LossSettings) -> tuple[Tensor, Tensor]:
    return clipped(terms.ratio, terms.advantages, settings)


def grpo_loss(
    logprobs: Tensor, entropy: Tensor, inputs: LossInputs, settings: LossSettings
) -> tuple[Tensor, TokenSums]:
    return policy_loss(logprobs, entropy, inputs, settings, _surrogate)
