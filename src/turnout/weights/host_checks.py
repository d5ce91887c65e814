"""What a version must be before a local checkpoint takes it: of the same run, of the right form, finite, and proved
by digests. Nothing is written here; every function raises WeightError that names the tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from turnout.core.errors import WeightError
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.delta_io import read_delta
from turnout.weights.digest import Line, root_digest, tensor_digest
from turnout.weights.host_state import LocalState
from turnout.weights.host_tensors import MappedTensors
from turnout.weights.journal import Redo, redo_of
from turnout.weights.manifest import WeightManifest
from turnout.weights.tensors import HostTensor, nonfinite_count

NAMES_SHOWN = 5


def check_names(manifest: WeightManifest, private: str) -> None:
    """Names of files come from a store that others may write: none leaves the folder."""
    for name in manifest.files:
        if Path(name).name != name or name in ("", "..", private) or name not in manifest.checksums:
            raise WeightError(
                f"{manifest.version.label}: {name!r} is no file of a version, or has no checksum"
            )
    stray = {entry.file for entry in manifest.tensors.values() if entry.file} - set(manifest.files)
    if stray:
        raise WeightError(f"{manifest.version.label}: {sorted(stray)[:NAMES_SHOWN]} are not among its files")


def check_form(local: LocalState, manifest: WeightManifest) -> None:
    """The delta's tensors are those of its base, by name, dtype, shape and digest."""
    for name in {*local.tensors, *manifest.tensors}:
        line, entry = local.tensors.get(name), manifest.tensors.get(name)
        if line is None or entry is None or line[:2] != (entry.dtype, entry.shape):
            raise WeightError(f"{manifest.version.label}: {name} is not of the same form in its base")
        if line[2] != (entry.before if entry.count else entry.digest):
            raise WeightError(f"{manifest.version.label}: {name} is another tensor than in its base")


def check_run(local: LocalState, manifest: WeightManifest) -> None:
    if local.run_id != manifest.run_id:
        raise WeightError(
            f"the local checkpoint belongs to run {local.run_id}, the store to run {manifest.run_id}: give another "
            "--local-checkpoint"
        )


def check_finite(tensors: Iterable[HostTensor]) -> None:
    for tensor in tensors:
        bad = nonfinite_count(tensor)
        if bad:
            raise WeightError(f"{tensor.name}: {bad} values are not finite")


def check_full(manifest: WeightManifest, folder: Path) -> None:
    """Every tensor is there, of the manifest's form and digest, and finite."""
    found: dict[str, Line] = {}
    for tensor in read_checkpoint(folder):
        line = (tensor.dtype, tensor.shape, tensor_digest(tensor))
        entry = manifest.tensors.get(tensor.name)
        if entry is None or line != (entry.dtype, entry.shape, entry.digest):
            raise WeightError(f"{manifest.version.label}: {tensor.name} is not what the manifest says")
        check_finite([tensor])
        found[tensor.name] = line
    if root_digest(found) != manifest.version.root:
        missing = sorted(set(manifest.tensors) - set(found))[:NAMES_SHOWN]
        raise WeightError(f"{manifest.version.label}: not the tensors of its root digest; missing: {missing}")


def redos(manifest: WeightManifest, folder: Path, tensors: MappedTensors) -> Iterator[Redo]:
    """The changes of a delta, each proved to lead to its tensor's digest before anything is written."""
    for change in read_delta(folder, manifest, tensors.bits):
        check_finite([HostTensor(change.name, change.dtype, (change.count,), change.bits)])
        entry, found = manifest.tensors[change.name], tensors.preview(change)
        if found != entry.digest:
            raise WeightError(f"{manifest.version.label}: {change.name} would become another tensor")
        yield redo_of(change, tensors.bits(change.name), entry.digest)
