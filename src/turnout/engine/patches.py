"""Changes of single elements, written into live weights in place.

A patch names elements of a whole tensor; once placed it knows where they lie in one process's memory. Promises:
what a digest moves by is computed from values read in the target itself, before and after the write, never from
the patch; placing is done ahead of the pause. In C (native/exchange.c) where it was built, else in NumPy.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np

from turnout.core.errors import InvariantBroken
from turnout.engine.live_dtypes import as_stored
from turnout.native.loader import library
from turnout.weights.changes import Bits, Positions
from turnout.weights.digest import Sums, changed_sums

SHIFTS = {("BF16", "BF16"): 0, ("F32", "F32"): 0, ("F32", "BF16"): 16}  # live dtype, dtype of the digest


@dataclass(frozen=True)
class Patch:
    """New `bits` [count] in the live dtype at flat, ascending `positions` [count] of one whole tensor. `dtype` is
    what its digest is over."""

    name: str
    live: str
    dtype: str
    positions: Positions
    bits: Bits


@dataclass(frozen=True)
class Placed:
    """The part of a patch that one process holds: `index` [count] are places in the flat memory that the storage
    gives for this tensor. `index` and `positions` are of one type."""

    patch: Patch
    index: Positions


def placed(patch: Patch, index: Positions, size: int) -> Placed:
    """`index` into a flat memory of `size` elements."""
    wide = patch.positions.dtype == np.int64 or size >= 1 << 31
    kind = np.int64 if wide else np.int32
    here = Patch(
        patch.name,
        patch.live,
        patch.dtype,
        np.ascontiguousarray(patch.positions, kind),
        np.ascontiguousarray(patch.bits),
    )
    return Placed(here, np.ascontiguousarray(index, kind))


def in_lines(
    patch: Patch, shape: tuple[int, ...], axis: int, first: int, count: int
) -> tuple[Patch, Positions]:
    """What of a patch lies in `count` lines from `first` on along `axis` (0 or 1) of a tensor of this shape, and
    where in the dense memory of those lines."""
    line = math.prod(shape[1:])
    if axis == 0:
        local = patch.positions - first * line
        inside = (local >= 0) & (local < count * line)
    else:
        rows, columns = np.divmod(patch.positions, line)
        local = rows * count + (columns - first)
        inside = (columns >= first) & (columns < first + count)
    part = Patch(patch.name, patch.live, patch.dtype, patch.positions[inside], patch.bits[inside])
    return part, local[inside]


def exchange(target: Bits, change: Placed, write: bool) -> Sums:
    """Writes a patch into flat memory; returns what to add to the sums of the tensor's digest. Not `write`: what
    writing would add."""
    patch = change.patch
    native, shift = library(), SHIFTS.get((patch.live, patch.dtype))
    if native is None or shift is None:
        return _reference(target, change, write)
    kinds = target.dtype.itemsize * 8, change.index.dtype.itemsize * 8
    out = np.zeros(2, np.uint64)
    arrays = (target, change.index, patch.positions, patch.bits)
    getattr(native, "turnout_exchange_u{}_i{}".format(*kinds))(
        *[ctypes.c_void_p(array.ctypes.data) for array in arrays],
        ctypes.c_int64(change.index.size),
        ctypes.c_int(write),
        ctypes.c_int(shift),
        ctypes.c_void_p(out.ctypes.data),
    )
    return int(out[0]), int(out[1])


def _reference(target: Bits, change: Placed, write: bool) -> Sums:
    patch = change.patch
    before = target[change.index]
    if write:
        target[change.index] = patch.bits
    after = target[change.index] if write else patch.bits
    stored = [as_stored(bits, patch.live, patch.dtype) for bits in (before, after)]
    if stored[0] is None or stored[1] is None:
        raise InvariantBroken(f"{patch.name} holds values that {patch.dtype} does not fit")
    return changed_sums(patch.positions, stored[0], stored[1])


def packed_places(positions: Positions, columns: int, first: int, step: int) -> Positions:
    """Places in a buffer of native/products.c: the matrix has so many columns, its blocks of 16 rows lie at first,
    first + step, ... The type of the positions must hold them."""
    native = library()
    assert native is not None, "the packed storage is made only where the C files were built"
    index = np.empty_like(positions)
    getattr(native, f"turnout_packed_places_i{positions.dtype.itemsize * 8}")(
        ctypes.c_void_p(positions.ctypes.data),
        *[ctypes.c_int64(n) for n in (positions.size, columns, first, step)],
        ctypes.c_void_p(index.ctypes.data),
    )
    return index
