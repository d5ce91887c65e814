"""Digests of weights by content (docs/architecture.md, "Version identity").

Tensor digest: the pair of sums modulo 2^64, over all elements, of factor(flat position) x bit pattern, then mixed
with dtype, shape and element count. With fmix64 of MurmurHash3 as `mix`, sum s (0 or 1) has at position p the
factor (mix(not (2 (p div 1024) + s)) or 1) x (mix(1024 s + p mod 1024 + 1) >> 32): multilinear hashing, its factors
fixed numbers without a pattern. A sum, so it can be computed from shards (each with its first flat position), not
gathered, and moved by a change without rereading the tensor. 8-byte elements count as two of 4 bytes. It catches
accidents, not adversaries.

Root digest: blake2b over the sorted lines "name dtype shape digest", 32 hex digits.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from turnout.native.loader import library
from turnout.weights.tensors import HostTensor

Sums = tuple[int, int]
Line = tuple[str, tuple[int, ...], str]  # dtype, shape, digest: what the root has of a tensor
_MASK = (1 << 64) - 1
_BLOCK = 1 << 20
_RUN = np.uint64(1024)


def element_sums(bits: NDArray[np.unsignedinteger], first_position: int = 0) -> Sums:
    """The two sums over a contiguous piece of a tensor whose first element has this flat position."""
    if bits.dtype == np.uint64:
        bits, first_position = bits.view(np.uint32), first_position * 2
    bits = np.ascontiguousarray(bits).reshape(-1)
    native = library()
    if native is None:
        return _reference_sums(bits, first_position)
    out = np.zeros(2, np.uint64)
    call = getattr(native, f"turnout_digest_u{bits.dtype.itemsize * 8}")
    call(pointer(bits), ctypes.c_int64(bits.size), ctypes.c_uint64(first_position), pointer(out))
    return int(out[0]), int(out[1])


def row_sums(bits: NDArray[np.unsignedinteger], columns: int, first_position: int, stride: int) -> Sums:
    """The two sums over a block of columns: rows of `columns` elements, dense in `bits`, row r beginning at the
    flat position first_position + r * stride of the whole tensor."""
    if bits.dtype == np.uint64:
        bits, columns, first_position, stride = (
            bits.view(np.uint32),
            columns * 2,
            first_position * 2,
            stride * 2,
        )
    bits = np.ascontiguousarray(bits).reshape(-1, columns)
    native = library()
    if native is None:
        total = (0, 0)
        for row, piece in enumerate(bits):
            total = add(total, _reference_sums(piece, first_position + row * stride))
        return total
    out = np.zeros(2, np.uint64)
    call = getattr(native, f"turnout_digest_u{bits.dtype.itemsize * 8}_rows")
    sizes = ctypes.c_int64(len(bits)), ctypes.c_int64(columns)
    call(pointer(bits), *sizes, ctypes.c_uint64(first_position), ctypes.c_uint64(stride), pointer(out))
    return int(out[0]), int(out[1])


def changed_sums(
    positions: NDArray[np.signedinteger],
    before: NDArray[np.unsignedinteger],
    after: NDArray[np.unsignedinteger],
) -> Sums:
    """What to add to a tensor's sums when the elements at these flat positions [count] change."""
    if before.dtype == np.uint64:
        positions = np.repeat(positions.astype(np.int64) * 2, 2) + np.tile([0, 1], positions.size)
        before, after = before.view(np.uint32), after.view(np.uint32)
    moved = after.astype(np.uint64) - before.astype(np.uint64)
    return _weighted(positions.astype(np.uint64), moved)


def add(left: Sums, right: Sums) -> Sums:
    return (left[0] + right[0]) & _MASK, (left[1] + right[1]) & _MASK


def finish(sums: Sums, dtype: str, shape: tuple[int, ...]) -> str:
    """The tensor digest, 32 hex digits, from its sums and its dtype and shape."""
    head = f"{dtype} {list(shape)} {math.prod(shape)}"
    text = f"{head} {sums[0]:016x}{sums[1]:016x}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def tensor_digest(tensor: HostTensor) -> str:
    return finish(element_sums(tensor.bits), tensor.dtype, tensor.shape)


def root_digest(lines: Mapping[str, Line]) -> str:
    """The root over the lines of all tensors by name, 32 hex digits."""
    text = "\n".join(
        f"{name} {dtype} {list(shape)} {digest}" for name, (dtype, shape, digest) in sorted(lines.items())
    )
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def root_of(tensors: Iterable[HostTensor]) -> str:
    """The root digest of a whole set of tensors, read once each."""
    return root_digest({t.name: (t.dtype, t.shape, tensor_digest(t)) for t in tensors})


def pointer(array: NDArray[np.integer]) -> ctypes.c_void_p:
    """An array's memory, for a C function; whoever calls keeps the array alive."""
    return ctypes.c_void_p(array.ctypes.data)


def _reference_sums(bits: NDArray[np.unsignedinteger], first_position: int) -> Sums:
    lo, hi = 0, 0
    for start in range(0, bits.size, _BLOCK):
        piece = bits[start : start + _BLOCK].astype(np.uint64)
        positions = np.arange(first_position + start, first_position + start + piece.size, dtype=np.uint64)
        part = _weighted(positions, piece)
        lo, hi = lo + part[0], hi + part[1]
    return lo & _MASK, hi & _MASK


def _weighted(positions: NDArray[np.uint64], bits: NDArray[np.uint64]) -> Sums:
    """Both sums of factor x bits, modulo 2^64."""
    found = []
    for which in (np.uint64(0), np.uint64(1)):
        keys = _mix(~(np.uint64(2) * (positions // _RUN) + which)) | np.uint64(1)
        steps = _mix(_RUN * which + positions % _RUN + np.uint64(1)) >> np.uint64(32)
        found.append(int((keys * steps * bits).sum(dtype=np.uint64)))
    return found[0], found[1]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))
