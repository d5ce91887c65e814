"""`packed`: gaps between changed elements and differences of bit patterns to the base, entropy-coded.

One coder serves `packed` and `ranked` (turnout.weights.codecs.ranked): `packed` is the case of one class. Encoding
splits every change by class, fits a few tables to all of them, and writes a part for each tensor: in C, in parallel
over tensors, or with the reference in Python, to the same bytes. The format is in docs/weights.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.native.loader import library, path_taken
from turnout.weights.changes import Bits, Change, position_type
from turnout.weights.codecs.ans import (
    GAP_PRECISION,
    SYMBOLS,
    Tables,
    fit,
    normalised,
    parse,
    symbol_of,
    table_steps,
)
from turnout.weights.codecs.codec import Bytes, Decode, Encoded, Head
from turnout.weights.codecs.entropy_native import NativeSplits, native_decode
from turnout.weights.codecs.entropy_reference import ReferenceSplits, reference_decode
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED

WHOLE = (0, 0)  # (shift, mask): every element has exponent 0, so there is one class


class Packed:
    """See the module. `exponents`: (shift, mask) of the exponent in patterns of a dtype; elements of equal exponent
    are a class. Elements of other dtypes are one class."""

    needs_base = True
    exponents: ClassVar[dict[str, tuple[int, int]]] = {}

    def encode(self, items: Sequence[tuple[Change, Bits]]) -> Encoded:
        parts = [np.zeros(0, np.uint8) for _ in items]
        live = [index for index, (change, _) in enumerate(items) if change.count]
        if not live:
            return Encoded(np.zeros(0, np.uint8), parts)
        path_taken()
        used = [items[index] for index in live]
        fields = [self.exponents.get(change.dtype, WHOLE) for change, _ in used]
        splits = (ReferenceSplits if library() is None else NativeSplits)(used, fields)
        tables, chosen = _choose(splits.counts, splits.owners, splits.histograms)
        for index, part in zip(live, splits.encode(tables, chosen)):
            parts[index] = part
        return Encoded(tables.to_bytes(), parts)

    def decoder(self, shared: Bytes) -> Decode:
        path_taken()
        tables = parse(shared) if shared.size else None

        def decode(part: Bytes, head: Head, base: Bits | None) -> Change:
            elements, width = math.prod(head.shape), ITEM_BYTES[head.dtype]
            if base is None or base.shape != (elements,) or base.dtype != UNSIGNED[width]:
                raise WeightError(f"{head.name}: the base is not {head.dtype} of {elements} elements")
            if not 0 <= head.count <= elements or bool(head.count) != bool(part.size):
                raise WeightError(f"{head.name}: {part.size} bytes for {head.count} changes of {elements}")
            positions, bits = np.zeros(head.count, position_type(elements)), np.zeros(head.count, base.dtype)
            if head.count:
                if tables is None:
                    raise WeightError(f"{head.name}: a part without the tables that it was encoded with")
                fill = reference_decode if library() is None else native_decode
                if not fill(part, tables, base, (positions, bits), self.exponents.get(head.dtype, WHOLE)):
                    raise WeightError(f"{head.name}: bytes that this encoding didn't make for this tensor")
            return Change(head.name, head.dtype, head.shape, positions, bits)

        return decode


def _choose(
    counts: NDArray[np.int64], owners: NDArray[np.int64], histograms: NDArray[np.uint32]
) -> tuple[Tables, NDArray[np.uint8]]:
    """Tables for the classes of all tensors, and which ones each class takes [2, classes]. `counts` [classes],
    `owners` [classes] (the tensor of each), `histograms` [classes, 2, SYMBOLS]."""
    live = np.flatnonzero(counts)
    chosen = np.zeros((2, len(counts)), np.uint8)
    gaps, chosen[0, live] = fit(histograms[live, 0])
    values, chosen[1, live] = fit(histograms[live, 1])
    steps = table_steps(counts, owners, chosen)[:, live]
    symbols = [symbol_of(count, GAP_PRECISION) for count in counts.tolist()]
    fixed = [normalised(np.bincount(row, minlength=SYMBOLS)) for row in (symbols, steps[0], steps[1])]
    return Tables(np.concatenate([np.stack(fixed), gaps, values]), len(gaps), len(values)), chosen
