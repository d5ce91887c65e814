"""What an encoding of changes is. No torch: bf16 and fp8 are unsigned integers here.

Promises of every codec: decode(encode(x)) == x bit for bit, for any dtype and any change; bytes that were cut,
altered or belong to another tensor give a WeightError or a Change that a digest refuses, never a crash and never
a position outside the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from turnout.weights.changes import Bits, Change

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Head:
    """What the manifest says of a tensor's change: decoding needs it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Encoded:
    """Changes of several tensors: what all of them share (tables; may be empty), and a part for each."""

    shared: Bytes
    parts: list[Bytes]

    @property
    def nbytes(self) -> int:
        return self.shared.size + sum(part.size for part in self.parts)


Decode = Callable[
    [Bytes, Head, Bits | None], Change
]  # part, head, bits of the base where the codec needs them


class Codec(Protocol):
    """`needs_base`: decoding reads the tensor's state before the change."""

    needs_base: bool

    def encode(self, items: Sequence[tuple[Change, Bits]]) -> Encoded:
        """Each change with the bits [elements] of the state before it."""
        ...

    def decoder(self, shared: Bytes) -> Decode:
        """Decodes the parts that were encoded together; raises WeightError, as what it returns does."""
        ...
