"""Several deltas made one (`turnout weights compact`): fold_vA-vB/ beside the versions, which stay as they are.

Promises: the new folder appears whole or not at all, and no published one is touched; it holds exactly what leads
from version A to version B, proved by digests at each step; routes (turnout.weights.chain) take it where it is
cheaper. It may run beside the trainer: a folder that retention removes meanwhile fails it, and nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from turnout.core.errors import WeightError
from turnout.core.ports import Store
from turnout.core.version import WeightVersion
from turnout.weights.catalog import Catalog
from turnout.weights.chain import Route, cheapest
from turnout.weights.changes import Bits, collect
from turnout.weights.delta_io import TensorDelta, write_delta
from turnout.weights.digest import Line
from turnout.weights.manifest import DELTA, FOLD, VERSION, WeightManifest, seal
from turnout.weights.tensors import HostTensor
from turnout.weights.verify import Replica, Walker, file_checksum


@dataclass(frozen=True)
class FoldPlan:
    """From version `first` to version `last`, written in `encoding`, files of at most `bucket_bytes` (of full
    values). `base` is the checkpoint that the run began with, None where it is not at hand."""

    first: WeightVersion
    last: WeightVersion
    encoding: str
    bucket_bytes: int
    base: Path | None = None


def plan_fold(found: Catalog, counters: tuple[int, int], encoding: str, bucket_bytes: int) -> FoldPlan:
    """From and to by counter, 0 for what the run began with; raises WeightError where the store has no such
    version. An empty `encoding` takes that of the last delta."""
    versions = {0: WeightVersion(0, 0, found.identity.base_root), **found.records}
    missing = [counter for counter in counters if counter not in versions]
    if missing:
        raise WeightError(f"version {missing[0]} was never published here")
    first, last = (versions[counter] for counter in counters)
    steps = _deltas(found, first, last).deltas
    if len(steps) < 2:
        raise WeightError(f"{len(steps)} deltas lead from {first.label} to {last.label}: nothing to fold")
    return FoldPlan(first, last, encoding or steps[-1].encoding, bucket_bytes)


def folders_needed(found: Catalog, plan: FoldPlan) -> list[str]:
    """What must be at hand: the deltas, and what leads to the first version."""
    held = found.identity.base_root if plan.base is not None else None
    start = cheapest(found.usable(), plan.first.root, held).steps
    return [step.directory for step in (*start, *_deltas(found, plan.first, plan.last).deltas)]


def fold(root: Path, found: Catalog, plan: FoldPlan, files: Store, write_id: str) -> WeightManifest:
    """Folds in the folder `root`, of which `found` is a look. Raises WeightError; one model and the tensors that
    change are held in memory."""
    steps = _deltas(found, plan.first, plan.last).deltas
    held = Walker(root, plan.base).at(plan.first.root, found.usable())
    lines = dict(held.lines)
    before: dict[str, Bits] = {}
    for step in steps:
        for change in held.apply(root / step.directory, step):
            before.setdefault(change.name, held.bits[change.name].copy())
    final = root / f"fold_v{plan.first.counter:06d}-v{plan.last.counter:06d}"
    if final.exists():
        raise WeightError(f"{final} is there already")
    staged = root / f"{final.name}.tmp-{write_id}"
    staged.mkdir()
    try:
        written = write_delta(staged, _folded(held, before, lines), plan.encoding, plan.bucket_bytes)
        if written.root != plan.last.root:
            raise WeightError(f"{final.name}: the fold has the root digest {written.root}")
        checksums = {name: file_checksum(staged / name) for name in written.files}
        origin = (plan.last, DELTA, steps[-1].step, found.identity.run_id, write_id)
        content = (written.files, written.tensors, checksums)
        made = WeightManifest(*origin, *content, plan.first, plan.encoding, form=FOLD)
        seal(staged, made)
        files.publish_folder(staged, final)
    except BaseException as fault:
        with suppress(OSError):  # the first fault is the one to tell
            if staged.exists():
                files.remove_tree(staged)
        if isinstance(fault, OSError):
            raise WeightError(f"{final} could not be written: {fault}") from fault
        raise
    return made


def _folded(held: Replica, before: dict[str, Bits], lines: dict[str, Line]) -> Iterator[TensorDelta]:
    for name, (dtype, shape, digest) in lines.items():
        bits = held.bits[name]
        old = before.get(name, bits)
        change = collect(old, HostTensor(name, dtype, shape, bits))
        yield TensorDelta(change, old, digest, held.lines[name][2])


def _deltas(found: Catalog, first: WeightVersion, last: WeightVersion) -> Route:
    published = [m for m in found.usable() if m.kind == DELTA and m.form == VERSION]
    return cheapest(published, last.root, first.root)
