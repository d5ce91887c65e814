"""Numbers of train steps in bounded memory: a bin per step, and per two, four, ... steps as they become many.

A bin holds sums, and counts by lag, by length and by cause, so that what a wider one tells is exact: means and
histograms of all its steps. Each bin knows the revision at which it changed, for readers that have the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

LIMIT = 600
PER_OCTAVE = 4
CAUSES = 40


@dataclass
class Bin:
    """Steps from `first` on. `lengths` counts responses by `length_bucket`, `lags` trained tokens by their lag,
    `drops` groups that were dropped or sent back, by cause; `at` is the wall time of the last step."""

    first: int
    at: float | None = None
    revision: int = 0
    sums: dict[str, float] = field(default_factory=dict[str, float])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    lags: Counter[int] = field(default_factory=Counter[int])
    lengths: Counter[int] = field(default_factory=Counter[int])
    drops: Counter[str] = field(default_factory=Counter[str])

    def add(self, key: str, value: float) -> None:
        self.sums[key] = self.sums.get(key, 0.0) + value
        self.counts[key] = self.counts.get(key, 0) + 1

    def mean(self, key: str) -> float | None:
        count = self.counts.get(key, 0)
        return self.sums[key] / count if count else None

    def take(self, other: Bin) -> None:
        """Adds another bin's numbers."""
        for key, value in other.sums.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
            self.counts[key] = self.counts.get(key, 0) + other.counts[key]
        self.lags += other.lags
        self.lengths += other.lengths
        self.drops += other.drops
        self.revision = max(self.revision, other.revision)
        self.at = other.at if self.at is None else self.at if other.at is None else max(self.at, other.at)


class StepBins:
    """`width` steps a bin; `epoch` grows when it changes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.width, self.epoch, self._limit = 1, 0, limit
        self._bins: dict[int, Bin] = {}

    def at(self, step: int, revision: int) -> Bin:
        """The bin of a step, to be changed at this revision."""
        found = self._bins.get(step // self.width)
        if found is None:
            found = self._bins[step // self.width] = Bin(step // self.width * self.width)
            while len(self._bins) > self._limit:
                self._widen()
            found = self._bins[step // self.width]
        found.revision = revision
        return found

    def _widen(self) -> None:
        old, self._bins = self._bins, {}
        self.width *= 2
        self.epoch += 1
        for bin_ in old.values():
            index = bin_.first // self.width
            if index in self._bins:
                self._bins[index].take(bin_)
            else:
                bin_.first = index * self.width
                self._bins[index] = bin_

    def began(self, steps: int) -> float | None:
        """The wall time at which the newest so many steps began, as far as it is known."""
        timed = [bin_ for bin_ in self.since(-1) if bin_.at is not None]
        return timed[max(0, len(timed) - 1 - max(1, steps // self.width))].at if timed else None

    def since(self, revision: int) -> list[Bin]:
        """Bins that have changed after a revision, by step."""
        found = (bin_ for bin_ in self._bins.values() if bin_.revision > revision)
        return sorted(found, key=lambda bin_: bin_.first)

    def means(self, keys: tuple[str, ...], revision: int) -> list[dict[str, Any]]:
        """Rows of `step`, `at` and the means of these keys; what isn't known is left out."""
        return [
            {
                "step": bin_.first,
                "at": bin_.at,
                **{key: _short(mean) for key in keys if (mean := bin_.mean(key)) is not None},
            }
            for bin_ in self.since(revision)
        ]

    def shapes(self, revision: int) -> list[dict[str, Any]]:
        """Rows of `step` with pairs of (lag, tokens), (bucket of length, responses) and (cause, groups)."""
        return [
            {
                "step": bin_.first,
                "lags": sorted(bin_.lags.items()),
                "lengths": sorted(bin_.lengths.items()),
                "drops": bin_.drops.most_common(CAUSES),
            }
            for bin_ in self.since(revision)
        ]


@lru_cache(1 << 16)
def length_bucket(tokens: int) -> int:
    """0 for no token, else 1 + the number of the quarter octave: bucket b begins at 2 ** ((b - 1) / PER_OCTAVE)."""
    return 0 if tokens < 1 else 1 + int(PER_OCTAVE * math.log2(tokens) + 1e-9)


def _short(value: float) -> float:
    """Six digits: what a curve needs."""
    return float(f"{value:.6g}")
