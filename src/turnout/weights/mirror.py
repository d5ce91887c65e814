"""A store's copy in an object store, for readers that do not share a file system with the trainer.

The store in the run's directory stays the source: engines beside the trainer read that. `sync` brings over whatever
is there and not here, so that a failed one is made good by the next. Promises: a version's files are uploaded
before its manifest, that before DONE, that before its PUBLISHED record, so that no reader meets half of one; of
two publishers that write the same folder, one is refused before its first file (`CLAIM`); one that was taken over
by a newer incarnation uploads and removes nothing more. One user at a time; calls block.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.weights.catalog import RECORDS, Catalog, Identity, StoreReader
from turnout.weights.manifest import DONE, MANIFEST, WeightManifest, folder_counter
from turnout.weights.object_depot import ObjectDepot
from turnout.weights.ownership import Ownership

CLAIM = "CLAIM"


class Mirror:
    """See the module. `join` comes first."""

    def __init__(self, depot: ObjectDepot) -> None:
        self.depot = depot
        self._owner, self._reader = Ownership(depot), StoreReader(depot)
        self._here: set[str] = set()  # folders and records known to be whole and of this very store

    def join(self, identity: Identity, incarnation: int, start: int, write_id: str) -> None:
        """As Ownership.join: the copy belongs to the same run."""
        self._owner.join(identity, incarnation, start, write_id)

    def newest_counter(self) -> int:
        """The highest counter that was ever published here, 0 where there is none."""
        keys = self.depot.sizes(RECORDS)
        return max((int(key[len(RECORDS) + 1 : -5]) for key in keys), default=0)

    def sync(self, root: Path, local: Catalog) -> list[str]:
        """Uploads what `local` (a look at the store in `root`) has and this lacks, oldest version first; returns
        the folders. Raises WeightError where a file cannot be uploaded or another publisher claims a folder."""
        self._owner.check()
        pushed: list[str] = []
        for counter, version in sorted(local.records.items()):
            for manifest in (m for m in local.usable() if m.version == version):
                if manifest.directory not in self._here:
                    self._push(root / manifest.directory, manifest)
                    pushed.append(manifest.directory)
            key = f"{RECORDS}/{counter:06d}.json"
            if key not in self._here:
                self._owner.check()
                if not self.depot.create_once(key, (root / key).read_bytes()):
                    raise WeightError(f"{self.depot.name}: version {counter} was published by somebody else")
                self._here.add(key)
        return pushed

    def retain(self, committed: WeightVersion, unneeded: Callable[[Catalog], list[str]]) -> list[str]:
        """Removes the folders that `unneeded` names of a look at this copy, and those that no reader may take;
        returns them. DONE goes first, so that a reader meets an incomplete folder, not a wrong one."""
        self._owner.check()
        found = self._reader.look()
        whole = {manifest.directory for manifest in found.versions}
        counters = ((folder, folder_counter(folder)) for folder in sorted(found.folders - whole))
        partial = [
            folder for folder, counter in counters if counter is not None and counter < committed.counter
        ]
        gone = [*partial, *found.useless(committed), *unneeded(found)]
        for folder in gone:
            keys = list(self.depot.sizes(folder))
            self.depot.delete(sorted(keys, key=lambda key: not key.endswith(f"/{DONE}")))
        return gone

    def _push(self, folder: Path, manifest: WeightManifest) -> None:
        self._owner.check()
        upload(self.depot, folder, manifest)
        self._here.add(manifest.directory)


def upload(depot: ObjectDepot, folder: Path, manifest: WeightManifest) -> None:
    """Claims a version's folder, then uploads it, DONE last; one that is there already stays. Raises WeightError
    where somebody else claimed it."""
    place = manifest.directory
    if not depot.create_once(f"{place}/{CLAIM}", manifest.write_id.encode()):
        raise WeightError(
            f"{depot.name}/{place} is being written by somebody else: is another trainer running?"
        )
    if depot.read(f"{place}/{DONE}") is None:
        for name in (*manifest.files, MANIFEST, DONE):
            depot.put_file(f"{place}/{name}", folder / name)
