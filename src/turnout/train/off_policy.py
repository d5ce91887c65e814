"""Off-policy corrections: how much a token counts because an older policy, or other kernels, made it.

Per token, with gap = log pi_old - log pi_behaviour: `behaviour` is what the engine sampled with, `old` the
trainer's own policy at the start of the train step. The weight multiplies the policy term of the loss (never the KL
term), carries no gradient, and leaves the loss's denominator alone. It applies to every token that trains, so also
at lag 0, where it corrects for the engine's kernels alone:

    tis         clamp(exp(gap), low, cap): truncated IS (Yao et al. 2025, "Your efficient RL framework secretly
                brings you off-policy RL training"; Espeholt et al. 2018, arXiv 1802.01561)
    mis         exp(gap) inside [low, cap], else 0: masked IS, IcePop (arXiv 2510.18855, arXiv 2512.16144)
    sequence    clamp(exp(sum of gap over the response's trained tokens), low, cap), the same for all of them. The
                product, not the geometric mean: the reward belongs to the whole response, and the product is the
                weight that makes its expectation right. Its variance grows with the length (arXiv 2602.17616 saw it
                collapse at lag 2 on long tool use, after a fall of the effective sample size): watch --min-ess
    decoupled   exp(gap) up to cap, else 0, and the clipped ratio is taken to `old`, the proximal policy (Hilton et
                al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298). `--prox-logp interpolate` needs no forward for
                it: log pi_old = log pi_behaviour + lag / (lag + 1) (log pi - log pi_behaviour)
                (A-3PO, arXiv 2512.06547)

Legend: M tokens of one micro-batch, fp32 [M]. A response is whole in one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.train.settings import OffPolicy

LOG_LIMIT = 20.0  # exp(20) is far above any cap, and its square is finite in fp32


@dataclass(frozen=True)
class Importance:
    """`weights` [M] multiply the policy term. `units` [N] are the weights before truncation and masking, of tokens,
    or of sequences for `sequence`; `bounded` [M] tells which tokens were truncated or masked."""

    weights: Tensor
    units: Tensor
    bounded: Tensor


def interpolated(behaviour: Tensor, current: Tensor, lags: Tensor) -> Tensor:
    """Log-probs of the proximal policy between the behaviour policy and the current one, without gradient."""
    share = lags / (lags + 1.0)
    return behaviour + share * (current.detach() - behaviour)


def importance(gap: Tensor, sample: Tensor, settings: OffPolicy) -> Importance:
    """The weights for `gap` = old - behaviour; `sample` [M] numbers the response that each token belongs to."""
    if settings.kind == "sequence":
        numbers, of_token = torch.unique(sample, return_inverse=True)
        # float64: the sum over a long response must not depend on how the micro-batch was packed
        sums = torch.zeros(len(numbers), dtype=torch.float64, device=gap.device)
        units = torch.exp(sums.index_add(0, of_token, gap.double()).clamp(-LOG_LIMIT, LOG_LIMIT)).float()
        raw = units[of_token]
    else:
        units = raw = torch.exp(gap.clamp(-LOG_LIMIT, LOG_LIMIT))
    low, cap = settings.bounds
    outside = (raw < low) | (raw > cap)
    if settings.kind == "none":
        return Importance(torch.ones_like(raw), units, torch.zeros_like(outside))
    masks = settings.kind in ("mis", "decoupled")
    weights = torch.where(outside, 0.0, raw) if masks else raw.clamp(low, cap)
    return Importance(weights, units, outside)
