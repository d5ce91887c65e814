"""Checkpoint folders for update checks: versions whose every tensor differs, and folders broken in one way.

Pure file work, no torch. A version's label names its content the way the weight store does
(`v000002-<root>`), so that an engine may refuse a label that lies. Source folders are never written to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from turnout.core.version import WeightVersion, label_counter
from turnout.weights.changes import collect
from turnout.weights.checkpoint_io import INDEX, copy_assets, read_checkpoint, write_checkpoint
from turnout.weights.delta_io import TensorDelta, write_delta
from turnout.weights.digest import root_of, tensor_digest
from turnout.weights.manifest import DELTA, WeightManifest, seal
from turnout.weights.tensors import HostTensor
from turnout.weights.verify import file_checksum

ONE_FILE = 1 << 40


@dataclass(frozen=True)
class ModelVersion:
    """A checkpoint folder, the label it is loaded under, and the root digest of its tensors."""

    folder: Path
    label: str
    root: str

    def tensors(self) -> list[HostTensor]:
        return list(read_checkpoint(self.folder))


def original(folder: Path, label: str) -> ModelVersion:
    """The model as it is, under the label it is served with."""
    return ModelVersion(folder, label, root_of(read_checkpoint(folder)))


def changed(source: Path, target: Path, counter: int, shard_bytes: int = ONE_FILE) -> ModelVersion:
    """A copy in which every tensor differs from the source's and from another counter's, all of it finite."""
    return _written(
        source, target, counter, (_turned(t, counter) for t in read_checkpoint(source)), shard_bytes
    )


def mixture(version: ModelVersion, target: Path, counter: int, kept: HostTensor) -> ModelVersion:
    """The version with one tensor replaced by `kept`, under a label of its own."""
    tensors = replaced(version.tensors(), kept, kept.name)
    return _written(version.folder, target, counter, tensors, ONE_FILE)


def resharded(version: ModelVersion, target: Path) -> ModelVersion:
    """The same tensors in about four files with an index."""
    total = sum(tensor.nbytes for tensor in version.tensors())
    target.mkdir(parents=True)
    copy_assets(version.folder, target)
    write_checkpoint(target, read_checkpoint(version.folder), max(1, total // 4))
    return ModelVersion(target, version.label, version.root)


def delta_version(store: Path, base: ModelVersion, version: ModelVersion) -> Path:
    """The folder of a store that holds `version` as what differs from `base`; written once."""
    named = WeightVersion(0, label_counter(version.label) or 1, version.root)
    folder = store / named.directory
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    held = {tensor.name: tensor for tensor in base.tensors()}
    deltas = [
        TensorDelta(
            collect(held[new.name].bits, new),
            held[new.name].bits,
            tensor_digest(held[new.name]),
            tensor_digest(new),
        )
        for new in version.tensors()
    ]
    made = write_delta(folder, deltas, "indices", ONE_FILE)
    checksums = {name: file_checksum(folder / name) for name in made.files}
    content = (made.files, made.tensors, checksums)
    origin = WeightVersion(0, label_counter(base.label) or 0, base.root)
    seal(folder, WeightManifest(named, DELTA, 1, "kit", "kit", *content, origin, "indices"))
    return folder


def broken(
    version: ModelVersion, target: Path, change: Callable[[list[HostTensor]], list[HostTensor]]
) -> Path:
    """A copy of the version whose tensors went through `change`, in about four files."""
    target.mkdir(parents=True)
    copy_assets(version.folder, target)
    tensors = version.tensors()
    write_checkpoint(target, change(tensors), max(1, sum(t.nbytes for t in tensors) // 4))
    return target


def without_a_shard(folder: Path) -> str:
    """Removes the last shard that the index names; returns its name."""
    placed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    name = max(placed.values())
    (folder / name).unlink()
    return name


def cut_a_shard(folder: Path) -> str:
    """Cuts the last shard to two thirds of its bytes; returns its name."""
    name = max(path.name for path in folder.glob("*.safetensors"))
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) * 2 // 3])
    return name


def replaced(tensors: list[HostTensor], new: HostTensor, old: str) -> list[HostTensor]:
    """The tensors with the one named `old` replaced."""
    return [new if tensor.name == old else tensor for tensor in tensors]


def poisoned(tensor: HostTensor) -> HostTensor:
    """The tensor with one NaN in the middle."""
    bits = tensor.bits.copy()
    bits[bits.size // 2] = {"BF16": 0x7FC0, "F16": 0x7E00, "F32": 0x7FC00000}[tensor.dtype]
    return HostTensor(tensor.name, tensor.dtype, tensor.shape, bits)


def _written(
    source: Path, target: Path, counter: int, tensors: Iterable[HostTensor], shard_bytes: int
) -> ModelVersion:
    target.mkdir(parents=True)
    copy_assets(source, target)
    root = write_checkpoint(target, tensors, shard_bytes).root
    return ModelVersion(target, WeightVersion(0, counter, root).label, root)


def _turned(tensor: HostTensor, counter: int) -> HostTensor:
    """Values moved along the flat tensor, and the last bits of every mantissa turned by the counter: tensors
    of one repeated value change too, and nothing leaves the range that it was in."""
    bits = np.roll(tensor.bits, 7 * counter) ^ tensor.bits.dtype.type(counter)
    return HostTensor(tensor.name, tensor.dtype, tensor.shape, bits)
