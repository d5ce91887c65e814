"""What goes into a loss and what comes out beside it: tensors per token, and sums of statistics.

Legend: M tokens of one micro-batch; all tensors fp32 [M] unless said otherwise. A response is whole in one
micro-batch (turnout.train.packing), so a loss may use all its tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.train.settings import LossSettings


@dataclass(frozen=True)
class LossInputs:
    """`old` None means the detached log-probs of this forward pass; `behaviour` are the engine's. `sample` int64
    numbers the response that a token belongs to, `lags` is the age of its version in train steps."""

    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    sample: Tensor
    lags: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True)
class TokenSums:
    """Statistics of the tokens of one or more micro-batches, as sums, so that they can be added. `units` are what
    importance weights are given to, tokens or sequences; `importance` and its square are sums over them, before
    truncation and masking; `weight` and `bounded` are of tokens, after it."""

    tokens: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    approx_kl: float = 0.0
    reference_kl: float = 0.0
    mismatch: float = 0.0
    mismatch_k3: float = 0.0
    weight: float = 0.0
    bounded: float = 0.0
    units: float = 0.0
    importance: float = 0.0
    importance_square: float = 0.0
    mismatch_max: float = 0.0
    weight_max: float = 0.0

    def __add__(self, other: TokenSums) -> TokenSums:
        mine, others = vars(self), vars(other)
        return TokenSums(
            **{n: (max if n.endswith("_max") else operator.add)(mine[n], others[n]) for n in mine}
        )

    def mean(self, name: str) -> float:
        return vars(self)[name] / self.tokens if self.tokens else 0.0

    @property
    def effective_sample_share(self) -> float:
        """(sum of w)^2 / (N * sum of w^2) in (0, 1] over the N units' weights w before truncation; 1 without any.
        Kish's effective sample size; arXiv 2602.17616 uses it to foresee a collapse."""
        square = self.units * self.importance_square
        return self.importance**2 / square if square else 1.0


# (log-probs, entropies, inputs, settings) -> the micro-batch's part of the loss (a scalar with gradient), its sums
LossFunction = Callable[[Tensor, Tensor, LossInputs, LossSettings], tuple[Tensor, TokenSums]]


def sample_means(values: Tensor, sample: Tensor) -> Tensor:
    """[M]: for each token the mean of `values` over its response, differentiable; summed in float64, so that it
    does not depend on how the micro-batch was packed."""
    numbers, of_token, counts = torch.unique(sample, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(numbers), dtype=torch.float64, device=values.device)
    return (sums.index_add(0, of_token, values.double()) / counts).to(values.dtype)[of_token]
