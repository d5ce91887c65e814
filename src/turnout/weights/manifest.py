"""The manifest of a published version: the last file but DONE that a publisher writes, the first a reader reads.

A folder holds a version only with DONE, which has the manifest's blake3, a manifest of a known format, and every
listed file at its listed size. Anything else is a WeightError that says what is missing. The bytes of the files
are checked by `turnout.weights.verify`, digests of the tensors by whoever reads them as well.

A version has one folder of its own, and may have others, that say the same another way:

    weight_v000123/            the version as it was published: full, or delta to the version before
    anchor_v000123/            the same version in full, beside a delta, for who comes late
    fold_v000120-v000123/      one delta instead of several
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from turnout.core.errors import VersionIncomplete, WeightError
from turnout.core.version import WeightVersion
from turnout.weights.checkpoint_io import TensorEntry

FORMAT, FORMAT_VERSION = "turnout-weights", 2
FULL, DELTA = "full", "delta"
MANIFEST, DONE = "manifest.json", "DONE"
VERSION, ANCHOR, FOLD = "version", "anchor", "fold"
_FOLDER = re.compile(r"(?:weight|anchor|fold)_v(?:\d{6,}-v)?(\d{6,})")


@dataclass(frozen=True)
class WeightManifest:
    """`step` is the number of train steps done when the weights were exported; `write_id` names this very
    write, so that a publisher can tell its own from another's. A delta names its `base` and its `encoding`.
    `files` are sizes, `checksums` blake3, both by file name. `topology` is how the trainer was spread when it
    wrote, free in form; `time` when it did, in seconds since the epoch, for people (0: not told). `form` is which
    of the version's folders this one is (see the module)."""

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
    topology: dict[str, Any] = field(default_factory=dict)
    form: str = VERSION
    time: float = 0.0

    @property
    def directory(self) -> str:
        """The name of the folder in a store."""
        if self.form == VERSION:
            return self.version.directory
        since = f"v{self.base.counter:06d}-" if self.form == FOLD and self.base is not None else ""
        return f"{self.form}_{since}v{self.version.counter:06d}"

    @property
    def nbytes(self) -> int:
        """Bytes of all files but manifest and DONE."""
        return sum(self.files.values())

    @property
    def changed(self) -> int:
        """Elements that a delta overwrites."""
        return sum(entry.count for entry in self.tensors.values())

    def to_bytes(self) -> bytes:
        return json.dumps(
            {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}, indent=1
        ).encode()


def folder_counter(name: str) -> int | None:
    """The counter of the version that a folder of this name holds; None where the name is none of a version."""
    match = _FOLDER.fullmatch(name)
    return int(match.group(1)) if match else None


def parse_manifest(data: bytes, where: str) -> WeightManifest:
    """Raises WeightError for anything but a manifest of a format version known here."""
    try:
        row = json.loads(data)
        found = (row.pop("format"), row.pop("format_version"))
        if found != (FORMAT, FORMAT_VERSION):
            raise WeightError(
                f"{where}: format {found[0]!r} version {found[1]!r}, this program reads {FORMAT!r} version "
                f"{FORMAT_VERSION}"
            )
        row["version"], row["files"] = WeightVersion(**row["version"]), dict(row["files"].items())
        row["tensors"] = {
            name: TensorEntry(**{**entry, "shape": tuple(entry["shape"])})
            for name, entry in row["tensors"].items()
        }
        if row["base"] is not None:
            row["base"] = WeightVersion(**row["base"])
        manifest = WeightManifest(**row)
        _check(manifest, where)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as fault:
        raise WeightError(f"{where}: not a manifest: {fault}") from fault
    return manifest


def _check(manifest: WeightManifest, where: str) -> None:
    if manifest.kind not in (FULL, DELTA):
        raise WeightError(f"{where}: kind {manifest.kind!r}, this program reads {FULL!r} and {DELTA!r}")
    if (manifest.kind == DELTA) != (manifest.base is not None):
        raise WeightError(f"{where}: not a manifest: a delta, and nothing else, has a base")
    for name, size in manifest.files.items():
        if name in ("", ".", "..", MANIFEST, DONE) or "/" in name or "\\" in name or type(size) is not int:
            raise WeightError(f"{where}: not a manifest: file {name!r} of {size!r} bytes")


def seal(folder: Path, manifest: WeightManifest) -> None:
    """Writes manifest and DONE, in this order, into a folder whose files are complete; syncs nothing."""
    data = manifest.to_bytes()
    (folder / MANIFEST).write_bytes(data)
    (folder / DONE).write_bytes(done_mark(data))


def done_mark(manifest: bytes) -> bytes:
    """What DONE holds: the blake3 of the manifest's bytes, 64 hex digits."""
    return blake3(manifest).hexdigest().encode()


def load_manifest(folder: Path) -> WeightManifest:
    """The manifest of a complete version folder; raises VersionIncomplete that says what is missing, or WeightError
    that says what is wrong."""
    if not folder.is_dir():
        raise VersionIncomplete(f"{folder}: no such folder (is the weight directory visible from here?)")
    for name in (DONE, MANIFEST):
        if not (folder / name).is_file():
            raise VersionIncomplete(f"{folder}: {name} is missing, so the version is not complete")
    data = (folder / MANIFEST).read_bytes()
    manifest = parse_manifest(data, str(folder / MANIFEST))
    if (folder / DONE).read_bytes() != done_mark(data):
        raise WeightError(f"{folder}: {MANIFEST} or {DONE} is not what was written: the checksum differs")
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise VersionIncomplete(f"{folder}: {name} is missing")
        if path.stat().st_size != size:
            raise VersionIncomplete(
                f"{folder}: {name} has {path.stat().st_size} bytes, the manifest says {size}"
            )
    return manifest


def complete_versions(root: Path) -> list[WeightManifest]:
    """The complete folders of a store, by counter; an incomplete folder, or one that lies under another name than
    its manifest says, is left out."""
    found: list[WeightManifest] = []
    for pattern in ("weight_v*", "anchor_v*", "fold_v*"):
        for folder in root.glob(pattern):
            try:
                manifest = load_manifest(folder)
            except WeightError:
                continue
            if manifest.directory == folder.name:
                found.append(manifest)
    return sorted(found, key=lambda manifest: manifest.version.counter)
