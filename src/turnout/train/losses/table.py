"""The losses by name, and what each needs of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from turnout.train.losses.cispo import cispo_loss
from turnout.train.losses.grpo import grpo_loss
from turnout.train.losses.gspo import gspo_loss
from turnout.train.losses.inputs import LossFunction
from turnout.train.losses.policy import Terms, policy_loss
from turnout.train.losses.sft import sft_loss
from turnout.train.own import LOSS, checked_surrogate, own_function
from turnout.train.settings import LossSettings


@dataclass(frozen=True)
class Loss:
    """`old`: it compares the policy with the one before the train step, so that with several optimizer steps a
    forward of its own is needed. `advantages`: a sample without an advantage has no gradient by it."""

    function: LossFunction
    old: bool = True
    advantages: bool = True


LOSSES: dict[str, Loss] = {
    "grpo": Loss(grpo_loss),
    "sft": Loss(sft_loss, old=False, advantages=False),
    "gspo": Loss(gspo_loss),
    "cispo": Loss(cispo_loss),
}


def loss_of(settings: LossSettings) -> Loss:
    """The loss that the settings name; raises ConfigError where it is a function of the user's that isn't there."""
    if settings.function is None:
        return LOSSES[settings.name]
    path = settings.function
    function = own_function(LOSS, path)

    def surrogate(terms: Terms, settings: LossSettings) -> tuple[Tensor, Tensor]:
        if not len(
            terms.logprobs
        ):  # a rank without a sample of its own; the others wait for its backward pass
            found = terms.logprobs * 0
        else:
            found = checked_surrogate(path, function(terms, settings), terms.logprobs)
        return found, torch.zeros_like(found, dtype=torch.bool)

    return Loss(partial(policy_loss, surrogate=surrogate))
