"""What each --advantage-estimator is: a loss, a baseline, a normalisation, and the clips that its paper gives.

Pure data. The pages are docs/algorithms/NAME.md, one for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Aggregation = Literal["token", "sample", "constant"]
Baseline = Literal["mean", "leave_one_out", "none"]


@dataclass(frozen=True)
class Estimator:
    """`loss` is a name of turnout.train.losses.table, `clip` the default range of the ratio below and above 1.
    `critic`: the baseline is that of a second model.
    `std` divides by the standard deviation of the group, `normalize` by mean and deviation of the batch."""

    loss: Literal["grpo", "gspo", "cispo"] = "grpo"
    baseline: Baseline = "mean"
    std: bool = False
    normalize: bool = False
    aggregation: Aggregation = "token"
    clip: tuple[float, float] = (0.2, 0.2)
    critic: bool = False


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(std=True),
    "dr_grpo": Estimator(aggregation="constant"),
    "dapo": Estimator(std=True, clip=(0.2, 0.28)),
    "gspo": Estimator("gspo", std=True, aggregation="sample", clip=(3e-4, 4e-4)),
    "cispo": Estimator("cispo", std=True, clip=(1.0, 4.0)),
    "rloo": Estimator(baseline="leave_one_out"),
    "reinforce_plus_plus": Estimator(baseline="none", normalize=True),
    "reinforce_plus_plus_baseline": Estimator(normalize=True),
    "ppo": Estimator(baseline="none", critic=True),
}
