"""The fewest bytes that changes can take, with free tables: what encodings are held against.

For a tensor of n elements of which k change: log2 C(n, k) bits for positions plus k times the empirical entropy of
the differences new - old of bit patterns. With classes known: the same for each class of elements whose bf16 base
has the same exponent. Summed over tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnout.weights.changes import Bits, Change

EXPONENT_SHIFT, EXPONENTS = 7, 256  # of bf16


def bounds(items: Sequence[tuple[Change, Bits]]) -> tuple[int, int]:
    """Bytes without and with the classes known, for bf16 changes with the base of each."""
    plain = classed = 0.0
    for change, base in items:
        old = base[change.positions]
        differences = change.bits - old
        plain += _choices(change.elements, change.count) + _entropy(differences)
        of_base, of_change = _classes(base), _classes(old)
        sizes = np.bincount(of_base, minlength=EXPONENTS).tolist()
        for number, count in enumerate(np.bincount(of_change, minlength=EXPONENTS).tolist()):
            if count:
                classed += _choices(sizes[number], count) + _entropy(differences[of_change == number])
    return math.ceil(plain / 8), math.ceil(classed / 8)


def _classes(bits: Bits) -> NDArray[np.int64]:
    return ((bits >> np.uint16(EXPONENT_SHIFT)) & np.uint16(EXPONENTS - 1)).astype(np.int64)


def _choices(n: int, k: int) -> float:
    """log2 of n over k."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def _entropy(values: Bits) -> float:
    """Bits of all these values together, each as rare as it is among them."""
    counts = np.unique(values, return_counts=True)[1]
    return float(-(counts * np.log2(counts / values.size)).sum()) if values.size else 0.0
