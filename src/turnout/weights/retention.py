"""What a store may forget. Pure: from manifests, what was committed, and where engines and followers stand.

Rules (docs/weights.md, "Retention"): the two newest committed full versions stay, and an older one until every live
engine has attested a newer version. Deltas stay until there is a committed full version, newer than they, that
every live follower and engine has passed. What is newer than the last committed version stays: it is being
activated. Promises: who stands somewhere, or has nothing, and had a way to the newest version, still has one
after everything in the answer was removed; a version that a resume goes on from can still be made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.weights.chain import cheapest
from turnout.weights.manifest import DELTA, FULL, WeightManifest

FULL_KEPT = 2


@dataclass(frozen=True)
class Holders:
    """Who needs what. `base_root`: the weights that the run began with, which a joiner has. `committed`: counters.
    `engines` and `followers`: what each that lives has attested or holds. `pins`: what a resume goes on from."""

    base_root: str
    committed: frozenset[int]
    engines: tuple[WeightVersion, ...] = ()
    followers: tuple[WeightVersion, ...] = ()
    pins: tuple[WeightVersion, ...] = ()


def removable(versions: Sequence[WeightManifest], holders: Holders) -> list[str]:
    """The folders, of those of `versions` (published, not abandoned), that nobody needs, oldest first."""
    newest_committed = max(holders.committed, default=0)
    full = [m for m in versions if m.kind == FULL and m.version.counter in holders.committed]
    full_counters = sorted({m.version.counter for m in full})
    slowest_engine = min((v.counter for v in holders.engines), default=newest_committed)
    slowest = min((v.counter for v in (*holders.engines, *holders.followers)), default=newest_committed)
    passed = max((n for n in full_counters if n <= slowest), default=0)

    def ruled(manifest: WeightManifest) -> bool:
        counter = manifest.version.counter
        if counter > newest_committed:
            return True
        if manifest.kind == DELTA:
            return counter > passed
        return counter in full_counters[-FULL_KEPT:] or counter >= slowest_engine

    aborted = {m.directory for m in versions if m.version.counter not in holders.committed}
    aborted -= {m.directory for m in versions if m.version.counter > newest_committed}
    sound = [m for m in versions if m.directory not in aborted]  # no version is relative to an aborted one
    needed = {step.directory for route in _routes(sound, holders) for step in route}
    kept = {m.directory for m in sound if ruled(m)} | needed
    return [m.directory for m in versions if m.directory not in kept]


def _routes(versions: Sequence[WeightManifest], holders: Holders) -> Iterable[tuple[WeightManifest, ...]]:
    """What must stay so that ways do: of each holder to the newest committed version and the newest of all, of a
    joiner, and to each pin."""
    ordered = sorted(versions, key=lambda m: m.version.counter)
    committed = [m.version.root for m in ordered if m.version.counter in holders.committed]
    for target in dict.fromkeys([*committed[-1:], *(m.version.root for m in ordered[-1:])]):
        for held in dict.fromkeys(v.root for v in (*holders.engines, *holders.followers)):
            yield _steps(versions, target, held)
        yield _steps(versions, target, None) or _steps(versions, target, holders.base_root)
    for pin in holders.pins:
        yield _steps(versions, pin.root, None) or _steps(versions, pin.root, holders.base_root)


def _steps(versions: Sequence[WeightManifest], target: str, held: str | None) -> tuple[WeightManifest, ...]:
    """The folders of the cheapest route; none where there is no way, or none is needed."""
    try:
        return cheapest(versions, target, held).steps
    except WeightError:
        return ()


class FollowerWatch:
    """Which followers live: those whose record has changed within `expiry` seconds of this host's own monotonic
    clock, so that no two clocks are compared. A follower seen for the first time counts from now."""

    def __init__(self, expiry: float) -> None:
        self._expiry = expiry
        self._seen: dict[str, tuple[object, float]] = {}

    def live(self, rows: dict[str, dict[str, object]], now: float) -> list[str]:
        """The ids of those that live; `rows` are all records as they stand in the store."""
        for name, row in rows.items():
            if name not in self._seen or self._seen[name][0] != row:
                self._seen[name] = (row, now)
        return [name for name in rows if now - self._seen[name][1] <= self._expiry]
