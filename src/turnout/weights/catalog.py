"""What a reader finds in a store: who it belongs to, its versions, which of them are current or abandoned.

A Catalog is one look at a depot; reading it again sees what came since. Promises: every manifest in it belongs to a
complete folder that lies under its own name; a folder that another process writes or removes meanwhile is left out,
not half seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnout.core.errors import VersionIncomplete, WeightError
from turnout.core.version import WeightVersion
from turnout.weights.depot import Depot
from turnout.weights.lineage import Lineage
from turnout.weights.manifest import DONE, MANIFEST, WeightManifest, done_mark, parse_manifest
from turnout.weights.verify import file_checksum
from turnout.weights.visibility import Patience, until_visible

RUN, RECORDS, INCARNATIONS, FOLLOWERS = "run.json", "PUBLISHED", "INCARNATIONS", "followers"


@dataclass(frozen=True)
class Identity:
    """Whose store it is: the run, the model (a digest of its config.json), the root of the weights that the run
    began with."""

    run_id: str
    model: str
    base_root: str


@dataclass(frozen=True)
class Catalog:
    """`records` are the versions that were published, by counter; `versions` the complete folders; `folders` the
    names of all folders of versions, complete or not; `followers` their positions, as they stand in the depot."""

    identity: Identity
    lineage: Lineage
    records: dict[int, WeightVersion]
    versions: Sequence[WeightManifest]
    folders: frozenset[str]
    followers: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def newest(self) -> WeightVersion | None:
        """The newest version that was published and is not abandoned."""
        return self.lineage.newest(self.records.values())

    def published(self, manifest: WeightManifest) -> bool:
        """Whether a folder's version is on record: the very same, by content."""
        return self.records.get(manifest.version.counter) == manifest.version

    def useless(self, committed: WeightVersion) -> list[str]:
        """This run's folders that no reader may take: of abandoned versions, and of those that never got a record,
        as after a kill. One newer than `committed` may still get it."""
        return [
            m.directory
            for m in self.versions
            if m.run_id == self.identity.run_id
            and (
                self.lineage.abandoned(m.version)
                or (m.version.counter < committed.counter and not self.published(m))
            )
        ]

    def removed(self, version: WeightVersion) -> bool:
        """Whether a version had a folder once and has none any more: it was published, and a newer one shows."""
        newer = any(manifest.version.counter > version.counter for manifest in self.versions)
        return (
            newer and self.records.get(version.counter) == version and version.directory not in self.folders
        )

    def usable(self) -> list[WeightManifest]:
        """The folders that routes may lead through: of published versions that are not abandoned."""
        return [m for m in self.versions if self.published(m) and not self.lineage.abandoned(m.version)]


class StoreReader:
    """Looks into a depot, which may be far. Manifests and the records of versions and incarnations never change, so
    each is read once. One user at a time."""

    def __init__(self, depot: Depot) -> None:
        self.depot = depot
        self._known: dict[str, WeightManifest] = {}
        self._rows: dict[str, dict[str, Any]] = {}

    def look(self, positions: bool = True) -> Catalog:
        """`positions`: also those of the followers. Raises WeightError where the depot is no store, or cannot be
        reached."""
        sizes = self.depot.sizes()
        identity = identity_of(self._row(RUN), self.depot.name)
        folders = {key.split("/")[0] for key in sizes if _is_version(key)}
        self._known = {folder: known for folder, known in self._known.items() if folder in folders}
        found = (self._manifest(folder, sizes) for folder in sorted(folders))
        versions = sorted((m for m in found if m is not None), key=lambda m: m.version.counter)
        self._rows = {key: row for key, row in self._rows.items() if key in sizes}
        records = [version_of(self._once(key), key) for key in _within(sizes, RECORDS)]
        starts = [start_of(self._once(key), key) for key in _within(sizes, INCARNATIONS)]
        told = _within(sizes, FOLLOWERS) if positions else ()
        followers = {key[len(FOLLOWERS) + 1 : -5]: self._row(key) for key in told}
        return Catalog(
            identity,
            Lineage(dict(starts)),
            {version.counter: version for version in records},
            versions,
            frozenset(folders),
            followers,
        )

    def await_version(self, version: WeightVersion, patience: Patience) -> Catalog:
        """The first look in which a folder of this version is complete. Raises VersionIncomplete where none shows
        in time, WeightError at once where it is abandoned, or was removed."""

        def look() -> Catalog:
            found = self.look()
            if found.lineage.abandoned(version):
                raise WeightError(f"{self.depot.name}: {version.label} was abandoned by a resume of the run")
            if any(manifest.version == version for manifest in found.usable()):
                return found
            if found.removed(version):
                raise WeightError(f"{self.depot.name}: {version.label} was removed: newer versions are there")
            raise VersionIncomplete(f"{self.depot.name}: {version.label} does not show")

        return until_visible(look, patience)

    def fetch(self, manifest: WeightManifest, target: Path) -> Path:
        """A version's folder as a local one, every byte checked against the manifest, DONE last; nothing is
        synced. `target` must not exist. Raises WeightError that names the file."""
        target.mkdir(parents=True)
        for name, checksum in manifest.checksums.items():
            self.depot.fetch_file(f"{manifest.directory}/{name}", target / name)
            if file_checksum(target / name) != checksum:
                raise WeightError(
                    f"{self.depot.name}: {manifest.directory}/{name}: the bytes are not those that were written"
                )
        for name in (MANIFEST, DONE):
            self.depot.fetch_file(f"{manifest.directory}/{name}", target / name)
        return target

    def _manifest(self, folder: str, sizes: dict[str, int]) -> WeightManifest | None:
        """The manifest of a complete folder, None while it is not."""
        data = self.depot.read(f"{folder}/{MANIFEST}") if folder not in self._known else None
        if data is not None and self.depot.read(f"{folder}/{DONE}") == done_mark(data):
            manifest = parse_manifest(data, f"{self.depot.name}/{folder}/{MANIFEST}")
            if manifest.directory == folder:
                self._known[folder] = manifest
        manifest = self._known.get(folder)
        if manifest is None or f"{folder}/{DONE}" not in sizes:
            return None
        whole = all(sizes.get(f"{folder}/{name}") == size for name, size in manifest.files.items())
        return manifest if whole else None

    def _once(self, key: str) -> dict[str, Any]:
        if key not in self._rows:
            self._rows[key] = self._row(key)
        return self._rows[key]

    def _row(self, key: str) -> dict[str, Any]:
        data = self.depot.read(key)
        if data is None:
            raise WeightError(f"{self.depot.name}: {key} is missing: this is no weight store, or not yet")
        return row_of(data, f"{self.depot.name}/{key}")


def row_of(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object; raises WeightError for anything else."""
    try:
        row = json.loads(data)
    except (ValueError, RecursionError) as fault:
        raise WeightError(f"{where}: not a record: {fault}") from fault
    if not isinstance(row, dict):
        raise WeightError(f"{where}: not a record: {row!r}")
    return row


def identity_of(row: dict[str, Any], where: str) -> Identity:
    """Raises WeightError for what is no run.json."""
    try:
        return Identity(str(row["run_id"]), str(row["model"]), str(row["base_root"]))
    except KeyError as fault:
        raise WeightError(f"{where}/{RUN} is not the record of a run: {fault} is missing") from fault


def version_of(row: dict[str, Any], where: str) -> WeightVersion:
    """The version of a record; raises WeightError for what is none."""
    try:
        return WeightVersion(int(row["incarnation"]), int(row["counter"]), str(row["root"]))
    except (KeyError, TypeError, ValueError) as fault:
        raise WeightError(f"{where}: not the record of a version: {fault}") from fault


def start_of(row: dict[str, Any], where: str) -> tuple[int, int]:
    """An incarnation and the counter that it goes on from; raises WeightError for what is none."""
    try:
        return int(row["incarnation"]), int(row["start"])
    except (KeyError, TypeError, ValueError) as fault:
        raise WeightError(f"{where}: not the record of an incarnation: {fault}") from fault


def _within(sizes: dict[str, int], folder: str) -> list[str]:
    return [key for key in sizes if key.startswith(f"{folder}/") and key.endswith(".json")]


def _is_version(key: str) -> bool:
    return "/" in key and key.startswith(("weight_v", "anchor_v", "fold_v"))
