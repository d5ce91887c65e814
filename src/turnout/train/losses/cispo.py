"""CISPO: REINFORCE with the ratio as a clipped weight, so that no token loses its gradient (MiniMax 2025,
arXiv 2506.13585).

    surrogate = -stop_gradient(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A logprob
A token outside the clip still pushes its log-prob, by the bound.
"""

from __future__ import annotations

from torch import Tensor

from turnout.train.losses.inputs import LossInputs, TokenSums
from turnout.train.losses.policy import Terms, policy_loss
from turnout.train.settings import LossSettings


def _surrogate(terms: Terms, settings: LossSettings) -> tuple[Tensor, Tensor]:
    ratio = terms.ratio.detach()
    weight = ratio.clamp(1.0 - settings.eps_clip, 1.0 + settings.eps_clip_high)
    return -weight * terms.advantages * terms.logprobs, weight != ratio


def cispo_loss(
    logprobs: Tensor, entropy: Tensor, inputs: LossInputs, settings: LossSettings
) -> tuple[Tensor, TokenSums]:
    return policy_loss(logprobs, entropy, inputs, settings, _surrogate)
