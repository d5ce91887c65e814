"""A delta version in the store gives, over its base, the very tensors that were published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.weight_files import as_rows, assets, model
from turnout.placement.real import DiskStore
from turnout.weights.chain import cheapest
from turnout.weights.changes import collect, overwrite
from turnout.weights.codecs.registry import CODECS
from turnout.weights.delta_io import TensorDelta, read_delta
from turnout.weights.digest import tensor_digest
from turnout.weights.store import WeightStore
from turnout.weights.tensors import HostTensor
from turnout.weights.verify import verify


def changed(tensor: HostTensor, seed: int) -> HostTensor:
    bits = tensor.bits.copy()
    bits[np.random.default_rng(seed).random(bits.size) < 0.3] ^= bits.dtype.type(1)
    return HostTensor(tensor.name, tensor.dtype, tensor.shape, bits)


@pytest.mark.parametrize("encoding", CODECS)
def test_a_delta_over_its_base_is_what_was_published(tmp_path: Path, encoding: str) -> None:
    assets(tmp_path / "assets")
    store = WeightStore(tmp_path / "store", DiskStore(), tmp_path / "assets", 200)
    store.open("run", 0, "b" * 32)
    old = model()
    first = store.publish(old, 1)
    new = [changed(tensor, at) for at, tensor in enumerate(old)]
    deltas = [
        TensorDelta(collect(a.bits, b), a.bits, tensor_digest(a), tensor_digest(b)) for a, b in zip(old, new)
    ]
    second = store.publish_delta(deltas, first.version, encoding, 2)
    manifest = verify(second.folder)
    assert (manifest.base, manifest.encoding) == (first.version, encoding)
    state = {tensor.name: tensor.bits.copy() for tensor in old}
    for change in read_delta(second.folder, manifest, lambda name: state[name]):
        overwrite(state[change.name], change)
    found = [HostTensor(t.name, t.dtype, t.shape, state[t.name]) for t in old]
    assert as_rows(found) == as_rows(new)
    route = cheapest(store.versions(), second.version.root, first.version.root)
    assert (route.anchor, [m.version for m in route.deltas]) == (None, [second.version])
