"""Between the dtype a tensor was stored in and the one it lives in: digests are over the first, products run in the
second. bf16 and float16 live in float32 without loss; what would lose something is refused, but at the start.
"""

from __future__ import annotations

import numpy as np

from turnout.weights.changes import Bits

EXACT = {("BF16", "BF16"), ("F32", "F32"), ("BF16", "F32"), ("F16", "F32")}  # stored, live


def as_stored(bits: Bits, live: str, dtype: str) -> Bits | None:
    """Bits of the live dtype as those of `dtype`; None where some element does not fit exactly."""
    if live == dtype:
        return bits
    if live == "F32" and dtype == "BF16" and not np.any(bits & np.uint32(0xFFFF)):
        return (bits >> np.uint32(16)).astype(np.uint16)
    if live == "F32" and dtype == "F16":
        half = bits.view(np.float32).astype(np.float16)
        if np.array_equal(half.astype(np.float32).view(np.uint32), bits):
            return half.view(np.uint16)
    return None
