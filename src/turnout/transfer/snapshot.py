"""What the engines hold, in the sender's memory: the base that the next delta is taken against. No torch here.

Seeded from what the engines loaded (the checkpoint, in the dtypes that they attest), never from the trainer's
memory, and compared with the trainer's export at once. Promises: the base moves by `commit` only, which is for
versions that were attested; digests after a change follow from those before it and from the values read on both
sides; an export that holds NaN or infinity, lacks a tensor or has one of another form is refused with the tensor's
name before anything is published. Beside the base, one tensor of the export and its change are held at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from turnout.core.errors import InvariantBroken, WeightError
from turnout.weights.changes import Bits, Change, collect, compare, overwrite
from turnout.weights.delta_io import TensorDelta
from turnout.weights.digest import Line, Sums, add, element_sums, finish, root_digest, tensor_digest
from turnout.weights.tensors import HostTensor, converted, nonfinite_count

NAMES_SHOWN = 8


@dataclass
class _Held:
    """One tensor of the base: its bits [elements], owned here, and the sums of its digest."""

    dtype: str
    shape: tuple[int, ...]
    bits: Bits
    sums: Sums

    @property
    def digest(self) -> str:
        return finish(self.sums, self.dtype, self.shape)


@dataclass(frozen=True)
class Survey:
    """What an export is beside the base: its `lines` by tensor name; how many of its elements differ, with how
    many bytes of values; its size in full."""

    lines: dict[str, Line]
    changed: int
    changed_bytes: int
    elements: int
    nbytes: int

    @property
    def root(self) -> str:
        return root_digest(self.lines)

    @property
    def density(self) -> float:
        """The share of elements that differ."""
        return self.changed / self.elements if self.elements else 0.0


class Snapshot:
    """The base. `comparable`: it has the export's dtypes, so that a delta can be taken; where engines loaded
    narrower values than the trainer computes with, that is so from the first committed version on."""

    def __init__(self, checkpoint: Iterable[HostTensor], export: Iterable[HostTensor]) -> None:
        """`checkpoint` is what the engines loaded, `export` what the trainer holds now; raises WeightError with
        the tensors in which they differ. Tensors that the trainer does not export are left out: no engine has
        them."""
        stored = {tensor.name: tensor for tensor in checkpoint}
        self._held: dict[str, _Held] = {}
        self.comparable = True
        faults: list[str] = []
        for tensor in export:
            source = stored.get(tensor.name)
            if source is None or source.shape != tensor.shape:
                what = "nothing" if source is None else f"the shape {list(source.shape)}"
                faults.append(
                    f"{tensor.name} has {list(tensor.shape)} in the trainer, {what} in the checkpoint"
                )
                continue
            if not np.array_equal(converted(source, tensor.dtype).bits, tensor.bits):
                faults.append(f"{tensor.name} has other values in the trainer than in the checkpoint")
            held = converted(source, "BF16") if tensor.dtype == "BF16" else source
            self.comparable = self.comparable and held.dtype == tensor.dtype
            bits = np.array(held.bits)
            self._held[tensor.name] = _Held(held.dtype, held.shape, bits, element_sums(bits))
        _refuse(faults)

    @property
    def lines(self) -> dict[str, Line]:
        return {name: (held.dtype, held.shape, held.digest) for name, held in self._held.items()}

    @property
    def root(self) -> str:
        return root_digest(self.lines)

    @property
    def nbytes(self) -> int:
        return sum(held.bits.nbytes for held in self._held.values())

    def survey(self, export: Iterable[HostTensor]) -> Survey:
        """Reads an export once; raises WeightError as the module says."""
        if not self.comparable:
            return self._whole(export)
        lines: dict[str, Line] = {}
        changed = changed_bytes = elements = nbytes = 0
        for delta in self.changes(export):
            change = delta.change
            lines[change.name] = (change.dtype, change.shape, delta.after)
            changed += change.count
            changed_bytes += change.bits.nbytes
            elements += change.elements
            nbytes += delta.base.nbytes
        return Survey(lines, changed, changed_bytes, elements, nbytes)

    def changes(self, export: Iterable[HostTensor]) -> Iterator[TensorDelta]:
        """Every tensor of an export with what differs from the base, one at a time. Raises as `survey` does; not
        while the base is not comparable."""
        seen: set[str] = set()
        for tensor in export:
            held = self._matching(tensor, seen)
            [(change, moved)] = compare([(held.bits, tensor)])
            del tensor  # a copy: what follows needs room, and so does the next one
            _refuse(_not_finite(HostTensor(change.name, change.dtype, (change.count,), change.bits)))
            after = finish(add(held.sums, moved), held.dtype, held.shape)
            yield TensorDelta(change, held.bits, held.digest, after)
            del change
        self._all(seen)

    def commit(self, export: Iterable[HostTensor], lines: dict[str, Line]) -> None:
        """Moves the base to an export whose version was attested; `lines` are what its survey found. Raises
        InvariantBroken where the export is another by now: the base is then good for nothing."""
        seen: set[str] = set()
        for tensor in export:
            name, held = tensor.name, self._matching(tensor, seen)
            if self.comparable:
                change = collect(held.bits, tensor)
                del tensor
                held.sums = add(held.sums, overwrite(held.bits, change))
            else:
                bits = np.array(tensor.bits)
                held.dtype, held.bits, held.sums = tensor.dtype, bits, element_sums(bits)
                del tensor
            if (held.dtype, held.shape, held.digest) != lines[name]:
                raise InvariantBroken(f"{name} is not what was published: was it trained meanwhile?")
        self._all(seen)
        self.comparable = True

    def commit_changes(
        self, changes: Callable[[Callable[[str], Bits]], Iterable[Change]], lines: dict[str, Line]
    ) -> None:
        """As `commit`, by what a published delta holds: `changes` reads it against the bits of the base."""
        for change in changes(lambda name: self._held[name].bits):
            held = self._held[change.name]
            held.sums = add(held.sums, overwrite(held.bits, change))
        if self.lines != lines:
            raise InvariantBroken("a published delta does not lead to what was surveyed")

    def audit(self) -> None:
        """Computes all digests anew from the base's memory; raises InvariantBroken with the tensors whose digest
        says something else."""
        wrong = [name for name, held in self._held.items() if element_sums(held.bits) != held.sums]
        if wrong:
            raise InvariantBroken(f"the sender's base is not what its digests say: {_listed(wrong)}")

    def _whole(self, export: Iterable[HostTensor]) -> Survey:
        lines: dict[str, Line] = {}
        elements = nbytes = 0
        seen: set[str] = set()
        for tensor in export:
            self._matching(tensor, seen)
            _refuse(_not_finite(tensor))
            lines[tensor.name] = (tensor.dtype, tensor.shape, tensor_digest(tensor))
            elements += tensor.bits.size
            nbytes += tensor.nbytes
            del tensor
        self._all(seen)
        return Survey(lines, elements, nbytes, elements, nbytes)

    def _matching(self, tensor: HostTensor, seen: set[str]) -> _Held:
        """The base of a tensor; raises WeightError where there is none, its form differs or it was `seen`."""
        held = self._held.get(tensor.name)
        if held is None or tensor.name in seen:
            raise WeightError(f"{tensor.name} is exported twice, or no engine has it")
        dtype = tensor.dtype if self.comparable else held.dtype
        if (dtype, tensor.shape) != (held.dtype, held.shape):
            raise WeightError(
                f"{tensor.name} is exported as {tensor.dtype} {list(tensor.shape)}, "
                f"engines hold {held.dtype} {list(held.shape)}"
            )
        seen.add(tensor.name)
        return held

    def _all(self, seen: set[str]) -> None:
        if len(seen) < len(self._held):
            raise WeightError(f"not exported: {_listed(sorted(self._held.keys() - seen))}")


def _not_finite(tensor: HostTensor) -> list[str]:
    count = nonfinite_count(tensor)
    return [f"{tensor.name} has {count} values that are NaN or infinite"] if count else []


def _refuse(faults: list[str]) -> None:
    if faults:
        raise WeightError(_listed(faults))


def _listed(parts: list[str]) -> str:
    more = f"; and {len(parts) - NAMES_SHOWN} more" if len(parts) > NAMES_SHOWN else ""
    return "; ".join(parts[:NAMES_SHOWN]) + more
