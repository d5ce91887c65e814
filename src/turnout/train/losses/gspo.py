"""GSPO: the clipped surrogate with one ratio for the whole response (Zheng et al. 2025, arXiv 2507.18071).

With s = exp(mean of logprob - old over the response's trained tokens):
    surrogate = max(-s A, -clip(s, 1 - eps_clip, 1 + eps_clip_high) A), for each of its tokens
Where all tokens of a response have the same A and weight, that is the paper's sequence loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.train.losses.grpo import clipped
from turnout.train.losses.inputs import LossInputs, TokenSums, sample_means
from turnout.train.losses.policy import Terms, policy_loss
from turnout.train.settings import LossSettings


def _surrogate(terms: Terms, settings: LossSettings) -> tuple[Tensor, Tensor]:
    ratio = torch.exp(sample_means(terms.logprobs - terms.old, terms.sample))
    return clipped(ratio, terms.advantages, settings)


def gspo_loss(
    logprobs: Tensor, entropy: Tensor, inputs: LossInputs, settings: LossSettings
) -> tuple[Tensor, TokenSums]:
    return policy_loss(logprobs, entropy, inputs, settings, _surrogate)
