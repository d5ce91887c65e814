"""What differs between two states of a tensor, by bit pattern: found, and overwritten in place.

Promises: no arithmetic on values, so -0.0, NaN payloads and subnormals count as they are, for any dtype; positions
are flat and strictly ascending; nothing is written outside a tensor; what a digest moves by is computed from values
read in the target itself, before and after the write. One pass over both states in native/delta.c, on all threads
of OpenMP; the NumPy code here is its reference.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.native.loader import library
from turnout.weights.digest import Sums, add, changed_sums, pointer
from turnout.weights.tensors import HostTensor

Bits = NDArray[np.unsignedinteger]
PIECE = 1 << 19  # elements, and
PIECE_CHANGES = 1 << 15  # changes, that one thread takes at a time
Positions = NDArray[np.signedinteger]  # int32 [count], int64 for a tensor of 2^31 elements or more


@dataclass(frozen=True)
class Change:
    """`bits` [count] are the new patterns at the flat `positions` [count] of a tensor; all else stays."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    positions: Positions
    bits: Bits

    @property
    def count(self) -> int:
        return int(self.positions.size)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def position_type(elements: int) -> type[np.signedinteger]:
    """The narrowest type of positions in a tensor of so many elements."""
    return np.int32 if elements < 1 << 31 else np.int64


def collect(base: Bits, tensor: HostTensor) -> Change:
    """Where the tensor's patterns differ from `base` [elements]; raises WeightError for another size or width."""
    return compare([(base, tensor)])[0][0]


def compare(pairs: Sequence[tuple[Bits, HostTensor]]) -> list[tuple[Change, Sums]]:
    """As `collect`, for several tensors at once, each with what its change adds to the sums of its digest. The
    bases stay as they are: they move by `overwrite`, once the change has arrived."""
    for base, tensor in pairs:
        if base.shape != tensor.bits.shape or base.dtype != tensor.bits.dtype:
            raise WeightError(
                f"{tensor.name}: the base has {base.size} elements of {base.dtype}, "
                f"the tensor {tensor.bits.size} of {tensor.bits.dtype}"
            )
    native = library()
    dense = [(np.ascontiguousarray(base), np.ascontiguousarray(tensor.bits)) for base, tensor in pairs]
    found = _reference_compare(dense) if native is None else _compare(native, dense)
    return [
        (Change(tensor.name, tensor.dtype, tensor.shape, positions, bits), moved)
        for (_, tensor), (positions, bits, moved) in zip(pairs, found)
    ]


def overwrite(target: Bits, change: Change) -> Sums:
    """Writes a change into a tensor's patterns [elements] in place; returns what to add to its digest's sums."""
    return overwrite_all([(target, change)])[0]


def overwrite_all(pairs: Sequence[tuple[Bits, Change]]) -> list[Sums]:
    """As `overwrite`, for several tensors at once. Raises WeightError, nothing written at all, for another size or
    width, a target that is read-only or not contiguous, or a position outside."""
    for target, change in pairs:
        fits = target.shape == (change.elements,) and target.dtype == change.bits.dtype
        whole = change.positions.shape == change.bits.shape and change.positions.dtype in (np.int32, np.int64)
        if not (fits and whole and target.flags.writeable and target.flags.c_contiguous):
            raise WeightError(
                f"{change.name}: a change of {change.elements} elements of {change.bits.dtype} cannot be "
                f"written into {list(target.shape)} of {target.dtype}"
            )
    native = library()
    if native is not None:
        return _overwrite(native, pairs)
    for target, change in pairs:
        if change.count and not 0 <= int(change.positions.min()) <= int(change.positions.max()) < target.size:
            raise _outside(change)
    return [_reference_overwrite(target, change) for target, change in pairs]


def ascending(positions: Positions, elements: int) -> bool:
    """Whether positions [count] ascend strictly, and inside a tensor of so many elements."""
    native = library()
    if native is not None:
        sizes = (
            ctypes.c_int64(positions.size),
            ctypes.c_int64(positions.itemsize == 8),
            ctypes.c_int64(elements),
        )
        return bool(native.turnout_ascending(pointer(positions), *sizes))
    inside = positions.size == 0 or (positions[0] >= 0 and positions[-1] < elements)
    return bool(inside and np.all(positions[1:] > positions[:-1]))


def _outside(change: Change) -> WeightError:
    return WeightError(f"{change.name}: positions outside the tensor")


def _reference_compare(pairs: Sequence[tuple[Bits, Bits]]) -> list[tuple[Positions, Bits, Sums]]:
    found: list[tuple[Positions, Bits, Sums]] = []
    for base, now in pairs:
        positions = np.flatnonzero(base != now).astype(position_type(base.size))
        bits = now[positions]
        found.append((positions, bits, changed_sums(positions, base[positions], bits)))
    return found


def _reference_overwrite(target: Bits, change: Change) -> Sums:
    before = target[change.positions]
    target[change.positions] = change.bits
    return changed_sums(change.positions, before, target[change.positions])


def _compare(native: ctypes.CDLL, pairs: Sequence[tuple[Bits, Bits]]) -> list[tuple[Positions, Bits, Sums]]:
    rows: list[tuple[int, ...]] = []  # struct Compared of native/delta.c
    for base, now in pairs:
        states, kind = (
            (base.ctypes.data, now.ctypes.data),
            (now.itemsize, position_type(now.size) is np.int64),
        )
        ranges = ((start, min(start + PIECE, now.size)) for start in range(0, now.size, PIECE))
        rows.extend((*states, *part, *kind, 0, 0, 0, 0, 0, 0) for part in ranges)
    tasks = np.array(rows, np.uint64).reshape(-1, 12)
    sizes = [now.size for _, now in pairs]
    count, longest = ctypes.c_int64(len(tasks)), ctypes.c_int64(min(PIECE, max(sizes, default=0)))
    good = native.turnout_compare(pointer(tasks), count, longest, ctypes.c_int64(sum(sizes)))
    found = _room(tasks, [now for _, now in pairs]) if good else []
    native.turnout_take(pointer(tasks), count)
    if not good:
        raise MemoryError("no memory for the changes of a tensor")
    return found


def _room(tasks: NDArray[np.uint64], states: Sequence[Bits]) -> list[tuple[Positions, Bits, Sums]]:
    """Arrays for what the tasks found; each task gets told where in them its part belongs."""
    made: list[tuple[Positions, Bits, Sums]] = []
    places: list[tuple[int, int]] = []
    results = iter(tasks[:, 6:9].tolist())
    for now in states:
        mine = list(itertools.islice(results, -(-now.size // PIECE)))
        count = sum(row[0] for row in mine)
        positions, bits = np.empty(count, position_type(now.size)), np.empty(count, now.dtype)
        made.append((positions, bits, _total(row[1:] for row in mine)))
        first, second = positions.ctypes.data, bits.ctypes.data
        for row in mine:
            places.append((first, second))
            first, second = first + row[0] * positions.itemsize, second + row[0] * bits.itemsize
    tasks[:, 10:12] = np.array(places, np.uint64).reshape(-1, 2)
    return made


def _overwrite(native: ctypes.CDLL, pairs: Sequence[tuple[Bits, Change]]) -> list[Sums]:
    rows: list[tuple[int, ...]] = []  # struct Written of native/delta.c
    owners: list[int] = []
    kept = [(np.ascontiguousarray(c.positions), np.ascontiguousarray(c.bits)) for _, c in pairs]
    for owner, ((target, _), (positions, bits)) in enumerate(zip(pairs, kept)):
        head = target.ctypes.data, target.size, target.itemsize, positions.itemsize == 8
        first, second = positions.ctypes.data, bits.ctypes.data
        for start in range(0, bits.size, PIECE_CHANGES):
            places = first + start * positions.itemsize, second + start * bits.itemsize
            rows.append((*head, *places, min(PIECE_CHANGES, bits.size - start), 0, 0))
            owners.append(owner)
    tasks = np.array(rows, np.uint64).reshape(-1, 9)
    changes = ctypes.c_int64(sum(bits.size for _, bits in kept))
    wrong = native.turnout_overwrite(pointer(tasks), ctypes.c_int64(len(tasks)), changes)
    if wrong >= 0:
        raise _outside(pairs[owners[wrong]][1])
    sums = iter(tasks[:, 7:9].tolist())
    return [_total(itertools.islice(sums, -(-bits.size // PIECE_CHANGES))) for _, bits in kept]


def _total(rows: Iterable[Sequence[int]]) -> Sums:
    return functools.reduce(lambda left, right: add(left, (right[0], right[1])), rows, (0, 0))
