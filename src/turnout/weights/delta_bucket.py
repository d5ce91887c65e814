"""Buckets of changes: what changed in many tensors, in one flat run of bytes, as it travels through a group. Pure;
sender and receiver use it.

Layout ("delta_bucket", ours): for each change in order its positions (int32 little-endian, int64 in a tensor of
2^31 elements or more) [count], then the new patterns [count]; each of the two begins at a multiple of 8 bytes. The
description (names, dtypes, shapes, counts) travels in the control body beside it. A tensor with more changes than
fit a bucket comes as several changes, in ascending order of positions. Promises: a bucket's boundary never
matters; what does not fit its bytes, or points outside its tensor, is a WeightError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.weights.buckets import TENSORS_MAX
from turnout.weights.changes import Change, ascending, position_type
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED

DELTA_BUCKET = "delta_bucket"  # as load_format and in delta_formats
ALIGNMENT = 8


@dataclass(frozen=True)
class Part:
    """Where one change lies in a bucket: positions from byte `start`, patterns from `bits`, the next from `end`.
    dtype is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    start: int
    bits: int
    end: int


def parts(described: Iterable[tuple[str, str, Sequence[int], int]]) -> list[Part]:
    """Parts of changes (name, dtype, shape, count) laid one after another; raises WeightError for a negative size,
    or more changes than elements."""
    found: list[Part] = []
    at = 0
    for name, dtype, shape, count in described:
        elements = math.prod(shape)
        if any(side < 0 for side in shape) or not 0 <= count <= elements:
            raise WeightError(f"{name}: {count} changes in a tensor of shape {list(shape)}")
        bits = _aligned(at + count * np.dtype(position_type(elements)).itemsize)
        end = _aligned(bits + count * ITEM_BYTES[dtype])
        found.append(Part(name, dtype, tuple(shape), count, at, bits, end))
        at = end
    return found


def cut(changes: Iterable[Change], limit_bytes: int) -> Iterator[list[Change]]:
    """The changes in order, in buckets of at most `limit_bytes`; one that is larger is divided (into pieces of at
    least one element), one of no element is left out."""
    held: list[Change] = []
    size = 0
    for change in changes:
        for piece in _pieces(change, limit_bytes):
            needed = nbytes([piece])
            if held and (size + needed > limit_bytes or len(held) == TENSORS_MAX):
                yield held
                held, size = [], 0
            held.append(piece)
            size += needed
    if held:
        yield held


def nbytes(changes: Sequence[Change]) -> int:
    """Bytes of a bucket of these changes."""
    placed = _placed(changes)
    return placed[-1].end if placed else 0


def pack(changes: Sequence[Change], out: NDArray[np.uint8]) -> list[Part]:
    """Writes a bucket's bytes into `out` [nbytes(changes)] and returns its parts."""
    placed = _placed(changes)
    for part, change in zip(placed, changes):
        positions, bits = change.positions.view(np.uint8), change.bits.view(np.uint8)
        out[part.start : part.bits] = 0
        out[part.bits : part.end] = 0
        out[part.start : part.start + positions.size] = positions
        out[part.bits : part.bits + bits.size] = bits
    return placed


def unpack(data: NDArray[np.uint8], placed: Iterable[Part]) -> Iterator[Change]:
    """The changes of a bucket as views of its bytes [n]; raises WeightError for a part that lies outside, and for
    positions that are not ascending inside the tensor."""
    for part in placed:
        kind = np.dtype(position_type(math.prod(part.shape)))
        if part.end > data.size:
            raise WeightError(f"{part.name}: bytes {part.start} to {part.end} of a bucket of {data.size}")
        positions = data[part.start : part.start + part.count * kind.itemsize].view(kind)
        bits = data[part.bits : part.bits + part.count * ITEM_BYTES[part.dtype]]
        if not ascending(positions, math.prod(part.shape)):
            raise WeightError(f"{part.name}: positions outside the tensor, or not ascending")
        typed = bits.view(UNSIGNED[ITEM_BYTES[part.dtype]])
        yield Change(part.name, part.dtype, part.shape, positions, typed)


def _placed(changes: Sequence[Change]) -> list[Part]:
    return parts((c.name, c.dtype, c.shape, c.count) for c in changes)


def _pieces(change: Change, limit_bytes: int) -> Iterator[Change]:
    width = change.positions.itemsize + change.bits.itemsize
    most = max(1, (limit_bytes - 2 * (ALIGNMENT - 1)) // width)
    for first in range(0, change.count, most):
        some = slice(first, first + most)
        yield Change(change.name, change.dtype, change.shape, change.positions[some], change.bits[some])


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT
