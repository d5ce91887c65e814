"""Supervised fine-tuning: the cross entropy of the response's tokens, masked ones left out.

    loss = - sum over tokens of weight * log pi(y_t)
With --loss-aggregation token that is the mean over all trained tokens of the optimizer step, which is the loss of
transformers on the whole step at once. No engine made the tokens, so there is nothing to correct for and no
mismatch to measure.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from turnout.train.losses.inputs import LossInputs, TokenSums
from turnout.train.losses.policy import Terms, policy_loss
from turnout.train.settings import LossSettings


def _surrogate(terms: Terms, settings: LossSettings) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return -terms.logprobs, torch.zeros_like(terms.logprobs, dtype=torch.bool)


def sft_loss(
    logprobs: Tensor, entropy: Tensor, inputs: LossInputs, settings: LossSettings
) -> tuple[Tensor, TokenSums]:
    given = replace(inputs, behaviour=logprobs.detach(), old=None)
    return policy_loss(logprobs, entropy, given, settings, _surrogate)
