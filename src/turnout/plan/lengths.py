"""How long responses are, where no run told. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

SPREAD = 0.8  # of the logarithm, as of long-tailed reasoning
QUANTILES = 512


def expected(limit: int) -> tuple[int, ...]:
    """Lognormal with a quarter of the limit as its median, cut there."""
    middle = math.log(max(1.0, limit / 4))
    points = ((at + 0.5) / QUANTILES for at in range(QUANTILES))
    found = (math.exp(middle + SPREAD * NormalDist().inv_cdf(point)) for point in points)
    return tuple(max(1, min(limit, round(length))) for length in found)


def changed(lengths: Sequence[int], limit: int, new: int, factor: float) -> tuple[int, ...]:
    """Lengths that were measured under `limit` as they would be under `new`: `factor` times as long and cut there;
    those that were cut are taken to reach the new limit."""
    return tuple(new if length >= limit else max(1, min(new, round(length * factor))) for length in lengths)
