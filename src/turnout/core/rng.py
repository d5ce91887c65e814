"""The one random source. Every consumer derives its own seed from the run's seed and a path of names.

A seed depends on nothing but the path, so order of arrival, number of engines or a resume cannot change it.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from dataclasses import dataclass

IdSource = Callable[[], str]


def random_id() -> str:
    """32 hex digits that nobody else has, for requests, writes and runs. A simulator passes its own source."""
    return os.urandom(16).hex()


@dataclass(frozen=True)
class SeedTree:
    """A node of the tree of seeds: `SeedTree(7).child("rollout", 3).seed` is the same number everywhere."""

    root: int
    path: tuple[str | int, ...] = ()

    def child(self, *names: str | int) -> SeedTree:
        return SeedTree(self.root, (*self.path, *names))

    @property
    def seed(self) -> int:
        """63 bits, uniform over paths. A slash in a name is doubled, so that no name spells another path."""
        return _number(self._hashed())

    def seeds(self, count: int) -> list[int]:
        """Those of `child(0)` to `child(count - 1)`."""
        found: list[int] = []
        ours = self._hashed()
        for at in range(count):
            child = ours.copy()
            child.update(f"/int:{at}".encode())
            found.append(_number(child))
        return found

    def _hashed(self) -> hashlib.blake2b:
        names = [f"{type(n).__name__}:{n}".replace("/", "//") for n in self.path]
        return hashlib.blake2b("/".join([str(self.root), *names]).encode(), digest_size=8)

    def random(self) -> random.Random:
        """A fresh Python generator seeded by this node (shuffles; never used for sampling tokens)."""
        return random.Random(self.seed)


def _number(digest: hashlib.blake2b) -> int:
    return int.from_bytes(digest.digest(), "big") >> 1
