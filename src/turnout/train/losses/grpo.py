"""The clipped surrogate of PPO, per token: GRPO, Dr. GRPO, DAPO, REINFORCE++ and RLOO differ from it in clip range,
advantages and normalisation only.

With r = exp(logprob - old) and A the token's advantage:
    surrogate = max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A), and where A < 0 at most -eps_clip_c A
Schulman et al. 2017 (arXiv 1707.06347), with groups Shao et al. 2024 (arXiv 2402.03300); the higher upper clip is
DAPO's (arXiv 2503.14476), the dual clip Ye et al.'s (arXiv 1912.09729).
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.train.losses.inputs import LossInputs, TokenSums
from turnout.train.losses.policy import Terms, policy_loss
from turnout.train.settings import LossSettings


def clipped(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """The surrogate for `ratio`, and where a clip binds; both [M]."""
    bounded = ratio.clamp(1.0 - settings.eps_clip, 1.0 + settings.eps_clip_high)
    plain, bound = -ratio * advantages, -bounded * advantages
    surrogate, binds = torch.maximum(plain, bound), bound > plain
    if settings.eps_clip_c is None:
        return surrogate, binds
    most = -settings.eps_clip_c * advantages
    beyond = (advantages < 0) & (most < surrogate)
    return torch.where(beyond, most, surrogate), binds | beyond


def _surrogate(terms: Terms, settings: LossSettings) -> tuple[Tensor, Tensor]:
    return clipped(terms.ratio, terms.advantages, settings)


def grpo_loss(
    logprobs: Tensor, entropy: Tensor, inputs: LossInputs, settings: LossSettings
) -> tuple[Tensor, TokenSums]:
    return policy_loss(logprobs, entropy, inputs, settings, _surrogate)
