"""The weight store: one folder per run, one immutable folder per version (docs/weights.md has the format).

    <root>/run.json, INCARNATIONS/, PUBLISHED/     whose it is, who writes it, what was published
    <root>/weight_v000123/                         the version's files, then manifest.json, then DONE
    <root>/anchor_v000123/                         the same in full, beside a delta

Promises: a version folder appears whole or not at all; a counter is never given out twice, also after a kill
between the folder and its PUBLISHED record; an incarnation that was taken over writes and removes nothing more;
nothing is written where less than two versions' worth is free; leftovers of an interrupted write are removed when
the store is opened. One publisher per store; its methods block, so that the caller picks the thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnout.core.errors import WeightError
from turnout.core.ports import Store
from turnout.core.rng import IdSource, random_id
from turnout.core.version import WeightVersion
from turnout.weights.catalog import (
    FOLLOWERS,
    INCARNATIONS,
    RECORDS,
    Catalog,
    Identity,
    StoreReader,
    version_of,
)
from turnout.weights.checkpoint_io import Written, copy_assets, write_checkpoint
from turnout.weights.delta_io import TensorDelta, write_delta
from turnout.weights.depot import FolderDepot
from turnout.weights.manifest import ANCHOR, DELTA, FULL, VERSION, WeightManifest, folder_counter, seal
from turnout.weights.mirror import Mirror
from turnout.weights.ownership import Ownership
from turnout.weights.retention import FollowerWatch, Holders, removable
from turnout.weights.tensors import HostTensor
from turnout.weights.verify import file_checksum

_RECORD = re.compile(r"(\d{6,})\.json")
FOLLOWER_EXPIRY_S = 3600.0
PINS = 2  # as many checkpoints as a run keeps


@dataclass(frozen=True)
class Published:
    """One version on disk."""

    version: WeightVersion
    folder: Path
    bytes: int


@dataclass(frozen=True)
class _Plan:
    """What is about to be written, and how: `write` fills a folder, `version` is None where the next counter is
    taken."""

    write: Callable[[Path], Written]
    step: int
    kind: str
    base: WeightVersion | None = None
    encoding: str = ""
    version: WeightVersion | None = None


class WeightStore:
    """The publisher's handle on a store. `assets` is the checkpoint whose config and tokenizer each version
    carries; `shard_bytes` bounds a file, and with it the memory that a write holds (two files' worth).

    To be set before `open`, where wanted: `mirror`, to which every version is copied before it counts as
    published; `wall`, the time of day for manifests; `post_write`, called with each folder that is complete,
    before its record; `followers`, which of them live."""

    def __init__(
        self, root: Path, files: Store, assets: Path, shard_bytes: int, ids: IdSource = random_id
    ) -> None:
        self.root, self._files, self._assets, self._shard_bytes = root, files, assets, shard_bytes
        self._ids = ids
        depot = FolderDepot(root, files)
        self._owner, self._reader = Ownership(depot), StoreReader(depot)
        self._topology: dict[str, Any] = {}
        self._committed: set[int] = set()
        self._pins: list[WeightVersion] = []
        self._kept: list[WeightVersion] = []
        self._floor = 0
        self.mirror: Mirror | None = None
        self.post_write: Callable[[Path], None] | None = None
        self.wall: Callable[[], float] = lambda: 0.0
        self.followers = FollowerWatch(FOLLOWER_EXPIRY_S)

    def open(
        self,
        run_id: str,
        incarnation: int,
        base_root: str,
        start: int = 0,
        topology: dict[str, Any] | None = None,
    ) -> None:
        """Creates the store or joins it again. `start` is the counter of the version from which this incarnation
        goes on: versions of older ones above it are abandoned. `topology` goes into each manifest. Raises
        WeightError where the store belongs to another run, model or base, where a newer incarnation has opened
        it, or where its files cannot be read or written."""
        self._topology = {} if topology is None else topology
        with self._told("cannot be opened"):
            (self.root / RECORDS).mkdir(parents=True, exist_ok=True)
            config = self._assets / "config.json"
            model = file_checksum(config) if config.is_file() else ""
            claim = (Identity(run_id, model, base_root), incarnation, start, self._ids())
            self._owner.join(*claim)
            self._sweep()
        if self.mirror is not None:
            self.mirror.join(*claim)
            self._floor = self.mirror.newest_counter()
        found = self._reader.look()
        self._committed = {n for n, version in found.records.items() if not found.lineage.abandoned(version)}

    def newest_counter(self) -> int:
        """The highest counter ever given out here, 0 where there is none."""
        folders = [folder_counter(name) for name in self._files.names(self.root)]
        records = [_RECORD.fullmatch(name) for name in self._files.names(self.root / RECORDS)]
        given = [int(match.group(1)) for match in records if match]
        return max(self._floor, *given, *(counter for counter in folders if counter is not None), 0)

    def publish(self, tensors: Iterable[HostTensor], step: int) -> Published:
        """Writes the next version in full and returns it; raises WeightError, leaving nothing half-written behind,
        where there is too little room, a file operation fails or another publisher was faster."""

        return self._publish(_Plan(self._in_full(tensors), step, FULL))

    def publish_delta(
        self, deltas: Iterable[TensorDelta], base: WeightVersion, encoding: str, step: int
    ) -> Published:
        """Writes the next version as what changed since `base`; raises as `publish` does."""

        def write(staged: Path) -> Written:
            return write_delta(staged, deltas, encoding, self._shard_bytes)

        return self._publish(_Plan(write, step, DELTA, base, encoding))

    def publish_anchor(self, tensors: Iterable[HostTensor], version: WeightVersion, step: int) -> Published:
        """Writes a published delta version in full, beside it. Raises WeightError as `publish` does, or where the
        tensors are not that version's."""
        return self._publish(_Plan(self._in_full(tensors), step, FULL, version=version))

    def record(self, root: str) -> WeightVersion:
        """Gives out the next version for weights that reach engines another way: a PUBLISHED record, no folder.
        Raises as `publish` does."""
        with self._told("no version could be recorded"):
            version = WeightVersion(self._owner.incarnation, self.newest_counter() + 1, root)
            self._owner.publish(version, self._ids())
        self._sync()
        return version

    def versions(self) -> list[WeightManifest]:
        """The complete folders of published versions that are not abandoned, by counter."""
        return self._reader.look().usable()

    def pin(self, version: WeightVersion) -> None:
        """A checkpoint goes on from this version: of the last two such, nothing that makes them is removed."""
        self._pins = [*self._pins, version][-PINS:]

    def check(self) -> None:
        """Raises WeightError where a newer incarnation of the run has opened the store."""
        with self._told("it cannot be seen whose it is"):
            self._owner.check()

    def keep(self, version: WeightVersion) -> None:
        """The version is wanted as long as the run lasts: nothing that makes it is removed."""
        self._kept.append(version)

    def release(self, version: WeightVersion) -> None:
        """The version is kept no more."""
        self._kept.remove(version)

    def retain(
        self, committed: WeightVersion, now: float, engines: Iterable[WeightVersion] = ()
    ) -> list[str]:
        """Removes what nobody needs any more (turnout.weights.retention) and returns the folders. Every required
        engine has attested `committed`; `engines` are what slower ones have. `now` is monotonic, in seconds."""
        self._committed.add(committed.counter)

        def unneeded(found: Catalog, place: str) -> list[str]:
            rows = {f"{place}/{name}": row for name, row in found.followers.items()}
            return removable(
                found.usable(),
                Holders(
                    self._owner.identity.base_root,
                    frozenset(self._committed),
                    (committed, *engines),
                    tuple(version_of(rows[name], name) for name in self.followers.live(rows, now)),
                    (*self._pins, *self._kept),
                ),
            )

        with self._told("an old version cannot be removed"):
            self._owner.check()
            found = self._reader.look()
            gone = [*found.useless(committed), *unneeded(found, str(self.root))]
            for folder in gone:
                self._owner.check()
                self._files.remove_tree(self.root / folder)
        if self.mirror is not None:
            mirror = self.mirror.depot.name
            self.mirror.retain(committed, lambda catalog: unneeded(catalog, mirror))
        return gone

    def _sync(self) -> None:
        if self.mirror is not None:
            self.mirror.sync(self.root, self._reader.look())

    def _in_full(self, tensors: Iterable[HostTensor]) -> Callable[[Path], Written]:
        def write(staged: Path) -> Written:
            copy_assets(self._assets, staged)
            return write_checkpoint(staged, tensors, self._shard_bytes)

        return write

    def _publish(self, plan: _Plan) -> Published:
        """Stages a version beside its place, renames it there, and then publishes its number."""
        with self._told("no version could be written"):
            self._owner.check()
            counter = self.newest_counter() + 1 if plan.version is None else plan.version.counter
            self._check_room(counter, plan.kind)
            write_id = self._ids()
            staged = self.root / f"weight_v{counter:06d}.tmp-{write_id}"
            staged.mkdir()
            try:
                made = self._stage(staged, plan, counter, write_id)
                self._owner.check()
                self._files.publish_folder(staged, self.root / made.directory)
            except BaseException:
                with suppress(OSError):  # the first fault is the one to tell; `open` removes what stays
                    if staged.exists():
                        self._files.remove_tree(staged)
                raise
            if self.post_write is not None:
                self.post_write(self.root / made.directory)
            if plan.version is None:
                self._owner.publish(made.version, write_id)
        self._sync()
        return Published(made.version, self.root / made.directory, made.nbytes)

    def _stage(self, staged: Path, plan: _Plan, counter: int, write_id: str) -> WeightManifest:
        written = plan.write(staged)
        checksums = {
            name: written.checksums[name] if name in written.checksums else file_checksum(staged / name)
            for name in written.files
        }
        version = WeightVersion(self._owner.incarnation, counter, written.root)
        if plan.version is not None and plan.version.root != written.root:
            raise WeightError(f"{plan.version.label} in full has the root digest {written.root}")
        made = WeightManifest(
            version if plan.version is None else plan.version,
            plan.kind,
            plan.step,
            self._owner.identity.run_id,
            write_id,
            written.files,
            written.tensors,
            checksums,
            plan.base,
            plan.encoding,
            self._topology,
            VERSION if plan.version is None else ANCHOR,
            self.wall(),
        )
        seal(staged, made)
        return made

    def _sweep(self) -> None:
        """Removes what an interrupted write or removal left."""
        for folder in (self.root, *(self.root / name for name in (RECORDS, INCARNATIONS, FOLLOWERS))):
            for name in self._files.names(folder):
                if ".tmp-" in name or name.startswith(".removed-"):
                    self._files.remove_tree(folder / name)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Faults of the file system as WeightErrors that name the store."""
        try:
            yield
        except OSError as fault:
            raise WeightError(f"{self.root}: {what}: {fault}") from fault

    def _check_room(self, counter: int, kind: str) -> None:
        """Two versions of this kind must fit, by the size of the last one."""
        sizes = [manifest.nbytes for manifest in self.versions() if manifest.kind == kind][-1:]
        needed = 2 * max(sizes, default=0)
        free = self._files.free_bytes(self.root)
        if free < needed:
            raise WeightError(
                f"version {counter} is not written: {free} bytes free in {self.root}, "
                f"two versions need {needed}; free some room or give another --update-weight-disk-dir"
            )
