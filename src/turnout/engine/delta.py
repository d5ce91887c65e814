"""Changes of the live weights: taken, checked against the live state, staged for the moment between two steps.

Promises: nothing that is served changes here; every digest that will be served is computed from values read in the
live buffers now, and compared with the manifest's before anything is written; a change that does not fit what is
held is refused by name. Where few elements of a buffer change they are written in place at activation, so that the
pause depends on their number alone; where many do, or an anchor was loaded for it, a new buffer is filled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from turnout.core.errors import WeightError
from turnout.engine.live_dtypes import EXACT, as_stored
from turnout.engine.patches import Patch
from turnout.engine.staged import Patches, Staged, measure, measured_as, shown
from turnout.engine.storage import Buffer
from turnout.engine.weights import LiveWeights
from turnout.weights.chain import cheapest
from turnout.weights.changes import Bits, Change
from turnout.weights.checkpoint_io import TensorEntry
from turnout.weights.delta_io import read_delta
from turnout.weights.digest import add
from turnout.weights.manifest import DELTA, FULL, MANIFEST, WeightManifest, complete_versions, load_manifest
from turnout.weights.tensors import HostTensor, converted, nonfinite_count
from turnout.weights.verify import verify

log = logging.getLogger(__name__)
DENSE = 0.2  # above this share of a buffer's elements, filling a new one and swapping makes the shorter pause


class ChangeStaging:
    """One update while its changes come in; then `seal`. `start`: a full update that they change instead of what
    is live; its buffers are written at once."""

    def __init__(self, weights: LiveWeights, start: Staged | None = None) -> None:
        self._weights, self._storage, self._start = weights, weights.storage, start
        self._measured = weights.measured if start is None else start.measured
        self._changes: dict[str, Change] = {}
        self._states = {name: measured.line[2] for name, measured in self._measured.items()}
        self._faults: list[str] = []
        self._generation = weights.generation

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with the changes that came so far."""
        return tuple(self._faults)

    @property
    def count(self) -> int:
        """Tensors that changes came for."""
        return len(self._changes)

    def follow(self, folder: Path, manifest: WeightManifest) -> None:
        """All changes of a version, onto those that came before. Raises WeightError, naming the tensor, where the
        state is neither that before the change nor that after it."""
        differ = manifest.tensors.keys() ^ self._states.keys()
        if differ:
            raise WeightError(
                f"{folder}: the version's tensors and those held differ in {shown(sorted(differ))}"
            )
        lost = [name for name, entry in manifest.tensors.items() if not self._reachable(name, entry)]
        if lost:
            raise WeightError(
                f"{folder}: what is held is neither the state before nor after for {shown(lost)}"
            )
        try:
            verify(folder)  # every byte: what was cut or altered is told as that
        except OSError as fault:
            raise WeightError(f"{folder}: cannot be read: {fault}") from fault
        for change in read_delta(folder, manifest, self.bits):
            entry = manifest.tensors[change.name]
            if self._states[change.name] != entry.digest:
                self._take(change)
        self._states = {name: entry.digest for name, entry in manifest.tensors.items()}
        if self._faults:
            raise WeightError(f"{folder}: {shown(self._faults, '; ')}")

    def add(self, change: Change) -> None:
        """One change, or the next piece of one: its positions are behind those that came for the tensor. Faults are
        kept for `seal`."""
        held = self._changes.get(change.name)
        if held is not None and change.count and held.count and change.positions[0] <= held.positions[-1]:
            self._faults.append(f"{change.name}: changes came twice, or not in ascending order")
            return
        self._take(change)

    def bits(self, name: str) -> Bits:
        """A tensor's bits [elements] in the dtype of its digest, with what came so far."""
        dtype = self._measured[name].line[0]
        live = self._storage.read(self._buffer(name), name)
        stored = as_stored(live, self._storage.specs[name].dtype, dtype)
        if stored is None:
            raise WeightError(f"{name} holds values that {dtype} does not fit")
        change = self._changes.get(name)
        if change is None:
            return stored
        stored = np.array(stored)
        stored[change.positions] = change.bits
        return stored

    def seal(self, complete: bool) -> Staged:
        """Checks what came and computes the digests to be served. `complete`: everything must be new, so changes
        of live weights will not do. Raises WeightError with all faults."""
        if complete and self._start is None:
            raise WeightError(
                "the live weights are not to be served, so a full update is needed, not changes"
            )
        changes = self._untied()
        if self._faults:
            raise WeightError(shown(self._faults, "; "))
        if self._start is not None:
            return self._sealed_in(dict(self._start.buffers), self._start.full, list(changes.values()), [])
        dense = self._dense(changes)
        fresh = self._copied(dense)
        by_swap = [c for name, c in changes.items() if self._storage.specs[name].buffer in dense]
        in_place = [c for name, c in changes.items() if self._storage.specs[name].buffer not in dense]
        log.info(
            "%d changed elements of %d tensors: %d tensors in place, %d in %d new buffers",
            sum(change.count for change in changes.values()),
            len(changes),
            len(in_place),
            len(by_swap),
            len(fresh),
        )
        return self._sealed_in(fresh, False, by_swap, in_place)

    def _sealed_in(
        self, buffers: dict[str, Buffer], full: bool, by_swap: list[Change], in_place: list[Change]
    ) -> Staged:
        measured = dict(self._measured)
        prepared = self._storage.prepare([self._patch(change) for change in by_swap])
        if by_swap:
            self._storage.exchange(prepared, buffers, write=True)
        for change in by_swap:
            buffer = buffers[self._storage.specs[change.name].buffer]
            found = measure(self._storage, buffer, change.name, change.dtype)
            measured |= dict.fromkeys(self._names(change.name), found)
        if not in_place:
            return Staged(buffers, measured, full, self._generation)
        prepared = self._storage.prepare([self._patch(change) for change in in_place])
        moves = self._storage.exchange(prepared, {}, write=False)
        for change, move in zip(in_place, moves):
            known = measured[change.name]
            found = measured_as(change.dtype, change.shape, add(known.sums, move))
            measured |= dict.fromkeys(self._names(change.name), found)
        patches = Patches(prepared, [change.name for change in in_place], moves)
        return Staged(buffers, measured, full, self._generation, patches=patches)

    def _reachable(self, name: str, entry: TensorEntry) -> bool:
        return self._states[name] in (entry.before, entry.digest)

    def _take(self, change: Change) -> None:
        faults = self._faults_of(change)
        self._faults.extend(faults)
        if not faults:
            held = self._changes.get(change.name)
            self._changes[change.name] = change if held is None else merged(held, change)

    def _faults_of(self, change: Change) -> list[str]:
        name, spec = change.name, self._storage.specs.get(change.name)
        if spec is None:
            return [f"{name} is not a tensor of this model"]
        known = self._measured.get(name)
        if known is None:
            return [f"{name} was not among the tensors that were loaded"]
        faults = []
        if change.shape != spec.shape:
            faults.append(f"{name} has shape {list(change.shape)}, the model's is {list(spec.shape)}")
        if change.dtype != known.line[0] or (change.dtype, spec.dtype) not in EXACT:
            faults.append(f"{name} is {change.dtype}, what is held is {known.line[0]} in {spec.dtype}")
        bad = nonfinite_count(_values(change))
        if bad:
            faults.append(f"{name} would get {bad} values that are NaN or infinite")
        return faults

    def _untied(self) -> dict[str, Change]:
        """The changes with each tensor once, under its first name; twins that differ are faults."""
        found: dict[str, Change] = {}
        for name, change in self._changes.items():
            if not change.count:
                continue
            twin = next((n for n in self._names(name) if n in found), None)
            if twin is None:
                found[name] = change
            elif not _same(found[twin], change):
                self._faults.append(f"{twin} and {name} are tied in this model and differ in the update")
        return found

    def _names(self, name: str) -> list[str]:
        """The names of this tensor that it is digested under."""
        group = next((names for names in self._storage.tied if name in names), [name])
        return [known for known in group if known in self._measured]

    def _dense(self, changes: Mapping[str, Change]) -> set[str]:
        sizes: dict[str, int] = {}
        changed: dict[str, int] = {}
        seconds = {name for names in self._storage.tied for name in names[1:]}
        for name, spec in self._storage.specs.items():
            if name not in seconds:
                sizes[spec.buffer] = sizes.get(spec.buffer, 0) + math.prod(spec.shape)
        for name, change in changes.items():
            buffer = self._storage.specs[name].buffer
            changed[buffer] = changed.get(buffer, 0) + change.count
        return {buffer for buffer, count in changed.items() if count > DENSE * sizes[buffer]}

    def _copied(self, dense: set[str]) -> dict[str, Buffer]:
        """New buffers with what the live ones hold."""
        everything = {spec.buffer for spec in self._storage.specs.values()} == dense
        fresh = self._storage.fresh_set() if everything else {b: self._storage.fresh(b) for b in dense}
        for name, spec in self._storage.specs.items():
            if spec.buffer in dense:
                bits = self._storage.read(self._storage.live(spec.buffer), name)
                self._storage.write(fresh[spec.buffer], name, bits)
        return fresh

    def _buffer(self, name: str) -> Buffer:
        buffer = self._storage.specs[name].buffer
        return self._storage.live(buffer) if self._start is None else self._start.buffers[buffer]

    def _patch(self, change: Change) -> Patch:
        live = self._storage.specs[change.name].dtype
        bits = converted(_values(change), live).bits
        return Patch(change.name, live, change.dtype, change.positions, bits)


def stage_version(weights: LiveWeights, folder: Path) -> Staged:
    """The version in this folder of a store, by the cheapest way from what is held: deltas one after another, or an
    anchor and the deltas after it; what comes out is activated as one. Raises WeightError where no way leads there,
    or where what it leads to is not what the manifest says."""
    target = load_manifest(folder)
    held, versions = weights.root if weights.measured else None, complete_versions(folder.parent)
    if not weights.storage.takes_changes:
        versions = [version for version in versions if version.kind == FULL]
    route = cheapest(versions, target.version.root, held)
    anchor = route.anchor.version.label if route.anchor is not None else f"what is held ({held})"
    log.info(
        "to %s: from %s by %d deltas, %d bytes", target.version.label, anchor, len(route.deltas), route.nbytes
    )
    start = None
    if route.anchor is not None:
        start = weights.stage_folder(folder.parent / route.anchor.directory)
    staging = ChangeStaging(weights, start)
    for manifest in route.deltas:
        staging.follow(folder.parent / manifest.directory, manifest)
    staged = staging.seal(complete=False)
    wrong = [n for n, entry in target.tensors.items() if staged.lines.get(n, ("",) * 3)[2] != entry.digest]
    if wrong or staged.root != target.version.root:
        raise WeightError(
            f"{folder}: root digest {staged.root}, the manifest says {target.version.root}; other: {shown(wrong)}"
        )
    return replace(staged, manifest=target)


def is_delta(folder: Path) -> bool:
    """Whether a folder says of itself that it holds a delta."""
    if not (folder / MANIFEST).is_file():
        return False
    try:
        return load_manifest(folder).kind == DELTA
    except WeightError:
        return False  # whoever loads it says what is wrong


def merged(first: Change, second: Change) -> Change:
    """One change that does what the two do one after the other."""
    positions = np.concatenate([first.positions, second.positions])
    bits = np.concatenate([first.bits, second.bits])
    if first.count and second.count and first.positions[-1] >= second.positions[0]:
        order = np.argsort(positions, kind="stable")
        positions, bits = positions[order], bits[order]
        last = np.append(positions[1:] != positions[:-1], True)
        positions, bits = positions[last], bits[last]
    return replace(second, positions=positions, bits=bits)


def _values(change: Change) -> HostTensor:
    """The new values alone, [count]."""
    return HostTensor(change.name, change.dtype, (change.count,), change.bits)


def _same(one: Change, other: Change) -> bool:
    return np.array_equal(one.positions, other.positions) and np.array_equal(one.bits, other.bits)
