"""A Hugging Face checkpoint folder on an engine's host that is kept current in place.

    <folder>/config.json, *.safetensors, ...    what an engine loads
    <folder>/.turnout/state.json                what these files are (turnout.weights.host_state)
    <folder>/.turnout/redo.log                  a delta that is being applied (turnout.weights.journal)
    <folder>/.turnout/incoming/                 files of versions on their way
    <folder>/.turnout/lock                      held by the one process that writes here

Drives turnout.weights.host_apply_machine. Promises: killed at any instant, `open` ends bit-exact at the version
before or the one after, or at nothing that counts; no mix is ever named as a version. A fault of the disk loses
nothing: what is held stays, or the next `open` finishes what had begun. `open` recomputes every digest.
Engines must not load from the folder while it is written: who calls this also asks them to load.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from turnout.core.errors import ConfigError, Fault, InvariantBroken, WeightError
from turnout.core.version import WeightVersion
from turnout.weights.checkpoint_io import INDEX, WEIGHT_SUFFIXES, read_checkpoint
from turnout.weights.digest import Line, root_digest, tensor_digest
from turnout.weights.host_apply_machine import (
    TABLE,
    Adopted,
    Anchor,
    Delta,
    Effect,
    Event,
    Failed,
    Fetched,
    HostState,
    Logged,
    Opened,
    Overwritten,
    Phase,
    Switched,
    step,
)
from turnout.weights.host_checks import check_finite, check_form, check_full, check_names, check_run, redos
from turnout.weights.host_files import HostFiles
from turnout.weights.host_state import LocalState, read_state
from turnout.weights.host_tensors import MappedTensors
from turnout.weights.journal import LogHead, read_log, sync_log, write_log
from turnout.weights.manifest import DONE, MANIFEST, WeightManifest
from turnout.weights.tensors import HostTensor

PRIVATE, STATE, LOG, INCOMING, LOCK = ".turnout", "state.json", "redo.log", "incoming", "lock"
FETCH, VERIFY, JOURNAL_WRITE, JOURNAL_FSYNC = "fetch", "verify", "journal write", "journal fsync"
OVERWRITE, STATE_MOVE, SWITCH = "overwrite", "state move", "switch"
Fetch = Callable[[WeightManifest, Path], None]  # brings a version's files into a folder, checksums compared
NAMES_SHOWN = 5


@dataclass(frozen=True)
class Job:
    """The version that is being taken."""

    manifest: WeightManifest
    fetch: Fetch


class LocalCheckpoint:
    """See the module. One process and one thread at a time. `watch` is told the phase that begins."""

    def __init__(
        self, folder: Path, files: HostFiles | None = None, watch: Callable[[str], None] = lambda _: None
    ) -> None:
        self.folder, self._private = folder, folder / PRIVATE
        self._files, self._watch = files if files is not None else HostFiles(), watch
        self._machine = HostState()
        self._local: LocalState | None = None
        self._tensors: MappedTensors | None = None
        self._job: Job | None = None
        self._lock: BinaryIO | None = None

    @property
    def held(self) -> WeightVersion | None:
        """The version that the files are, None while that is unknown."""
        settled = self._machine.phase is Phase.SETTLED and self._local is not None
        return self._local.version if settled and self._local is not None else None

    @property
    def run_id(self) -> str | None:
        """Whose weights the folder holds or held, None where nobody's."""
        return self._local.run_id if self._local is not None else None

    def open(self) -> str | None:
        """Finds out what is there and finishes what had begun. Returns why what was held counts no longer, None
        where nothing was lost. May be called again after a fault; raises ConfigError where another process holds
        the folder or its state can't be read, and OSError."""
        if not self._private.is_dir():
            self._private.mkdir(parents=True)
            self._files.sync_path(self.folder)
        self._take_lock()
        self._machine, self._job, self._tensors = HostState(), None, None
        self._local = read_state(self._private / STATE)
        root = self._local.version.root if self._local is not None else None
        found = Opened(root, self._local is not None and self._local.beside != "", self._whole_log())
        try:
            self._feed(found)
            if self._machine.phase is Phase.SETTLED:
                self.audit()
        except WeightError as fault:
            return str(fault)
        return None

    def close(self) -> None:
        self._tensors, self._machine = None, HostState()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def adopt(self, run_id: str, known: Mapping[str, WeightVersion]) -> None:
        """Takes over a model that somebody put into the folder, where its root is one of `known`; nothing where the
        folder has no weights. Raises ConfigError for other weights: they are not ours to overwrite."""
        weights = self._weights_here()
        if self._local is not None or not weights:
            return
        if any(path.is_symlink() for path in weights):
            raise _not_ours(self.folder, "its weights are links", "give a folder with files of its own")
        tensors = list(read_checkpoint(self.folder))
        lines = {t.name: (t.dtype, t.shape, tensor_digest(t)) for t in tensors}
        root = root_digest(lines)
        if root not in known:
            raise _not_ours(self.folder, f"its weights (root {root}) are no version of this store")
        check_finite(tensors)
        for name in (MANIFEST, DONE):  # they would speak of files that change from here on
            self._files.remove(self.folder / name)
        names = tuple(sorted(path.name for path in self.folder.iterdir() if path.is_file()))
        self._local = LocalState(run_id, known[root], 0, "", names, lines)
        self._feed(Adopted(root))
        self.audit()

    def apply(self, manifest: WeightManifest, fetch: Fetch) -> None:
        """Brings the files from `held` to a delta version based on it. Raises WeightError for a version that is not
        what it should be, with nothing changed; OSError as the disk does (`open` again where `held` is None)."""
        local = self._settled()
        if manifest.base is None:
            raise WeightError(f"{manifest.version.label} names no base")
        check_names(manifest, PRIVATE)
        check_run(local, manifest)
        check_form(local, manifest)
        self._job = Job(manifest, fetch)
        self._feed(Delta(manifest.base.root, manifest.version.root))

    def load(self, manifest: WeightManifest, fetch: Fetch) -> None:
        """Puts a full version in the place of whatever is held; raises as `apply`. What is held stays until the new
        files are complete, verified and synced."""
        check_names(manifest, PRIVATE)
        if self._local is not None:
            check_run(self._local, manifest)
        elif self._weights_here():
            raise _not_ours(self.folder, "it holds weights that are not ours to replace")
        self._job = Job(manifest, fetch)
        self._feed(Anchor(manifest.version.root))
        self.audit()

    def rename(self, manifest: WeightManifest) -> None:
        """The held weights under the name of another version with the same root."""
        local = self._settled()
        check_run(local, manifest)
        if manifest.version.root != local.version.root:
            raise InvariantBroken(f"{manifest.version.label} is no other name of {local.version.label}")
        self._local = replace(local, version=manifest.version, step=manifest.step)
        self._feed(Adopted(manifest.version.root))

    def tensors(self) -> Iterator[HostTensor]:
        """All tensors of what is held, as views that change with the files."""
        self._settled()
        yield from self._mapped()

    def audit(self) -> None:
        """Recomputes every digest; raises WeightError, and holds nothing then, where the files are not what the
        state says."""
        assert self._local is not None and self._machine.phase is Phase.SETTLED, "there is nothing to audit"
        try:
            found = self._mapped().lines()
            wrong = [n for n in {*found, *self._local.tensors} if found.get(n) != self._local.tensors.get(n)]
            if wrong:
                names = ", ".join(sorted(wrong)[:NAMES_SHOWN])
                raise WeightError(f"{self.folder}: not what its state says: {names}")
        except WeightError:
            self._feed(Failed())
            raise

    def _settled(self) -> LocalState:
        if self.held is None or self._local is None:
            raise InvariantBroken(f"{self.folder} holds no version")
        return self._local

    def _feed(self, event: Event) -> None:
        events = [event]
        while events:
            self._machine, effects = step(self._machine, events.pop(0))
            for effect in effects:
                try:
                    followed = self._perform(effect)
                except BaseException as fault:
                    self._failed(fault)
                    raise
                if followed is not None:
                    events.append(followed)

    def _failed(self, fault: BaseException) -> None:
        """A digest that is not right says that what is held is unknown; after a fault of the disk in an act that
        is already announced, only `open` can tell."""
        announced = self._machine.phase not in (Phase.JOURNALING, Phase.FETCHING)
        if announced and not (isinstance(fault, WeightError) and TABLE.allows(self._machine.phase, Failed)):
            self._machine = HostState()
            return
        self._feed(Failed())

    def _perform(self, effect: Effect) -> Event | None:
        return {
            Effect.WRITE_LOG: self._write_log,
            Effect.OVERWRITE: self._overwrite,
            Effect.SETTLE: self._settle,
            Effect.DROP_LOG: self._drop_log,
            Effect.FETCH: self._fetch,
            Effect.ANNOUNCE: self._announce,
            Effect.MOVE_FILES: self._move_files,
        }[effect]()

    def _write_log(self) -> Event:
        job = self._at_work()
        assert self._local is not None, "a delta begins from what is held"
        manifest = job.manifest
        incoming = self._incoming(manifest)
        job.fetch(manifest, incoming)
        self._watch(JOURNAL_WRITE)
        changed = sum(entry.count > 0 for entry in manifest.tensors.values())
        head = LogHead(self._local.version.root, manifest.version, manifest.step, changed)
        write_log(self._files, self._private / LOG, head, redos(manifest, incoming, self._mapped()))
        self._watch(JOURNAL_FSYNC)
        sync_log(self._files, self._private / LOG)
        return Logged()

    def _overwrite(self) -> Event:
        self._watch(OVERWRITE)
        head, records = read_log(self._private / LOG)
        assert self._local is not None, "a log without a state is dropped"
        tensors, lines = self._mapped(), dict(self._local.tensors)
        for redo in records:
            found = tensors.write(redo)
            if found != redo.after:
                raise WeightError(f"{redo.name} has the digest {found} after its change, not {redo.after}")
            lines[redo.name] = (redo.dtype, redo.shape, found)
        if root_digest(lines) != head.target.root:
            raise WeightError(f"the tensors after {head.target.label} have another root digest")
        tensors.flush()
        self._local = replace(self._local, version=head.target, step=head.step, tensors=lines)
        return Overwritten()

    def _settle(self) -> None:
        self._watch(STATE_MOVE)
        assert self._local is not None
        self._local = replace(self._local, beside="")
        self._files.write(self._private / STATE, self._local.to_bytes())

    def _drop_log(self) -> None:
        self._files.remove(self._private / LOG)
        if self._machine.phase is Phase.SETTLED:  # else a fetch that was cut off goes on from what came
            self._files.remove(self._private / INCOMING)

    def _fetch(self) -> Event:
        job = self._at_work()
        incoming = self._incoming(job.manifest)
        job.fetch(job.manifest, incoming)
        self._watch(VERIFY)
        check_full(job.manifest, incoming)
        for name in job.manifest.files:
            self._files.sync_path(incoming / name)
        for folder in (incoming, incoming.parent):
            self._files.sync_path(folder)
        return Fetched()

    def _announce(self) -> None:
        self._watch(STATE_MOVE)
        manifest = self._at_work().manifest
        lines: dict[str, Line] = {n: (e.dtype, e.shape, e.digest) for n, e in manifest.tensors.items()}
        names = tuple(sorted(manifest.files))
        self._local = LocalState(
            manifest.run_id, manifest.version, manifest.step, manifest.directory, names, lines
        )
        self._files.write(self._private / STATE, self._local.to_bytes())

    def _move_files(self) -> Event:
        """Each file is beside or already in its place."""
        self._watch(SWITCH)
        local = self._local
        assert local is not None
        self._tensors = None
        beside = self._private / INCOMING / local.beside
        for name in local.files:
            if (beside / name).exists():
                self._files.rename(beside / name, self.folder / name)
        for path in self._weights_here():
            if path.name not in local.files:
                self._files.remove(path)
        self._files.sync_path(self.folder)
        return Switched()

    def _mapped(self) -> MappedTensors:
        """The tensors of the files that the state names, mapped once."""
        assert self._local is not None
        if self._tensors is None:
            paths = [self.folder / name for name in self._local.files if name.endswith(".safetensors")]
            missing = [path.name for path in paths if not path.is_file()]
            if missing:
                raise WeightError(f"{self.folder}: missing: {', '.join(missing[:NAMES_SHOWN])}")
            self._tensors = MappedTensors(paths, self._files)
        return self._tensors

    def _whole_log(self) -> tuple[str, str] | None:
        try:
            head, _ = read_log(self._private / LOG)
        except (WeightError, FileNotFoundError):
            return None  # nothing was overwritten before it was whole
        return head.base, head.target.root

    def _at_work(self) -> Job:
        assert self._job is not None
        return self._job

    def _incoming(self, manifest: WeightManifest) -> Path:
        """The folder for a version's files; what other versions left there goes."""
        parent, folder = self._private / INCOMING, self._private / INCOMING / manifest.directory
        for other in sorted(parent.iterdir()) if parent.is_dir() else []:
            if other != folder:
                self._files.remove(other)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _weights_here(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        paths = sorted(self.folder.iterdir())
        return [p for p in paths if not p.is_dir() and (p.suffix in WEIGHT_SUFFIXES or p.name == INDEX)]

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        lock = (self._private / LOCK).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            lock.close()
            raise _not_ours(self.folder, "it is kept by another process", "end that one") from fault
        self._lock = lock


def _not_ours(
    folder: Path,
    reason: str,
    remedy: str = "give an empty folder, or one with the model that the run began from",
) -> ConfigError:
    return ConfigError(Fault("--local-checkpoint", str(folder), reason, remedy))
