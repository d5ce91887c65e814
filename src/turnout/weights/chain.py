"""How a holder of some version comes to another one: from its own state by deltas, or from an anchor. Pure.

An anchor is a full version. What a route costs is the time to read its bytes and to apply its changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core.errors import WeightError
from turnout.weights.manifest import DELTA, FULL, WeightManifest


@dataclass(frozen=True)
class Rates:
    """Bytes per second that a joiner reads and loads, and elements per second that it decodes and overwrites."""

    bytes_per_s: float
    changes_per_s: float

    def full_seconds(self, nbytes: int) -> float:
        return nbytes / self.bytes_per_s

    def delta_seconds(self, nbytes: int, changed: int) -> float:
        return nbytes / self.bytes_per_s + changed / self.changes_per_s


RATES = Rates(1e9, 5e7)  # a local disk, and one core; only their ratio matters for which route is cheaper


class NoRoute(WeightError):
    """A version cannot be reached from what is held."""


@dataclass(frozen=True)
class Route:
    """Load `anchor` (None: begin with what is held), then apply the deltas in this order. A manifest's
    `directory` is its folder in the store."""

    anchor: WeightManifest | None
    deltas: tuple[WeightManifest, ...]

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self.steps)

    @property
    def steps(self) -> tuple[WeightManifest, ...]:
        """Every folder that the route reads, in order."""
        return (*((self.anchor,) if self.anchor is not None else ()), *self.deltas)

    def seconds(self, rates: Rates = RATES) -> float:
        first = rates.full_seconds(self.anchor.nbytes) if self.anchor is not None else 0.0
        return first + sum(rates.delta_seconds(step.nbytes, step.changed) for step in self.deltas)


def cheapest(
    versions: Sequence[WeightManifest], target: str, held: str | None, rates: Rates = RATES
) -> Route:
    """The route of least cost to the root digest `target` for who holds the root `held` (None: nothing that
    counts). Raises NoRoute where there is none."""
    routes: dict[str, Route] = {} if held is None else {held: Route(None, ())}
    for manifest in sorted(versions, key=lambda m: (m.version.counter, m.kind == DELTA)):
        root = manifest.version.root
        found = []
        if manifest.kind == FULL:
            found.append(Route(manifest, ()))
        if manifest.kind == DELTA and manifest.base is not None and manifest.base.root in routes:
            before = routes[manifest.base.root]
            found.append(Route(before.anchor, (*before.deltas, manifest)))
        for route in found:
            if root not in routes or route.seconds(rates) < routes[root].seconds(rates):
                routes[root] = route
    if target not in routes:
        names = ", ".join(m.directory for m in versions) or "none"
        raise NoRoute(f"no way leads from {held} to {target}: the store holds {names}")
    return routes[target]
