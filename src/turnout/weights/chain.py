"""How a holder of some version comes to another one: from its own state by deltas, or from an anchor. Pure.

An anchor is a full version. The cost of a route is the bytes that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core.errors import WeightError
from turnout.weights.manifest import DELTA, FULL, WeightManifest


@dataclass(frozen=True)
class Route:
    """Load `anchor` (None: begin with what is held), then apply the deltas in this order."""

    anchor: WeightManifest | None
    deltas: tuple[WeightManifest, ...]

    @property
    def nbytes(self) -> int:
        steps = (*self.deltas, *((self.anchor,) if self.anchor is not None else ()))
        return sum(sum(manifest.files.values()) for manifest in steps)


def cheapest(versions: Sequence[WeightManifest], target: str, held: str | None) -> Route:
    """The route of least bytes to the root digest `target` for who holds the root `held` (None: nothing that
    counts). Raises WeightError where there is none."""
    if held == target:
        return Route(None, ())
    routes: dict[str, Route] = {} if held is None else {held: Route(None, ())}
    for manifest in sorted(versions, key=lambda m: m.version.counter):
        root = manifest.version.root
        found = []
        if manifest.kind == FULL:
            found.append(Route(manifest, ()))
        if manifest.kind == DELTA and manifest.base is not None and manifest.base.root in routes:
            before = routes[manifest.base.root]
            found.append(Route(before.anchor, (*before.deltas, manifest)))
        for route in found:
            if root not in routes or route.nbytes < routes[root].nbytes:
                routes[root] = route
    if target not in routes:
        names = ", ".join(m.version.label for m in versions) or "none"
        raise WeightError(f"no way leads from {held} to {target}: the store holds {names}")
    return routes[target]
