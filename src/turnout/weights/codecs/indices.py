"""`indices`: absolute positions, then the new patterns as they are. Least work; for fast links and local disks.

A part is positions (int32 little-endian, int64 for 2^31 elements or more) [count], then patterns [count].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from turnout.core.errors import WeightError
from turnout.weights.changes import Bits, Change, ascending, position_type
from turnout.weights.codecs.codec import Bytes, Decode, Encoded, Head
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED


class Indices:
    """See the module."""

    needs_base = False

    def encode(self, items: Sequence[tuple[Change, Bits]]) -> Encoded:
        parts = [np.concatenate([c.positions.view(np.uint8), c.bits.view(np.uint8)]) for c, _ in items]
        return Encoded(np.zeros(0, np.uint8), parts)

    def decoder(self, shared: Bytes) -> Decode:
        if shared.size:
            raise WeightError(f"indices: {shared.size} bytes of tables, where there are none")
        return _decode


def _decode(part: Bytes, head: Head, base: Bits | None) -> Change:  # noqa: ARG001 - the new bits are all here
    elements, width = math.prod(head.shape), ITEM_BYTES[head.dtype]
    kind = np.dtype(position_type(elements))
    if head.count < 0 or part.size != head.count * (kind.itemsize + width):
        raise WeightError(f"{head.name}: {part.size} bytes for {head.count} changes")
    split = head.count * kind.itemsize
    positions, bits = part[:split].copy().view(kind), part[split:].copy().view(UNSIGNED[width])
    if not ascending(positions, elements):
        raise WeightError(f"{head.name}: positions outside the tensor, or not ascending")
    return Change(head.name, head.dtype, head.shape, positions, bits)
