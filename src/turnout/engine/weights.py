"""The weights that are served: stage new ones beside them, check, activate, attest.

Promises: staging changes nothing that is served and raises WeightError with every fault found (names both ways,
shapes, dtypes, non-finite values, a digest that is not the manifest's); `activate` puts what was staged into place
between two steps, whole or not at all: new buffers are swapped in, single elements written. The root digest is
computed from the very buffers that are served then: from all of their elements, or from what was read in them
before and after the write. An update may name some tensors only: the others keep their buffers and digests.
No weight has a derived copy beside it: what a storage holds is the only one, packed or quantised. (`Staging` takes
whole tensors; turnout.engine.delta takes changes.)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from turnout.core.errors import WeightError, WeightsUnknown
from turnout.engine.live_dtypes import EXACT
from turnout.engine.staged import Measured, Patches, Staged, measure, measured_as, shown
from turnout.engine.storage import Buffer, Storage
from turnout.weights.buckets import Slot
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import Line, Sums, root_digest
from turnout.weights.manifest import DONE, MANIFEST, load_manifest
from turnout.weights.tensors import ITEM_BYTES, HostTensor, converted, nonfinite_count

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a derived buffer that old Llama checkpoints carry
READ_TRIES = 100  # of a tensor that updates keep writing meanwhile
Fill = Callable[[Mapping[str, Buffer], frozenset[str]], list[str]]


class LiveWeights:
    """See the module. Staging may run in any one thread; `activate` belongs to the thread that computes.
    `generation` grows with every change, and is odd while elements are being written."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.measured: dict[str, Measured] = {}
        self.generation = 0
        self._holding = threading.Lock()  # live buffers are not released while somebody reads one

    @property
    def lines(self) -> dict[str, Line]:
        """By name; empty where it is not known what is held."""
        return {name: measured.line for name, measured in self.measured.items()}

    @property
    def root(self) -> str:
        return root_digest(self.lines)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the model in their live dtypes, a tied one as often as it has names."""
        return sum(math.prod(s.shape) * ITEM_BYTES[s.dtype] for s in self.storage.specs.values())

    def stage_folder(self, folder: Path, may_round: bool = False) -> Staged:
        """A whole checkpoint folder. `may_round` lets float32 values be rounded to bf16, as at the start only."""
        if not folder.is_dir():
            raise WeightError(f"{folder}: no such folder")
        manifest = None
        if (folder / MANIFEST).exists() or (folder / DONE).exists():
            manifest = load_manifest(folder)
            if manifest.kind != "full":
                raise WeightError(f"{folder}: holds a {manifest.kind} version; a full one is needed")
        staging = Staging(self, may_round, whole=True)
        try:
            for tensor in read_checkpoint(folder):
                staging.add(tensor)
            staged = staging.seal(complete=True)
        except WeightError as fault:
            raise WeightError(f"{folder}: {str(fault).removeprefix(f'{folder}: ')}") from fault
        if manifest is not None and staged.root != manifest.version.root:
            raise WeightError(
                f"{folder}: root digest {staged.root}, the manifest says {manifest.version.root}"
            )
        return replace(staged, manifest=manifest)

    def activate(self, staged: Staged) -> str:
        """Serves what was staged from here on and returns the root digest. Raises WeightError, with nothing
        changed, where the live weights are others than those the update was staged beside; WeightsUnknown where
        something else was found after the write than was staged."""
        if not staged.full and staged.generation != self.generation:
            raise WeightError("another update came between staging and activation; stage again")
        self.generation += 1
        try:
            if staged.buffers:
                self.storage.swap(staged.buffers)
            if staged.patches is not None:
                self._write(staged.patches)
        finally:
            self.generation += 1
        self.measured = staged.measured
        return staged.root

    def forget(self) -> None:
        """It is no longer known what is held: only a full update can be staged."""
        self.measured = {}
        self.generation += 2

    def release(self) -> int:
        """Frees the live buffers: from here on only a full update can be staged. Returns bytes freed."""
        with self._holding:
            self.forget()
            return self.storage.release()

    def read(self, name: str) -> HostTensor:
        """A copy of one live tensor, of one version; raises WeightError for an unknown name. Not while they are
        released."""
        spec = self.storage.specs.get(name)
        if spec is None:
            raise WeightError(f"{name} is not a tensor of this model")
        for _ in range(READ_TRIES):
            generation = self.generation
            bits = np.array(self.storage.read(self.storage.live(spec.buffer), name))
            if generation == self.generation and generation % 2 == 0:
                return HostTensor(name, spec.dtype, spec.shape, bits)
        raise WeightError(f"{name} was changed by updates each of the {READ_TRIES} times that it was read")

    def verify(self) -> dict[str, Line]:
        """All digests, computed anew from live memory; raises WeightError that names what has changed unseen."""
        found = {name: self._measure(name, measured.line[0]) for name, measured in self.measured.items()}
        _tell([name for name, measured in self.measured.items() if found[name].line != measured.line])
        return {name: measured.line for name, measured in found.items()}

    def audit(self, stop: threading.Event) -> int:
        """`verify` beside updates, which may come at any time: a tensor that one changes meanwhile is read again.
        Returns the generation that all of it belongs to, -1 where there is none such; ends early when told to."""
        began, wrong = self.generation, []
        for name in list(self.measured):
            for _ in range(READ_TRIES):
                generation, known = self.generation, self.measured.get(name)
                if known is None or stop.is_set():
                    return -1
                with self._holding:
                    if generation % 2 or generation != self.generation:
                        continue
                    found = self._measure(name, known.line[0])
                if generation == self.generation:
                    wrong += [name] if found.line != known.line else []
                    break
        _tell(wrong)
        return began if began == self.generation else -1

    def _write(self, patches: Patches) -> None:
        try:
            moved = self.storage.exchange(patches.prepared, {}, write=True)
        except WeightError as fault:
            self.measured = {}
            raise WeightsUnknown(str(fault)) from fault
        if moved != patches.moves:
            self.measured = {}
            other = [name for name, *sums in zip(patches.names, moved, patches.moves) if sums[0] != sums[1]]
            raise WeightsUnknown(f"after the write other weights were read than staged: {shown(other)}")

    def _measure(self, name: str, dtype: str) -> Measured:
        return measure(self.storage, self.storage.live(self.storage.specs[name].buffer), name, dtype)


class Staging:
    """One update while its tensors come in, in any order and any buckets; then `seal`. `whole`: all are expected to
    come, so that memory for all is taken with the first."""

    def __init__(self, weights: LiveWeights, may_round: bool = False, whole: bool = False) -> None:
        self._weights, self._storage, self._may_round = weights, weights.storage, may_round
        self._whole = whole
        self._fresh: dict[str, Buffer] = {}
        self._buffers: dict[str, Buffer] = {}
        self._given: dict[str, str] = {}  # name -> dtype as given
        # of tensors that were read back when they were written, as they live
        self._sums: dict[str, Sums] = {}
        self._faults: list[str] = []
        self._generation = weights.generation

    def add(self, tensor: HostTensor) -> None:
        """Takes one tensor over (its bits are copied). Faults are kept for `seal`, so that all are told at once."""
        if tensor.name.endswith(IGNORED_SUFFIX):
            return
        faults = self._faults_of(tensor.name, tensor.dtype, tensor.shape)
        if faults:
            self._faults.extend(faults)
            return
        buffer = self._buffer_of(tensor.name)
        bits = converted(tensor, self._storage.specs[tensor.name].dtype).bits
        twin = self._twin(tensor.name)
        if twin is not None and not np.array_equal(self._storage.read(buffer, twin), bits):
            self._faults.append(f"{twin} and {tensor.name} are tied in this model and differ in the update")
            return
        written = self._storage.write(buffer, tensor.name, bits)
        bad = nonfinite_count(tensor) if written is None else written.nonfinite
        if bad:
            self._faults.append(f"{tensor.name} has {bad} values that are NaN or infinite")
            return
        self._given[tensor.name] = tensor.dtype
        if written is not None:
            self._sums[tensor.name] = written.sums

    def take(self, slots: Sequence[Slot], fill: Fill) -> None:
        """Tensors whose parts come to each process that holds some. `fill` is given the buffers of those that fit,
        by name, and which of them came under another name before; it returns what is wrong with their values."""
        buffers: dict[str, Buffer] = {}
        twins = set()
        for slot in slots:
            faults = self._faults_of(slot.name, slot.dtype, slot.shape)
            self._faults.extend(faults)
            if not faults:
                buffers[slot.name] = self._buffer_of(slot.name)
                twins |= {slot.name} if self._twin(slot.name) is not None else set()
                self._given[slot.name] = slot.dtype
        self._faults.extend(fill(buffers, frozenset(twins)))

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with the tensors that came so far."""
        return tuple(self._faults)

    @property
    def count(self) -> int:
        """Tensors that came so far and were taken."""
        return len(self._given)

    def seal(self, complete: bool) -> Staged:
        """Checks what came in and digests it. `complete`: every tensor of the model must have come. Raises
        WeightError with all faults."""
        given = {n for names in self._storage.tied if self._given.keys() & set(names) for n in names}
        given |= self._given.keys()
        missing = [name for name in self._storage.specs if name not in given]
        faults = [*self._faults, *(f"{name} is missing" for name in missing if complete)]
        if not self._given and not faults:
            faults.append("no tensor came")
        if faults:
            raise WeightError(shown(faults, "; "))
        self._carry_over(given)
        measured = self._measured(full=not missing)
        return Staged(self._buffers, measured, not missing, self._generation)

    def _carry_over(self, given: set[str]) -> None:
        """Tensors that share a buffer with a new one and did not come themselves are copied from the live one."""
        for name, spec in self._storage.specs.items():
            buffer = self._buffers.get(spec.buffer)
            if buffer is not None and name not in given:
                self._storage.write(buffer, name, self._storage.read(self._storage.live(spec.buffer), name))

    def _measured(self, full: bool) -> dict[str, Measured]:
        if full:
            return {n: self._measure(n, dtype) for n, dtype in self._given.items()}
        measured = dict(self._weights.measured)
        for name, dtype in self._given.items():
            group = next((names for names in self._storage.tied if name in names), [name])
            for known in [n for n in group if n in measured]:
                measured[known] = self._measure(known, dtype)
        return measured

    def _measure(self, name: str, dtype: str) -> Measured:
        spec = self._storage.specs[name]
        if name in self._sums and dtype == spec.dtype:
            return measured_as(dtype, spec.shape, self._sums[name])
        return measure(self._storage, self._buffers[spec.buffer], name, dtype)

    def _buffer_of(self, name: str) -> Buffer:
        """The new buffer that holds it, made where there is none yet."""
        key = self._storage.specs[name].buffer
        buffer = self._buffers.get(key)
        if buffer is None:
            if self._whole and not self._buffers:
                self._fresh = self._storage.fresh_set()
            buffer = self._fresh.pop(key, None)
            if buffer is None:
                buffer = self._storage.fresh(key)
            self._buffers[key] = buffer
        return buffer

    def _twin(self, name: str) -> str | None:
        """Another name of the same tensor that came already."""
        others = (n for names in self._storage.tied if name in names for n in names if n != name)
        return next((n for n in others if n in self._given), None)

    def _faults_of(self, name: str, dtype: str, shape: tuple[int, ...]) -> list[str]:
        spec = self._storage.specs.get(name)
        if spec is None:
            return [f"{name} is not a tensor of this model"]
        faults = []
        if name in self._given:
            faults.append(f"{name} came twice")
        if shape != spec.shape:
            faults.append(f"{name} has shape {list(shape)}, the model's is {list(spec.shape)}")
        rounds = self._may_round and dtype in ("F32", "F16")
        if (dtype, spec.dtype) not in EXACT and not rounds:
            faults.append(f"{name} is {dtype}, which {spec.dtype} cannot hold exactly")
        return faults


def stage_tensors(weights: LiveWeights, tensors: Iterable[HostTensor]) -> Staged:
    """An update of the tensors named, the others as they are."""
    staging = Staging(weights)
    for tensor in tensors:
        staging.add(tensor)
    return staging.seal(complete=False)


def noise(weights: LiveWeights, keep: Callable[[str], bool]) -> Staged:
    """A full update of random values of about 1/32; tensors of which `keep` says so stay as they are."""
    staging = Staging(weights, may_round=True)
    followers = {name for names in weights.storage.tied for name in names[1:]}
    random = np.random.default_rng()
    for name, spec in weights.storage.specs.items():
        if name in followers:
            continue
        if keep(name):
            staging.add(weights.read(name))
            continue
        values = random.standard_normal(math.prod(spec.shape), np.float32) / np.float32(32)
        staging.add(HostTensor(name, "F32", spec.shape, values.view(np.uint32)))
    return staging.seal(complete=True)


def _tell(changed: list[str]) -> None:
    if changed:
        raise WeightError(f"live tensors changed since they were attested: {shown(changed)}")
