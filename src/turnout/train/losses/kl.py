"""Estimates of the KL to a reference from the policy's own samples. Schulman's k1, k2, k3
(http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Per token estimate of KL(policy || reference), [M]: `k1` the log-ratio, `k2` half its square, `k3` the
    unbiased one that is never negative, `low_var_kl` that one, at most 10 (slime's)."""
    difference = logprobs - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    estimate = torch.exp(-difference) - 1.0 + difference
    return estimate.clamp(max=10.0) if kind == "low_var_kl" else estimate
