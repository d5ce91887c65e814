"""What differs between two states of a tensor, by bit pattern: found, and overwritten in place.

Promises: no arithmetic on values, so -0.0, NaN payloads and subnormals count as they are, for any dtype; positions
are flat and strictly ascending; what a digest moves by is computed from values read in the target itself, before
and after the write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.weights.digest import Sums, changed_sums
from turnout.weights.tensors import HostTensor

Bits = NDArray[np.unsignedinteger]
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
    if base.shape != tensor.bits.shape or base.dtype != tensor.bits.dtype:
        raise WeightError(
            f"{tensor.name}: the base has {base.size} elements of {base.dtype}, "
            f"the tensor {tensor.bits.size} of {tensor.bits.dtype}"
        )
    positions = np.flatnonzero(base != tensor.bits).astype(position_type(base.size))
    return Change(tensor.name, tensor.dtype, tensor.shape, positions, tensor.bits[positions])


def overwrite(target: Bits, change: Change) -> Sums:
    """Writes a change into a tensor's patterns [elements] in place; returns what to add to its digest's sums."""
    before = target[change.positions]
    target[change.positions] = change.bits
    return changed_sums(change.positions, before, target[change.positions])
