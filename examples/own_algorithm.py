"""An algorithm of one's own in two functions; docs/algorithms/custom.md.

turnout train examples/tiny.yaml --custom-advantage-function-path examples/own_algorithm.py:against_the_best \
    --custom-loss-function-path examples/own_algorithm.py:reinforce
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from turnout.core.types import TrainSample
    from turnout.train.losses.policy import Terms
    from turnout.train.settings import LossSettings


def against_the_best(samples: Sequence[TrainSample]) -> list[float]:
    """The reward less the best of the group's other members: only what is better than all of them is reinforced."""
    advantages: list[float] = []
    for index, sample in enumerate(samples):
        others = [
            other.reward
            for place, other in enumerate(samples)
            if other.group_id == sample.group_id and place != index
        ]
        advantages.append(sample.reward - max(others) if others else 0.0)
    return advantages


def reinforce(terms: Terms, settings: LossSettings) -> Tensor:
    """The ratio times the advantage, without a clip; at most 1 + --eps-clip-high of it counts."""
    return -terms.ratio.clamp(max=1.0 + settings.eps_clip_high) * terms.advantages
