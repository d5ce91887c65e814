"""`deltas`: gaps of 16 bits between changed positions, then the new patterns as they are; `deltas_zstd`: the same,
then zstd. For middle bandwidth.

A part is gaps (uint16 little-endian), then patterns [count]. A gap is how many elements stayed since the change
before it (since the beginning, for the first); 65535 is an escape: so many stayed, and the gap goes on. A part of
`deltas_zstd` is one zstd frame with that as its content.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.native.loader import library
from turnout.weights.changes import Bits, Change, Positions, position_type
from turnout.weights.codecs.codec import Bytes, Decode, Encoded, Head
from turnout.weights.codecs.zstd import compress, decompress, over
from turnout.weights.digest import pointer
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED

ESCAPE = 0xFFFF
Gaps = NDArray[np.uint16]


class Deltas:
    """See the module."""

    needs_base = False

    def encode(self, items: Sequence[tuple[Change, Bits]]) -> Encoded:
        return Encoded(np.zeros(0, np.uint8), [_encode(change) for change, _ in items])

    def decoder(self, shared: Bytes) -> Decode:
        if shared.size:
            raise WeightError(f"deltas: {shared.size} bytes of tables, where there are none")
        return _decode


class DeltasZstd:
    """See the module."""

    needs_base = False

    def encode(self, items: Sequence[tuple[Change, Bits]]) -> Encoded:
        parts = over(lambda change: compress(_encode(change)), [change for change, _ in items])
        return Encoded(np.zeros(0, np.uint8), parts)

    def decoder(self, shared: Bytes) -> Decode:
        decode = Deltas().decoder(shared)

        def unpacked(part: Bytes, head: Head, base: Bits | None) -> Change:
            width, elements = ITEM_BYTES[head.dtype], math.prod(head.shape)
            if not 0 <= head.count <= elements:
                raise WeightError(f"{head.name}: {head.count} changes in {elements} elements")
            limit = head.count * width + 2 * _most_gaps(head.count, elements)
            return decode(decompress(part, limit, head.name), head, base)

        return unpacked


def _encode(change: Change) -> Bytes:
    gaps, values = _gaps(change.positions), np.ascontiguousarray(change.bits)
    return np.concatenate([gaps.view(np.uint8), values.view(np.uint8)])


def _decode(part: Bytes, head: Head, base: Bits | None) -> Change:  # noqa: ARG001 - the new bits are all here
    elements, width = math.prod(head.shape), ITEM_BYTES[head.dtype]
    used, odd = divmod(part.size - head.count * width, 2)
    if odd or not 0 <= head.count <= used:
        raise WeightError(f"{head.name}: {part.size} bytes for {head.count} changes")
    positions = _positions(part[: 2 * used], head.count, elements)
    if positions is None:
        raise WeightError(f"{head.name}: the gaps do not give {head.count} positions in {elements} elements")
    bits = part[2 * used :].copy().view(UNSIGNED[width])
    return Change(head.name, head.dtype, head.shape, positions, bits)


def _most_gaps(count: int, elements: int) -> int:
    return count + elements // ESCAPE


def _gaps(positions: Positions) -> Gaps:
    positions = np.ascontiguousarray(positions)
    native, used = library(), ctypes.c_int64()
    if native is None:
        return _reference_gaps(positions)
    span = int(positions[-1]) if positions.size else 0
    gaps = np.empty(_most_gaps(positions.size, span), np.uint16)
    sizes = ctypes.c_int64(positions.size), ctypes.c_int64(positions.itemsize == 8)
    native.turnout_gaps(pointer(positions), *sizes, pointer(gaps), ctypes.byref(used))
    return gaps[: used.value]


def _positions(gaps: Bytes, count: int, elements: int) -> Positions | None:
    """None where the gaps do not give exactly `count` positions inside the tensor."""
    native = library()
    if native is None:
        return _reference_positions(gaps.copy().view(np.uint16), count, elements)
    positions = np.empty(count, position_type(elements))
    sizes = ctypes.c_int64(gaps.size // 2), ctypes.c_int64(elements)
    target = pointer(positions), ctypes.c_int64(count), ctypes.c_int64(positions.itemsize == 8)
    return positions if native.turnout_positions(pointer(gaps), *sizes, *target) else None


def _reference_gaps(positions: Positions) -> Gaps:
    stayed = np.diff(positions.astype(np.int64), prepend=-1) - 1
    ends = np.cumsum(stayed // ESCAPE + 1)  # of each gap's codes, escapes before it
    gaps = np.full(ends[-1] if ends.size else 0, ESCAPE, np.uint16)
    gaps[ends - 1] = stayed % ESCAPE
    return gaps


def _reference_positions(gaps: Gaps, count: int, elements: int) -> Positions | None:
    changed = gaps != ESCAPE
    at = np.cumsum(gaps.astype(np.int64) + changed) - 1
    if np.count_nonzero(changed) != count or (gaps.size and (not changed[-1] or at[-1] >= elements)):
        return None
    return at[changed].astype(position_type(elements))
