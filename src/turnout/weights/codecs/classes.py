"""Classes of elements by the exponent of the base, and a change split by class: what `ranked` codes.

Within a class changes are nearly uniform, so the gaps between them are counted in elements of the class. NumPy; the
fast way is native/entropy.c. Promises: merge(split(change)) is the change; a rank outside its class is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.weights.changes import Bits, Positions

MAX_CLASSES = 64
FEW = 64  # classes at the low end that hold fewer changes than one in so many share one
REFUSED = "bytes that this encoding didn't make for this tensor"


@dataclass(frozen=True)
class Classes:
    """Which class an element of the base belongs to: its exponent (pattern >> shift) & mask, less `lowest`, at
    least 0. Elements above the last class have none; none of them changes."""

    shift: int
    mask: int
    lowest: int
    count: int

    def of(self, base: Bits) -> NDArray[np.int64]:
        """The class of each element [elements]."""
        exponents = exponents_of(base, self.shift, self.mask)
        return np.maximum(exponents - self.lowest, 0)


def exponents_of(bits: Bits, shift: int, mask: int) -> NDArray[np.int64]:
    return ((bits >> bits.dtype.type(shift)) & bits.dtype.type(mask)).astype(np.int64)


def classes_of(exponents: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """From how many changes there are at each exponent [tensors, exponents]: the lowest exponent that is a class of
    its own and the number of classes [tensors]. The few changes at the low end, where nearly everything changes,
    share a class."""
    total = exponents.sum(axis=1, keepdims=True)
    lowest = np.argmax(np.cumsum(exponents, axis=1) * FEW > total, axis=1)
    highest = exponents.shape[1] - 1 - np.argmax(exponents[:, ::-1] > 0, axis=1)
    lowest = np.maximum(lowest, highest - MAX_CLASSES + 1)
    return lowest, highest - lowest + 1


@dataclass(frozen=True)
class Split:
    """A change by class: changes of each class [classes], and class after class the unchanged elements of the
    class before each change (gaps [count]) and new minus old pattern (values [count], modulo the width)."""

    counts: NDArray[np.int64]
    gaps: Positions
    values: Bits


def split(base: Bits, positions: Positions, bits: Bits, classes: Classes) -> Split:
    of_base = classes.of(base)
    of_change = of_base[positions]
    order = np.argsort(of_change, kind="stable")
    counts = np.bincount(of_change, minlength=classes.count)
    gaps = np.empty_like(positions)
    at = 0
    for number, count in enumerate(counts.tolist()):
        mine = positions[order[at : at + count]]
        ranks = np.searchsorted(np.flatnonzero(of_base == number), mine)
        gaps[at : at + count] = np.diff(ranks, prepend=-1) - 1
        at += count
    return Split(counts, gaps, (bits - base[positions])[order])


def merge(base: Bits, classes: Classes, parts: Split) -> tuple[Positions, Bits]:
    """The inverse of split; raises WeightError for a rank that its class doesn't have."""
    of_base = classes.of(base)
    places, at = np.zeros(len(parts.gaps), np.int64), 0
    for number, count in enumerate(parts.counts.tolist()):
        ranks = np.cumsum(parts.gaps[at : at + count].astype(np.int64) + 1) - 1
        mine = np.flatnonzero(of_base == number)
        if count and (ranks.min() < 0 or ranks.max() >= len(mine)):
            raise WeightError(REFUSED)
        places[at : at + count] = mine[ranks]
        at += count
    order = np.argsort(places, kind="stable")
    positions = places[order]
    return positions.astype(parts.gaps.dtype), base[positions] + parts.values[order]
