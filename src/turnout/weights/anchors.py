"""Which form the next version gets: a delta, a delta with an anchor beside it, or full. Pure.

An anchor is a full version that who joins late begins with. One is due when replaying the chain since the last
one costs more than loading it would, and a delta of more than half a full version is not worth its name: measured
from the store's own manifests, not every N versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from turnout.weights.chain import RATES, Rates
from turnout.weights.manifest import DELTA, FULL, VERSION, WeightManifest


class NextForm(StrEnum):
    """DELTA: a delta alone. ANCHORED: a delta, and the same version in full beside it (`publish_anchor`), so that
    who follows the chain reads little and who joins does not replay it. FULL: a full version alone."""

    DELTA = "delta"
    ANCHORED = "anchored"
    FULL = "full"


@dataclass(frozen=True)
class DeltaSize:
    """What the next delta is expected to be: bytes of its files, elements that it overwrites."""

    nbytes: int
    changed: int


def next_form(
    versions: Sequence[WeightManifest],
    base: tuple[str, str],
    full_bytes: int,
    delta: DeltaSize,
    rates: Rates = RATES,
) -> NextForm:
    """The form of a version that changes so much. `versions` are the store's complete ones; `base` is the root
    that the delta would be relative to, and the root of the checkpoint that every engine starts with (a joiner
    holds it, so the chain may begin there); `full_bytes` is what a full version takes."""
    chain = _since_anchor(versions, *base)
    if 2 * delta.nbytes > full_bytes or chain is None:
        return NextForm.FULL
    replay = sum(rates.delta_seconds(step.nbytes, step.changed) for step in chain)
    replay += rates.delta_seconds(delta.nbytes, delta.changed)
    return NextForm.ANCHORED if replay > rates.full_seconds(full_bytes) else NextForm.DELTA


def _since_anchor(versions: Sequence[WeightManifest], root: str, start: str) -> list[WeightManifest] | None:
    """The deltas that lead to `root` from the nearest full version or the start; None where one is gone, so that
    nobody could join by them."""
    anchors = {start, *(m.version.root for m in versions if m.kind == FULL)}
    deltas = {m.version.root: m for m in versions if m.kind == DELTA and m.form == VERSION}
    chain: list[WeightManifest] = []
    while root not in anchors:
        step = deltas.pop(root, None)  # once each: weights that come back to an old state make a circle
        if step is None or step.base is None:
            return None
        chain.append(step)
        root = step.base.root
    return chain
