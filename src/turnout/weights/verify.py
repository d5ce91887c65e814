"""Whether the bytes of a store are those that were written, and whether they make the weights that they claim.

`verify` reads every byte of one folder. `Replica` is a state of the weights in memory that deltas move, checked
before and after by digests computed from its bits. `verify_store` walks every chain of a store so and proves the
root of each version from an anchor, or from the checkpoint that the run began with. One model in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from turnout.core.errors import WeightError
from turnout.weights.chain import NoRoute, cheapest
from turnout.weights.changes import Bits, Change, overwrite
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.delta_io import read_delta
from turnout.weights.digest import Line, element_sums, finish, root_digest, tensor_digest
from turnout.weights.manifest import DELTA, WeightManifest, complete_versions, load_manifest


def file_checksum(path: Path) -> str:
    """blake3 of a file, 64 hex digits; raises OSError."""
    return blake3(max_threads=1).update_mmap(path).hexdigest()


def verify(folder: Path) -> WeightManifest:
    """Reads every byte of every file of a folder and compares checksums; of a full version also digests, names,
    dtypes and shapes of all tensors, and the root. Raises WeightError that names the file or the tensor."""
    manifest = load_manifest(folder)
    if set(manifest.checksums) != set(manifest.files):
        raise WeightError(f"{folder}: the manifest lacks the checksum of a file")
    for name, checksum in manifest.checksums.items():
        if file_checksum(folder / name) != checksum:
            raise WeightError(f"{folder / name}: the bytes are not those that were written")
    if manifest.kind == DELTA:
        return manifest
    found: dict[str, Line] = {}
    for tensor in read_checkpoint(folder):
        entry = manifest.tensors.get(tensor.name)
        digest = tensor_digest(tensor)
        if entry is None or (entry.dtype, entry.shape, entry.digest) != (tensor.dtype, tensor.shape, digest):
            raise WeightError(f"{folder}: {tensor.name} is not what the manifest says")
        found[tensor.name] = (tensor.dtype, tensor.shape, digest)
    if len(found) != len(manifest.tensors) or root_digest(found) != manifest.version.root:
        raise WeightError(f"{folder}: the root digest does not match the manifest")
    return manifest


class Replica:
    """One state of the weights in memory: bits [elements] and (dtype, shape, digest) by tensor name."""

    def __init__(self, checkpoint: Path) -> None:
        """The weights of a checkpoint folder; raises WeightError."""
        self.bits: dict[str, Bits] = {}
        self.lines: dict[str, Line] = {}
        for tensor in read_checkpoint(checkpoint):
            self.bits[tensor.name] = np.array(tensor.bits)
            self.lines[tensor.name] = (tensor.dtype, tensor.shape, tensor_digest(tensor))

    @property
    def root(self) -> str:
        return root_digest(self.lines)

    def apply(self, folder: Path, manifest: WeightManifest) -> Iterator[Change]:
        """Moves the state by a delta, one tensor after another, each handed out before it is written. Raises
        WeightError where the state is not the delta's base, or does not become what the delta says; the state is
        of no use then."""
        if (
            manifest.base is None
            or manifest.base.root != self.root
            or set(manifest.tensors) != set(self.lines)
        ):
            raise WeightError(f"{folder}: is a delta to {manifest.base}, the state is {self.root}")
        for name, entry in manifest.tensors.items():
            dtype, shape, digest = self.lines[name]
            if (entry.dtype, entry.shape, entry.before) != (dtype, shape, digest):
                raise WeightError(f"{folder}: {name} is not in the state that the delta is relative to")
            if not entry.count and entry.digest != digest:
                raise WeightError(f"{folder}: {name} does not change, yet its digest does")
        for change in read_delta(folder, manifest, self.bits.__getitem__):
            yield change
            self._overwrite(folder, manifest, change)
        if self.root != manifest.version.root:
            raise WeightError(f"{folder}: the root digest does not match the manifest")

    def _overwrite(self, folder: Path, manifest: WeightManifest, change: Change) -> None:
        bits, entry = self.bits[change.name], manifest.tensors[change.name]
        overwrite(bits, change)
        digest = finish(element_sums(bits), entry.dtype, entry.shape)
        if digest != entry.digest:
            raise WeightError(f"{folder}: {change.name} does not become what the manifest says")
        self.lines[change.name] = (entry.dtype, entry.shape, digest)


class Walker:
    """One Replica that goes from version to version of a store. `base` is the checkpoint that the run began with,
    None where it is not at hand."""

    def __init__(self, root: Path, base: Path | None) -> None:
        self._root, self._base = root, base
        self._held: Replica | None = None

    def at(self, target: str, versions: Sequence[WeightManifest]) -> Replica:
        """The state with this root digest, by the cheapest route from where the walker stands, else from an
        anchor or the base; raises WeightError where no way leads there. It moves at the next call."""
        held, self._held = self._held, None
        try:
            route = cheapest(versions, target, held.root if held is not None else None)
        except NoRoute as fault:
            if self._base is None:
                raise NoRoute(f"{fault}; give --base, the checkpoint that the run began with") from fault
            held = Replica(self._base)
            route = cheapest(versions, target, held.root)
        if route.anchor is not None:
            held = Replica(self._root / route.anchor.directory)
        assert held is not None, "a route begins with what is held, or with an anchor"
        for step in route.deltas:
            for _ in held.apply(self._root / step.directory, step):
                pass
        self._held = held
        return held

    def prove(self, delta: WeightManifest, versions: Sequence[WeightManifest]) -> None:
        """Applies a delta to its base; raises WeightError where that is not the version which it claims."""
        assert delta.base is not None, "a parsed delta has a base"
        held, self._held = self.at(delta.base.root, versions), None
        for _ in held.apply(self._root / delta.directory, delta):
            pass
        self._held = held


@dataclass(frozen=True)
class Verdict:
    """What came of one folder; `fault` is empty where it is right. `reachable`: where not, the files are right and
    nobody can tell of the weights, since their base is not at hand."""

    folder: str
    label: str
    fault: str = ""
    reachable: bool = True


def verify_store(root: Path, base: Path | None = None) -> Iterator[Verdict]:
    """Every folder of a store in the order of versions, each read in full; a delta is right when applying it to
    its base gives the root that it claims. `base` is the checkpoint that the run began with: without it, deltas
    before the first anchor cannot be proved, and are told as such."""
    versions = complete_versions(root)
    whole = {manifest.directory: manifest for manifest in versions}
    for folder in sorted(root.iterdir()):
        if folder.name.startswith(("weight_v", "anchor_v", "fold_v")) and folder.name not in whole:
            yield Verdict(folder.name, "", _why_incomplete(folder))
    walker = Walker(root, base)
    sound: list[WeightManifest] = []
    for manifest in sorted(versions, key=lambda m: (m.version.counter, m.kind == DELTA)):
        try:
            verify(root / manifest.directory)
            if manifest.kind == DELTA:
                walker.prove(manifest, sound)
        except WeightError as fault:
            reachable = not isinstance(fault, NoRoute)
            yield Verdict(manifest.directory, manifest.version.label, str(fault), reachable)
        else:
            sound.append(manifest)
            yield Verdict(manifest.directory, manifest.version.label)


def _why_incomplete(folder: Path) -> str:
    try:
        manifest = load_manifest(folder)
    except WeightError as fault:
        return str(fault)
    return f"{folder}: holds {manifest.directory}, another version's folder"
