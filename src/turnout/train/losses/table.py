"""The losses by name, and what each needs of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from turnout.train.losses.cispo import cispo_loss
from turnout.train.losses.grpo import grpo_loss
from turnout.train.losses.gspo import gspo_loss
from turnout.train.losses.inputs import LossFunction
from turnout.train.losses.sft import sft_loss


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
