"""The reference of native/entropy.c in Python, byte for byte: slow, for hosts without a compiler and for tests.

The format is in docs/weights.md, "Encodings: packed and ranked". Promises: what `encode` writes, the C file writes;
`decode` raises WeightError where the C file refuses a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.weights.changes import Bits, Change, Positions
from turnout.weights.codecs.ans import (
    FIXED_TABLES,
    GAP_PRECISION,
    PROBABILITY_BITS,
    SLOTS,
    SYMBOLS,
    Tables,
    extra_bits,
    extra_of,
    smallest,
    symbol_of,
    table_steps,
    value_precision,
)
from turnout.weights.codecs.classes import (
    MAX_CLASSES,
    REFUSED,
    Classes,
    Split,
    classes_of,
    exponents_of,
    merge,
    split,
)
from turnout.weights.codecs.codec import Bytes

LOWEST_STATE = 1 << 16


def histograms(parts: Split) -> NDArray[np.uint32]:
    """How often each symbol occurs [classes, 2, SYMBOLS]: of gaps, of values."""
    out = np.zeros((len(parts.counts), 2, SYMBOLS), np.uint32)
    at, precision = 0, value_precision(parts.values.dtype.itemsize)
    for number, count in enumerate(parts.counts.tolist()):
        for index in range(at, at + count):
            size, negative = _magnitude(parts.values, index)
            out[number, 0, symbol_of(int(parts.gaps[index]), GAP_PRECISION)] += 1
            out[number, 1, symbol_of(size, precision) * 2 + negative] += 1
        at += count
    return out


def _magnitude(values: Bits, index: int) -> tuple[int, int]:
    """A difference's magnitude less one, and 1 if it is negative."""
    width = values.dtype.itemsize * 8
    value = int(values[index])
    return ((1 << width) - value - 1, 1) if value >> (width - 1) else (value - 1, 0)


@dataclass
class _BitWriter:
    """Raw bits, lowest first."""

    done: bytearray = field(default_factory=bytearray)
    held: int = 0
    filled: int = 0

    def put(self, value: int, count: int) -> None:
        self.held |= (value & ((1 << count) - 1)) << self.filled
        self.filled += count
        while self.filled >= 8:
            self.done.append(self.held & 255)
            self.held, self.filled = self.held >> 8, self.filled - 8

    def finish(self) -> bytes:
        return bytes(self.done) + (bytes([self.held]) if self.filled else b"")


class _RansWriter:
    """Two rANS states; symbols go in from the last to the first."""

    def __init__(self, tables: Tables) -> None:
        self._frequencies, self._first = tables.frequencies.tolist(), tables.first.tolist()
        self._states, self._words = [LOWEST_STATE, LOWEST_STATE], list[int]()

    def put(self, state: int, table: int, symbol: int) -> None:
        frequency, x = self._frequencies[table][symbol], self._states[state]
        if x >= frequency << (32 - PROBABILITY_BITS):
            self._words.append(x & 0xFFFF)
            x >>= 16
        slot = x % frequency + self._first[table][symbol]
        self._states[state] = (x // frequency << PROBABILITY_BITS) + slot

    def finish(self) -> bytes:
        words = np.array(self._words[::-1], "<u2").tobytes()
        return np.array(self._states, "<u4").tobytes() + words


def encode(classes: Classes, parts: Split, tables: Tables, chosen: NDArray[np.uint8]) -> bytes:
    """A part; `chosen` [2, classes] are the tables of gaps and of values of each class."""
    bits, rans, precision = _BitWriter(), _RansWriter(tables), value_precision(parts.values.dtype.itemsize)
    counts, gaps = parts.counts.tolist(), parts.gaps.tolist()
    sizes = [_magnitude(parts.values, index) for index in range(len(gaps))]
    for count in counts:
        bits.put(count, extra_of(count, GAP_PRECISION))
    for gap, (size, _) in zip(gaps, sizes):
        bits.put(gap, extra_of(gap, GAP_PRECISION))
        bits.put(size, extra_of(size, precision))
    index = len(gaps)
    for number in reversed(range(classes.count)):
        gap_table = FIXED_TABLES + int(chosen[0, number])
        value_table = FIXED_TABLES + tables.gaps + int(chosen[1, number])
        for _ in range(counts[number]):
            index -= 1
            size, negative = sizes[index]
            rans.put(1, value_table, symbol_of(size, precision) * 2 + negative)
            rans.put(0, gap_table, symbol_of(gaps[index], GAP_PRECISION))
    steps = table_steps(parts.counts, np.zeros(classes.count, np.int64), chosen)
    for number in reversed(range(classes.count)):
        if counts[number]:
            rans.put(1, 2, int(steps[1, number]))
            rans.put(0, 1, int(steps[0, number]))
        rans.put(0, 0, symbol_of(counts[number], GAP_PRECISION))
    raw = bits.finish()
    return _varint(classes.lowest) + _varint(classes.count) + _varint(len(raw)) + raw + rans.finish()


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


class _Reader:
    """The fields of a part: raw bits and rANS symbols; raises WeightError where the part is too short."""

    def __init__(self, part: bytes, tables: Tables) -> None:
        self._part, self._at = part, 0
        self._tables = tables.decode
        self.lowest, self.classes, bit_bytes = self._varint(), self._varint(), self._varint()
        end = self._at + bit_bytes
        if end + 8 > len(part):
            raise WeightError(REFUSED)
        self._bits, self._bit_end = self._at, end
        self._held, self._filled = 0, 0
        self._states = [int(x) for x in np.frombuffer(part, "<u4", 2, end)]
        self._word = end + 8

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 63, 7):
            if self._at == len(self._part):
                break
            byte, self._at = self._part[self._at], self._at + 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise WeightError(REFUSED)

    def bits(self, count: int) -> int:
        while self._filled < count:
            if self._bits == self._bit_end:
                raise WeightError(REFUSED)
            self._held |= self._part[self._bits] << self._filled
            self._bits, self._filled = self._bits + 1, self._filled + 8
        value = self._held & ((1 << count) - 1)
        self._held, self._filled = self._held >> count, self._filled - count
        return value

    def symbol(self, state: int, table: int) -> int:
        x = self._states[state]
        entry = int(self._tables[table, x & (SLOTS - 1)])
        x = ((entry >> 8 & 0xFFF) + 1) * (x >> PROBABILITY_BITS) + (entry >> 20)
        if x < LOWEST_STATE:
            if self._word + 2 > len(self._part):
                raise WeightError(REFUSED)
            x = x << 16 | int.from_bytes(self._part[self._word : self._word + 2], "little")
            self._word += 2
        self._states[state] = x
        return entry & 0xFF

    def ended(self) -> bool:
        """Everything was read, and what was read ends as every part does."""
        states = self._states == [LOWEST_STATE, LOWEST_STATE] and self._word == len(self._part)
        return states and self._bits == self._bit_end and self._filled < 8 and not self._held


class ReferenceSplits:
    """Changes of several tensors (none of them empty) by class. `fields`: (shift, mask) of each tensor's exponents.
    `owners` [classes] (the tensor of each class), `counts` [classes], `histograms` [classes, 2, SYMBOLS]."""

    def __init__(self, items: Sequence[tuple[Change, Bits]], fields: Sequence[tuple[int, int]]) -> None:
        self._classes: list[Classes] = []
        self._splits: list[Split] = []
        for (change, base), (shift, mask) in zip(items, fields):
            exponents = exponents_of(base[change.positions], shift, mask)
            lowest, count = classes_of(np.bincount(exponents, minlength=mask + 1)[None])
            self._classes.append(Classes(shift, mask, int(lowest[0]), int(count[0])))
            self._splits.append(split(base, change.positions, change.bits, self._classes[-1]))
        self.owners = np.repeat(np.arange(len(items)), [classes.count for classes in self._classes])
        self.counts = np.concatenate([parts.counts for parts in self._splits])
        self.histograms = np.concatenate([histograms(parts) for parts in self._splits])

    def encode(self, tables: Tables, chosen: NDArray[np.uint8]) -> list[Bytes]:
        """A part for each tensor; `chosen` [2, classes]: each class's table of gaps and of values."""
        return [
            np.frombuffer(encode(classes, parts, tables, chosen[:, self.owners == index]), np.uint8)
            for index, (classes, parts) in enumerate(zip(self._classes, self._splits))
        ]


def reference_decode(
    part: Bytes, tables: Tables, base: Bits, out: tuple[Positions, Bits], field: tuple[int, int]
) -> bool:
    """Fills positions and bits [count]; False for bytes that are no part of this tensor."""
    empty = Split(np.zeros(0, np.int64), np.empty_like(out[0]), np.empty_like(out[1]))
    try:
        classes, parts = decode(part.tobytes(), tables, empty, Classes(*field, 0, 0))
        out[0][:], out[1][:] = merge(base, classes, parts)
    except WeightError:
        return False
    return True


def decode(part: bytes, tables: Tables, empty: Split, classes: Classes) -> tuple[Classes, Split]:
    """A part's classes and split; `empty` has the gaps and values [count] to fill, `classes` shift and mask."""
    reader, precision = _Reader(part, tables), value_precision(empty.values.dtype.itemsize)
    if not 1 <= reader.classes <= MAX_CLASSES or reader.lowest + reader.classes - 1 > classes.mask:
        raise WeightError(REFUSED)
    found = Classes(classes.shift, classes.mask, reader.lowest, reader.classes)
    counts, chosen = np.zeros(reader.classes, np.int64), np.zeros((2, reader.classes), np.int64)
    tables_now = [0, 0]
    for number in range(reader.classes):
        symbol = reader.symbol(0, 0)
        count = smallest(symbol, GAP_PRECISION) + reader.bits(extra_bits(symbol, GAP_PRECISION))
        if count > len(empty.gaps) - counts.sum():
            raise WeightError(REFUSED)
        counts[number] = count
        for kind in (0, 1) if count else ():
            step = reader.symbol(kind, 1 + kind)
            tables_now[kind] += -(step + 1) // 2 if step & 1 else step // 2
            if not 0 <= tables_now[kind] < (tables.gaps, tables.values)[kind]:
                raise WeightError(REFUSED)
        chosen[:, number] = tables_now
    if counts.sum() != len(empty.gaps):
        raise WeightError(REFUSED)
    first = np.array([[FIXED_TABLES], [FIXED_TABLES + tables.gaps]])
    kinds = np.repeat(chosen + first, counts, axis=1).T.tolist()
    modulus = (1 << empty.values.dtype.itemsize * 8) - 1
    for index, (gap_table, value_table) in enumerate(kinds):
        symbol = reader.symbol(0, gap_table)
        gap = smallest(symbol, GAP_PRECISION) + reader.bits(extra_bits(symbol, GAP_PRECISION))
        if gap > np.iinfo(empty.gaps.dtype).max:
            raise WeightError(REFUSED)
        empty.gaps[index] = gap
        symbol = reader.symbol(1, value_table)
        size = smallest(symbol >> 1, precision) + reader.bits(extra_bits(symbol >> 1, precision)) + 1
        empty.values[index] = (-size if symbol & 1 else size) & modulus
    if not reader.ended():
        raise WeightError(REFUSED)
    return found, Split(counts, empty.gaps, empty.values)
