"""Waiting for files that another host wrote: "not visible yet" is told apart from "missing".

A network file system caches names and sizes, so a version can be published and not be seen here for a while. What
is incomplete is looked at again until a deadline; what is wrong is told at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from turnout.core.errors import VersionIncomplete
from turnout.weights.manifest import WeightManifest, load_manifest

T = TypeVar("T")
POLL_S = 0.1


@dataclass(frozen=True)
class Patience:
    """How long to look again: seconds in all, a monotonic clock, and what waits for some seconds. It blocks."""

    seconds: float
    now: Callable[[], float]
    sleep: Callable[[float], None]


def until_visible(look: Callable[[], T], patience: Patience) -> T:
    """What `look` returns, called again while it raises VersionIncomplete; raises its last one, and how long was
    waited, after the deadline."""
    end = patience.now() + patience.seconds
    while True:
        try:
            return look()
        except VersionIncomplete as fault:
            left = end - patience.now()
            if left <= 0:
                raise VersionIncomplete(
                    f"{fault} (looked for {patience.seconds:g} s: is this the directory that the trainer writes?)"
                ) from fault
        patience.sleep(min(POLL_S, left))


def visible_manifest(folder: Path, patience: Patience) -> WeightManifest:
    """The manifest of a version's folder that may still have to show; raises as load_manifest does."""
    return until_visible(lambda: load_manifest(folder), patience)
