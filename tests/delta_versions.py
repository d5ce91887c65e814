"""A store whose versions change some elements of a small model, for tests of engines: deltas of any density and
encoding, anchors, and the same weights as an ordinary checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore
from turnout.weights.changes import Change, collect
from turnout.weights.checkpoint_io import copy_assets, read_checkpoint, write_checkpoint
from turnout.weights.delta_io import TensorDelta
from turnout.weights.digest import root_of, tensor_digest
from turnout.weights.store import Published, WeightStore
from turnout.weights.tensors import HostTensor

SHARD_BYTES = 1 << 16


class Versions:
    """`tensors` are the newest version's, `version` its identity; `changes` those of the last `move`."""

    def __init__(self, root: Path, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.store = WeightStore(root, DiskStore(), checkpoint, SHARD_BYTES)
        self.tensors = {t.name: copied(t) for t in read_checkpoint(checkpoint)}
        self.version = WeightVersion(0, 0, root_of(self.tensors.values()))
        self.changes: list[Change] = []
        self.store.open("run", 0, self.version.root)
        self._random = np.random.default_rng(7)

    def move(self, share: float, only: str = "") -> list[TensorDelta]:
        """New values for about this share of the elements (at least one) of tensors with `only` in their names; a
        tied pair stays tied."""
        deltas, self.changes = [], []
        for name, old in self.tensors.items():
            bits = old.bits.copy()
            if only in name:
                count = max(1, int(share * bits.size))
                at = np.sort(self._random.choice(bits.size, count, replace=False))
                bits[at] ^= self._random.integers(1, 64, count).astype(
                    bits.dtype
                )  # of the mantissa: finite stays finite
            new = HostTensor(name, old.dtype, old.shape, bits)
            change = collect(old.bits, new)
            deltas.append(TensorDelta(change, old.bits, tensor_digest(old), tensor_digest(new)))
            self.changes.append(change)
            self.tensors[name] = new
        return deltas

    def delta(self, share: float, encoding: str = "indices", only: str = "") -> Published:
        return self.publish(self.move(share, only), encoding)

    def publish(self, deltas: list[TensorDelta], encoding: str = "indices") -> Published:
        made = self.store.publish_delta(deltas, self.version, encoding, 1)
        self.version = made.version
        return made

    def full(self) -> Published:
        """A full version of what the last `move` left."""
        made = self.store.publish(self.tensors.values(), 1)
        self.version = made.version
        return made

    def as_checkpoint(self, folder: Path) -> Path:
        """The newest weights as a plain checkpoint."""
        folder.mkdir(parents=True)
        copy_assets(self.checkpoint, folder)
        write_checkpoint(folder, self.tensors.values(), 1 << 40)
        return folder


def copied(tensor: HostTensor) -> HostTensor:
    return HostTensor(tensor.name, tensor.dtype, tensor.shape, np.array(tensor.bits))
