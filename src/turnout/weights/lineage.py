"""Incarnations of a run, and which versions its readers may still use. Pure.

A resumed run is a new incarnation that goes on from some version. Versions of an older incarnation above that one
are abandoned: their numbers never come again, and nobody may take them for the run's weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from turnout.core.version import WeightVersion


@dataclass(frozen=True)
class Lineage:
    """`starts`: by incarnation, the counter of the version from which it goes on."""

    starts: Mapping[int, int]

    def abandoned(self, version: WeightVersion) -> bool:
        """Whether a later incarnation went on from an older version than this one."""
        return any(
            incarnation > version.incarnation and start < version.counter
            for incarnation, start in self.starts.items()
        )

    def newest(self, published: Iterable[WeightVersion]) -> WeightVersion | None:
        """The newest version that is not abandoned; None where there is none."""
        usable = [version for version in published if not self.abandoned(version)]
        return max(usable, key=lambda version: version.counter, default=None)
