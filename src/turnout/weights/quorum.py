"""How many engines, and which of them, an update or a run can't do without. Pure."""

from __future__ import annotations

from collections.abc import Collection

Sides = tuple[frozenset[str], ...]


def lacking(engines: Collection[str], at_least: int, sides: Sides = ()) -> str:
    """What these engines lack to be enough: `at_least` of them, one of each of `sides` among them (the two halves
    of a PD pair are of no use alone). Empty where they are enough."""
    if len(engines) < at_least:
        return f"engines left: {len(engines)}, needed: {at_least}"
    for side in sides:
        if side.isdisjoint(engines):
            return f"of {', '.join(sorted(side))} none is left, and one is needed"
    return ""
