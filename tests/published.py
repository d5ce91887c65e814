"""A scripted publisher: a weight store with full and delta versions of a small model, for tests of who reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore
from turnout.weights.changes import collect
from turnout.weights.delta_io import TensorDelta
from turnout.weights.digest import root_of, tensor_digest
from turnout.weights.store import WeightStore
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED, HostTensor

SHARD = 400
RUN = "run-1"
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "a.weight": ("BF16", (16, 8)),
    "b": ("U8", (3,)),  # what follows lies unaligned in its file
    "c.weight": ("F32", (4, 9)),
    "d.scalar": ("F32", ()),
    "e.empty": ("BF16", (0, 4)),
    "f.weight": ("F16", (7, 5)),
    "g.weight": ("I64", (6,)),
    "h.steady": ("BF16", (5, 5)),  # never changes
}


def finite(name: str, dtype: str, shape: tuple[int, ...], seed: int) -> HostTensor:
    """Random bits, -0.0 and subnormals among them, but neither NaN nor infinity."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.random.default_rng([seed, *name.encode()]).integers(0, 256, count * ITEM_BYTES[dtype], np.uint8)
    bits = raw.view(UNSIGNED[ITEM_BYTES[dtype]])
    clear = {"BF16": 0x4000, "F16": 0x4000, "F32": 0x40000000}.get(dtype)
    if clear is not None:  # a bit of the exponent is never set
        bits &= ~bits.dtype.type(clear)
    return HostTensor(name, dtype, shape, bits)


def first(seed: int = 0) -> list[HostTensor]:
    return [finite(name, dtype, shape, seed) for name, (dtype, shape) in SHAPES.items()]


def moved(tensors: Sequence[HostTensor], seed: int, share: float = 0.1) -> list[HostTensor]:
    """Some elements of most tensors changed, as a train step does; of every 4th tensor nearly all."""
    rng = np.random.default_rng([seed, 7])
    after = []
    for at, tensor in enumerate(tensors):
        fresh = finite(tensor.name, tensor.dtype, tensor.shape, seed)
        part = 0.0 if tensor.name == "h.steady" else 0.9 if (at + seed) % 4 == 0 else share
        take = rng.random(tensor.bits.size) < part
        bits = np.where(take, fresh.bits, tensor.bits)
        after.append(HostTensor(tensor.name, tensor.dtype, tensor.shape, bits))
    return after


def deltas(before: Sequence[HostTensor], after: Sequence[HostTensor]) -> list[TensorDelta]:
    return [
        TensorDelta(collect(old.bits, new), old.bits, tensor_digest(old), tensor_digest(new))
        for old, new in zip(before, after)
    ]


class Publisher:
    """One run's store. `now` are the weights of the newest version."""

    def __init__(
        self, root: Path, tensors: Sequence[HostTensor], run_id: str = RUN, assets: Path | None = None
    ) -> None:
        shard = SHARD if assets is None else 1 << 20
        if assets is None:
            assets = root.parent / f"{root.name}-assets"
            assets.mkdir(parents=True, exist_ok=True)
            (assets / "config.json").write_text('{"model_type": "toy"}')
        self.root, self.now = root, list(tensors)
        self.version = WeightVersion(0, 0, root_of(tensors))
        self.store = WeightStore(root, DiskStore(), assets, shard)
        self.store.open(run_id, 0, self.version.root)
        self.history: dict[int, list[HostTensor]] = {0: self.now}

    def resume(self, incarnation: int, start: int) -> None:
        """Goes on from the version with the counter `start` as a new incarnation; newer ones are abandoned."""
        self.store.open(RUN, incarnation, root_of(self.history[0]), start)
        self.now = self.history[start]
        self.version = WeightVersion(0, start, root_of(self.now))

    def full(self, tensors: Sequence[HostTensor] | None = None) -> WeightVersion:
        return self._took(
            tensors, self.store.publish(tensors if tensors is not None else self.now, 0).version
        )

    def delta(self, tensors: Sequence[HostTensor], encoding: str = "indices") -> WeightVersion:
        changes = deltas(self.now, tensors)
        return self._took(tensors, self.store.publish_delta(changes, self.version, encoding, 0).version)

    def _took(self, tensors: Sequence[HostTensor] | None, version: WeightVersion) -> WeightVersion:
        self.now = list(tensors) if tensors is not None else self.now
        self.version = version
        self.history[version.counter] = self.now
        return version


def bits_of(tensors: Sequence[HostTensor]) -> dict[str, bytes]:
    return {tensor.name: tensor.bits.tobytes() for tensor in tensors}
