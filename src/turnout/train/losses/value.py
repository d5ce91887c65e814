"""The critic's loss: half the squared error to the return, clipped as PPO clips the ratio.

    V_c  = V_old + clip(V - V_old, -value_clip, value_clip)
    loss = sum over tokens of weight * max((V - R)^2, (V_c - R)^2) / 2
so that a value that went further than `value_clip` towards its return is pulled no further in this train step.
Schulman et al. 2017 (arXiv 1707.06347), in the form of its implementations (Huang et al. 2022, "The 37
implementation details of PPO"). The weights of one optimizer step sum to 1 (turnout.train.losses.weights).

Legend: M tokens of one micro-batch; all tensors fp32 [M].
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, weights: Tensor, clip: float
) -> tuple[Tensor, float]:
    """The micro-batch's part of the loss (a scalar with gradient), and how many tokens were clipped."""
    near = old + (values - old).clamp(-clip, clip)
    plain, clipped = (values - returns) ** 2, (near - returns) ** 2
    loss = 0.5 * (torch.maximum(plain, clipped) * weights).sum()
    return loss, float((clipped > plain).sum())
