"""One version of a store on this host as a checkpoint folder that an engine can load.

Promises: a version that the store has in full is named where it lies; of another, the files are made in a folder
of the caller's by the cheapest route from a full version or from the checkpoint that the run began with, and their
root digest is the version's. Nothing in the store is changed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from turnout.core.errors import WeightError
from turnout.core.ports import Store
from turnout.core.version import WeightVersion
from turnout.weights.catalog import StoreReader
from turnout.weights.chain import cheapest
from turnout.weights.depot import FolderDepot
from turnout.weights.local_checkpoint import LocalCheckpoint
from turnout.weights.manifest import FULL, WeightManifest
from turnout.weights.verify import file_checksum


def whole_checkpoint(
    root: Path, files: Store, counter: int, base: Path, into: Path
) -> tuple[WeightVersion, Path]:
    """The version with this counter in the store `root`, and its checkpoint: a folder of the store, or `into`,
    which must not exist. `base` is the checkpoint that the run began with. Raises WeightError."""
    depot = FolderDepot(root, files)
    found = StoreReader(depot).look()
    same = [m for m in found.usable() if m.version.counter == counter]
    if not same:
        have = ", ".join(sorted({f"v{m.version.counter:06d}" for m in found.usable()}))
        raise WeightError(f"{root}: there is no version {counter} any more; there are {have or 'none'}")
    full = [m for m in same if m.kind == FULL]
    if full:
        return full[0].version, root / full[0].directory
    version, identity = same[0].version, found.identity
    route = cheapest(found.usable(), version.root, identity.base_root)

    def fetch(manifest: WeightManifest, folder: Path) -> None:
        for name, checksum in manifest.checksums.items():
            depot.fetch_file(f"{manifest.directory}/{name}", folder / name)
            if file_checksum(folder / name) != checksum:
                raise WeightError(f"{root / manifest.directory / name}: not the bytes that were written")

    local = LocalCheckpoint(into)
    try:
        if route.anchor is None:
            shutil.copytree(base, into)
            local.open()
            local.adopt(identity.run_id, {identity.base_root: WeightVersion(0, 0, identity.base_root)})
        else:
            local.open()
            local.load(route.anchor, fetch)
        for delta in route.deltas:
            local.apply(delta, fetch)
    finally:
        local.close()
    return version, into
