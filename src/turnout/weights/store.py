"""The weight store: one folder per run, one immutable folder per version.

    <root>/run.json                 run id and base root digest; another run's store is refused
    <root>/weight_v000123/          an ordinary Hugging Face checkpoint, then manifest.json, then DONE
    <root>/PUBLISHED/000123.json    {incarnation, counter, root, write_id}; created once, also for a version that
                                    reached engines without a folder

Promises: a version folder appears whole or not at all; a counter is never given out twice, also after a kill
between the folder and its PUBLISHED record; nothing is written where less than two versions' worth is free;
leftovers of an interrupted write are removed when the store is opened. One publisher per store; its methods
block, so that the caller picks the thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from turnout.core.errors import WeightError
from turnout.core.ports import Store
from turnout.core.rng import IdSource, random_id
from turnout.core.version import WeightVersion
from turnout.weights.checkpoint_io import Written, copy_assets, write_checkpoint
from turnout.weights.delta_io import TensorDelta, write_delta
from turnout.weights.manifest import DELTA, FULL, WeightManifest, complete_versions, seal
from turnout.weights.tensors import HostTensor
from turnout.weights.verify import file_checksum

_FOLDER = re.compile(r"weight_v(\d{6,})")
_RECORD = re.compile(r"(\d{6,})\.json")
MakeManifest = Callable[[Written, dict[str, str]], WeightManifest]


@dataclass(frozen=True)
class Published:
    """One version on disk."""

    version: WeightVersion
    folder: Path
    bytes: int


class WeightStore:
    """The publisher's handle on a store. `assets` is the checkpoint whose config and tokenizer each version
    carries; `shard_bytes` bounds a file, and with it the memory that a write holds."""

    def __init__(
        self, root: Path, files: Store, assets: Path, shard_bytes: int, ids: IdSource = random_id
    ) -> None:
        self.root, self._files, self._assets, self._shard_bytes = root, files, assets, shard_bytes
        self._ids = ids
        self._run_id, self._incarnation = "", 0

    def open(self, run_id: str, incarnation: int, base_root: str) -> None:
        """Creates the store or joins it again; raises WeightError where it belongs to another run, or where
        its files cannot be read or written."""
        self._run_id, self._incarnation = run_id, incarnation
        records = self.root / "PUBLISHED"
        with self._told("cannot be opened"):
            records.mkdir(parents=True, exist_ok=True)
            mine = {"run_id": run_id, "base_root": base_root}
            if not self._files.create_once(self.root / "run.json", json.dumps(mine).encode()):
                self._check_owner(mine)
            for folder in (self.root, records):
                for name in self._files.names(folder):
                    if ".tmp-" in name or name.startswith(".removed-"):
                        self._files.remove_tree(folder / name)

    def newest_counter(self) -> int:
        """The highest counter ever given out here, 0 where there is none."""
        folders = [_FOLDER.fullmatch(name) for name in self._files.names(self.root)]
        records = [_RECORD.fullmatch(name) for name in self._files.names(self.root / "PUBLISHED")]
        return max((int(match.group(1)) for match in [*folders, *records] if match), default=0)

    def publish(self, tensors: Iterable[HostTensor], step: int) -> Published:
        """Writes the next version in full and returns it; raises WeightError, leaving nothing half-written behind,
        where there is too little room, a file operation fails or another publisher was faster."""

        def write(staged: Path) -> Written:
            copy_assets(self._assets, staged)
            return write_checkpoint(staged, tensors, self._shard_bytes)

        return self._publish(write, step, FULL)

    def publish_delta(
        self, deltas: Iterable[TensorDelta], base: WeightVersion, encoding: str, step: int
    ) -> Published:
        """Writes the next version as what changed since `base`; raises as `publish` does."""

        def write(staged: Path) -> Written:
            return write_delta(staged, deltas, encoding, self._shard_bytes)

        return self._publish(write, step, DELTA, base, encoding)

    def _publish(
        self,
        write: Callable[[Path], Written],
        step: int,
        kind: str,
        base: WeightVersion | None = None,
        encoding: str = "",
    ) -> Published:
        with self._told("no version could be written"):
            counter, write_id = self.newest_counter() + 1, self._ids()
            self._check_room(counter)

            def manifest(written: Written, checksums: dict[str, str]) -> WeightManifest:
                version = WeightVersion(self._incarnation, counter, written.root)
                origin = (self._run_id, write_id)
                content = (written.files, written.tensors, checksums)
                return WeightManifest(version, kind, step, *origin, *content, base, encoding)

            made = self._write(write, manifest, counter, write_id)
            self._publish_record(made.version, write_id)
        folder = self.root / made.version.directory
        return Published(made.version, folder, sum(made.files.values()))

    def record(self, root: str) -> WeightVersion:
        """Gives out the next version for weights that reach engines another way: a PUBLISHED record, no folder.
        Raises as `publish` does."""
        with self._told("no version could be recorded"):
            version = WeightVersion(self._incarnation, self.newest_counter() + 1, root)
            self._publish_record(version, self._ids())
        return version

    def versions(self) -> list[WeightManifest]:
        """The complete versions, oldest first; an incomplete folder is left out."""
        return complete_versions(self.root)

    def prune(self, keep: set[int]) -> list[int]:
        """Removes every version folder whose counter is not in `keep`; returns the counters removed."""
        matches = [_FOLDER.fullmatch(name) for name in self._files.names(self.root)]
        gone = [int(match.group(1)) for match in matches if match and int(match.group(1)) not in keep]
        with self._told("an old version cannot be removed"):
            for counter in gone:
                self._files.remove_tree(self.root / f"weight_v{counter:06d}")
        return gone

    def _publish_record(self, version: WeightVersion, write_id: str) -> None:
        """Creates the version's record, once."""
        record = json.dumps({**asdict(version), "write_id": write_id}).encode()
        if not self._files.create_once(self.root / "PUBLISHED" / f"{version.counter:06d}.json", record):
            raise WeightError(
                f"version {version.counter} was published by somebody else: is another trainer running?"
            )

    def _write(
        self, write: Callable[[Path], Written], manifest: MakeManifest, counter: int, write_id: str
    ) -> WeightManifest:
        """Stages a version beside its place and renames it there."""
        staged = self.root / f"weight_v{counter:06d}.tmp-{write_id}"
        staged.mkdir()
        try:
            written = write(staged)
            made = manifest(written, {name: file_checksum(staged / name) for name in written.files})
            seal(staged, made)
            self._files.publish_folder(staged, self.root / made.version.directory)
        except BaseException:
            with suppress(OSError):  # the first fault is the one to tell; `open` removes what stays
                if staged.exists():
                    self._files.remove_tree(staged)
            raise
        return made

    def _check_owner(self, mine: dict[str, str]) -> None:
        try:
            found = json.loads(self._files.read(self.root / "run.json"))
        except ValueError as fault:
            raise WeightError(f"{self.root / 'run.json'} is not the record of a run: {fault}") from fault
        if not isinstance(found, dict):
            raise WeightError(f"{self.root / 'run.json'} is not the record of a run: {found!r}")
        if found != mine:
            raise WeightError(
                f"{self.root} belongs to run {found.get('run_id')} on base {found.get('base_root')}, this is "
                f"run {mine['run_id']} on base {mine['base_root']}: give it another --update-weight-disk-dir"
            )

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Faults of the file system as WeightErrors that name the store."""
        try:
            yield
        except OSError as fault:
            raise WeightError(f"{self.root}: {what}: {fault}") from fault

    def _check_room(self, counter: int) -> None:
        sizes = [sum(manifest.files.values()) for manifest in self.versions()[-1:]]
        needed = 2 * max(sizes, default=0)
        free = self._files.free_bytes(self.root)
        if free < needed:
            raise WeightError(
                f"version {counter} is not written: {free} bytes free in {self.root}, "
                f"two versions need {needed}; free some room or give another --update-weight-disk-dir"
            )
