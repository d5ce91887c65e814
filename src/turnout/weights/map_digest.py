"""From a place in a rank's tensor back to the checkpoint: what digests of fused, padded and divided tensors need.

A digest's sums are over (flat position in the checkpoint's tensor, bits), so the sums over the blocks that ranks
hold add up to the tensor's own, without gathering. Promises: padding has no position and enters no sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from turnout.weights.digest import Sums, add, element_sums, row_sums
from turnout.weights.map_types import Block, Local, volume

Bits = NDArray[np.unsignedinteger]
NOWHERE = -1


def positions(
    local: Local, shapes: Mapping[str, tuple[int, ...]], at: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For flat positions [n] in a rank's tensor: the index of the part each lies in, and its flat position in that
    part's checkpoint tensor (`shapes` by name); NOWHERE both in padding."""
    which, home = np.full(at.shape, NOWHERE), np.full(at.shape, NOWHERE)
    index = np.unravel_index(at, local.shape) if local.shape else ()
    for number, part in enumerate(local.parts):
        inside = np.ones(at.shape, bool)
        for axis, (first, count) in zip(index, part.place):
            inside &= (axis >= first) & (axis < first + count)
        lead, shape = len(local.shape) - len(part.block), shapes[part.name]
        flat = np.zeros(at.shape, np.int64)
        for axis, side in enumerate(shape):
            first, mine = part.block[axis][0], axis + lead
            flat = flat * side + first + (index[mine] - part.at[mine] if mine >= 0 else 0)
        which[inside], home[inside] = number, flat[inside]
    return which, home


def part_sums(bits: Bits, local: Local, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Sums]:
    """By checkpoint tensor, the sums over what a rank's tensor (its elements, flat) holds of it."""
    found: dict[str, Sums] = {}
    shaped = bits.reshape(local.shape)
    for part in local.parts:
        mine = shaped[tuple(slice(first, first + count) for first, count in part.place)]
        sums = block_sums(mine.reshape(-1), shapes[part.name], part.block)
        found[part.name] = add(found.get(part.name, (0, 0)), sums)
    return found


def block_sums(bits: Bits, shape: tuple[int, ...], block: Block) -> Sums:
    """The sums over one block [its elements, flat] of a tensor of this shape."""
    if not block or volume(block) == math.prod(shape):
        return element_sums(bits)
    # the innermost axis that is not whole begins the runs; those inside it are whole
    axis = max(i for i, ((_, count), side) in enumerate(zip(block, shape)) if count != side)
    line = math.prod(shape[axis + 1 :])
    run, stride = block[axis][1] * line, shape[axis] * line
    outer = block[:axis]
    if not outer:
        return element_sums(bits, block[axis][0] * line)
    *far, (first, rows) = outer
    total: Sums = (0, 0)
    pieces = bits.reshape(-1, rows * run)
    for index, piece in zip(np.ndindex(*(count for _, count in far)), pieces):
        row = 0
        for (start, _), i, side in zip(far, index, shape):
            row = row * side + start + i
        begin = (row * shape[axis - 1] + first) * stride + block[axis][0] * line
        total = add(total, row_sums(piece, run, begin, stride))
    return total
