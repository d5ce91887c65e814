"""`ranked`: as `packed`, within classes of elements whose base has the same exponent. The smallest encoding.

Whether and how far a weight moves in a step depends almost only on the size of its last bit against the learning
rate, so within a class changes are nearly uniform, and classes differ in how dense they are.
"""

from __future__ import annotations

from typing import ClassVar

from turnout.weights.codecs.packed import Packed


class Ranked(Packed):
    """Integers and bool are one class: there `ranked` is `packed`."""

    exponents: ClassVar[dict[str, tuple[int, int]]] = {
        "BF16": (7, 0xFF),
        "F16": (10, 0x1F),
        "F32": (23, 0xFF),
        "F64": (52, 0x7FF),
        "F8_E4M3": (3, 0x0F),
        "F8_E5M2": (2, 0x1F),
    }
