"""The manifest of a published version: the last file but DONE that a publisher writes, the first a reader reads.

A folder is a version only with DONE, a manifest of a known format, and every listed file at its listed size.
Anything else is a WeightError that says what is missing. Digests of the tensors are checked by whoever reads
the tensors (`verify`, the engine's loader).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.weights.checkpoint_io import TensorEntry, read_checkpoint
from turnout.weights.digest import root_digest, tensor_digest

FORMAT, FORMAT_VERSION = "turnout-weights", 2
FULL, DELTA = "full", "delta"
MANIFEST, DONE = "manifest.json", "DONE"


@dataclass(frozen=True)
class WeightManifest:
    """`step` is the number of train steps done when the weights were exported; `write_id` names this very
    write, so that a publisher can tell its own from another's. A delta names its `base` and its `encoding`.
    `files` are sizes, `checksums` blake3, both by file name."""

    version: WeightVersion
    kind: str
    step: int
    run_id: str
    write_id: str
    files: dict[str, int]
    tensors: dict[str, TensorEntry]
    checksums: dict[str, str]
    base: WeightVersion | None = None
    encoding: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(
            {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}, indent=1
        ).encode()


def parse_manifest(data: bytes, where: str) -> WeightManifest:
    """Raises WeightError for anything but a manifest of a format version known here."""
    try:
        row = json.loads(data)
        found = (row.pop("format"), row.pop("format_version"))
        if found != (FORMAT, FORMAT_VERSION):
            raise WeightError(f"{where}: format {found}, this program reads {(FORMAT, FORMAT_VERSION)}")
        row["version"], row["files"] = WeightVersion(**row["version"]), dict(row["files"].items())
        row["tensors"] = {
            name: TensorEntry(**{**entry, "shape": tuple(entry["shape"])})
            for name, entry in row["tensors"].items()
        }
        if row["base"] is not None:
            row["base"] = WeightVersion(**row["base"])
        return WeightManifest(**row)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as fault:
        raise WeightError(f"{where}: not a manifest: {fault}") from fault


def load_manifest(folder: Path) -> WeightManifest:
    """The manifest of a complete version folder; raises WeightError that says what is missing or wrong."""
    if not folder.is_dir():
        raise WeightError(f"{folder}: no such folder (is the weight directory visible from here?)")
    for name in (DONE, MANIFEST):
        if not (folder / name).is_file():
            raise WeightError(f"{folder}: {name} is missing, so the version is not complete")
    manifest = parse_manifest((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise WeightError(f"{folder}: {name} is missing")
        if path.stat().st_size != size:
            raise WeightError(f"{folder}: {name} has {path.stat().st_size} bytes, the manifest says {size}")
    return manifest


def complete_versions(root: Path) -> list[WeightManifest]:
    """The complete versions of a store, oldest first; an incomplete folder is left out."""
    found: list[WeightManifest] = []
    for folder in root.glob("weight_v*"):
        try:
            found.append(load_manifest(folder))
        except WeightError:
            continue
    return sorted(found, key=lambda manifest: manifest.version.counter)


def file_checksum(path: Path) -> str:
    """blake3 of a file, 64 hex digits; raises OSError."""
    return blake3(max_threads=1).update_mmap(path).hexdigest()


def verify(folder: Path) -> WeightManifest:
    """Reads every file of a version and compares checksums; of a full one also digests, names, dtypes and shapes
    of all tensors. Raises WeightError."""
    manifest = load_manifest(folder)
    for name, checksum in manifest.checksums.items():
        if file_checksum(folder / name) != checksum:
            raise WeightError(f"{folder / name}: the bytes are not those that were written")
    if manifest.kind == DELTA:
        return manifest
    found: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for tensor in read_checkpoint(folder):
        entry = manifest.tensors.get(tensor.name)
        digest = tensor_digest(tensor)
        if entry is None or (entry.dtype, entry.shape, entry.digest) != (tensor.dtype, tensor.shape, digest):
            raise WeightError(f"{folder}: {tensor.name} is not what the manifest says")
        found[tensor.name] = (tensor.dtype, tensor.shape, digest)
    if len(found) != len(manifest.tensors) or root_digest(found) != manifest.version.root:
        raise WeightError(f"{folder}: the root digest does not match the manifest")
    return manifest
