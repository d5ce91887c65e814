"""Symbols and tables of the encodings `packed` and `ranked` (docs/weights.md, "Encodings: packed and ranked").

Owns the step from numbers to symbols, the choice of a few frequency tables for many histograms, and the bytes that
hold tables. Promises: a table gives every symbol of the histograms it was made from a frequency of at least 1 and
sums to 2^12; `parse` accepts nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import WeightError

PROBABILITY_BITS = 12
SLOTS = 1 << PROBABILITY_BITS
SYMBOLS = 256
FIXED_TABLES = 3  # of counts, of steps between gap tables, of steps between value tables
MAX_TABLES = 16  # of each kind; more brought less than they cost
CHANGES_PER_TABLE = 2048  # a table of 50 bytes has to earn its keep
ROUNDS = 3
GAP_PRECISION = 2

Frequencies = NDArray[np.int64]  # [SYMBOLS], or [tables, SYMBOLS]


def value_precision(width: int) -> int:
    """How many bits below the leading one of a difference's magnitude are part of its symbol."""
    return 1 if width == 8 else 2


def extra_of(value: int, precision: int) -> int:
    """How many raw bits follow the symbol of a number."""
    return max(value.bit_length() - 1 - precision, 0)


def symbol_of(value: int, precision: int) -> int:
    """Numbers below 2^(precision + 1) are their own symbol; above, the exponent and `precision` bits after it."""
    extra = extra_of(value, precision)
    return (extra << precision) + (value >> extra)


def extra_bits(symbol: int, precision: int) -> int:
    """The inverse of symbol_of, with `smallest`: value = smallest + the raw bits."""
    return max((symbol >> precision) - 1, 0)


def smallest(symbol: int, precision: int) -> int:
    extra = extra_bits(symbol, precision)
    return (symbol - (extra << precision)) << extra


@dataclass(frozen=True)
class Tables:
    """All tables of a bucket: frequencies [FIXED_TABLES + gaps + values, SYMBOLS], in this order."""

    frequencies: Frequencies
    gaps: int
    values: int

    @cached_property
    def first(self) -> Frequencies:
        """The first slot of each symbol, like `frequencies`."""
        return np.cumsum(self.frequencies, axis=1) - self.frequencies

    @cached_property
    def encode(self) -> NDArray[np.uint32]:
        """frequency | first << 16, [tables, SYMBOLS]: what native/entropy.c encodes with."""
        return (self.frequencies | self.first << 16).astype(np.uint32)

    @cached_property
    def decode(self) -> NDArray[np.uint32]:
        """symbol | (frequency - 1) << 8 | (slot - first) << 20, [tables, SLOTS]: what it decodes with."""
        symbols = np.repeat(np.tile(np.arange(SYMBOLS), len(self.frequencies)), self.frequencies.reshape(-1))
        symbols = symbols.reshape(-1, SLOTS)
        rows = np.arange(len(symbols))[:, None]
        bias = np.arange(SLOTS) - self.first[rows, symbols]
        return (symbols | (self.frequencies[rows, symbols] - 1) << 8 | bias << 20).astype(np.uint32)

    def to_bytes(self) -> NDArray[np.uint8]:
        out = bytearray([self.gaps, self.values])
        for row in self.frequencies:
            used = np.flatnonzero(row)
            first, last = int(used[0]), int(used[-1])
            out += bytes([first, last - first])
            for frequency in row[first : last + 1].tolist():
                out += (
                    bytes([frequency]) if frequency < 128 else bytes([frequency & 127 | 128, frequency >> 7])
                )
        return np.frombuffer(bytes(out), np.uint8)


def parse(shared: NDArray[np.uint8]) -> Tables:
    """The inverse of Tables.to_bytes; raises WeightError for anything that it doesn't make."""
    data, at = shared.tobytes(), 2
    gaps, values = data[:2] if len(data) > 1 else (0, 0)
    frequencies = np.zeros((FIXED_TABLES + gaps + values, SYMBOLS), np.int64)
    try:
        for row in frequencies:
            first, span, at = data[at], data[at + 1], at + 2
            for symbol in range(first, first + span + 1):
                row[symbol], at = data[at], at + 1
                if row[symbol] >= 128:
                    row[symbol], at = row[symbol] - 128 + (data[at] << 7), at + 1
    except IndexError as fault:
        raise WeightError("tables of an encoding that are cut or foreign") from fault
    if not (gaps and values) or at != len(data) or np.any(frequencies.sum(axis=1) != SLOTS):
        raise WeightError("tables of an encoding that are cut or foreign")
    return Tables(frequencies, gaps, values)


def normalised(counts: NDArray[np.integer | np.floating]) -> Frequencies:
    """Frequencies in proportion to counts [SYMBOLS] (of which one at least isn't 0), summing to SLOTS."""
    counts = counts.astype(np.float64)
    exact = counts * SLOTS / counts.sum()
    rows = np.where(counts > 0, np.maximum(exact.astype(np.int64), 1), 0)
    missing = SLOTS - int(rows.sum())
    if missing > 0:
        rows[np.argsort(rows - exact, kind="stable")[:missing]] += 1
    for _ in range(-missing):
        rows[np.argmax(rows)] -= 1
    return rows


def fit(histograms: NDArray[np.integer]) -> tuple[Frequencies, NDArray[np.uint8]]:
    """A few tables for many histograms [items, SYMBOLS], none of them empty: frequencies [tables, SYMBOLS], and
    the table of each item [items]. K-means with the coded size as the distance, from quantiles of the mean symbol;
    tables are in ascending order of their mean symbol."""
    totals = histograms.sum(axis=1)
    used = np.flatnonzero(histograms.any(axis=0))
    counts = histograms[:, used].astype(np.float32)
    means = counts @ used.astype(np.float32) / totals
    tables = int(np.clip(totals.sum() // CHANGES_PER_TABLE, 1, min(MAX_TABLES, len(counts))))
    order = np.argsort(means, kind="stable")
    share = np.cumsum(totals[order])
    chosen = np.zeros(len(counts), np.int64)
    chosen[order] = np.minimum((share - totals[order] / 2) * tables / share[-1], tables - 1)
    for _ in range(ROUNDS if tables > 1 else 0):
        sums = _summed(counts, chosen, tables) + np.float32(1e-3)
        chosen = np.argmin(counts @ -np.log2(sums / sums.sum(axis=1, keepdims=True)).T, axis=1)
    sums = np.zeros((tables, SYMBOLS), np.float32)
    sums[:, used] = _summed(counts, chosen, tables)
    alive = np.flatnonzero(sums.any(axis=1))
    alive = alive[np.argsort(sums[alive] @ np.arange(SYMBOLS) / sums[alive].sum(axis=1), kind="stable")]
    place = np.zeros(tables, np.uint8)
    place[alive] = np.arange(len(alive))
    return np.stack([normalised(sums[table]) for table in alive]), place[chosen]


def _summed(counts: NDArray[np.float32], chosen: NDArray[np.int64], tables: int) -> NDArray[np.float32]:
    """The histograms of each table's items, added up; float32 is exact enough, and a symbol's sum is never 0."""
    return (chosen == np.arange(tables)[:, None]).astype(np.float32) @ counts


def table_steps(
    counts: NDArray[np.integer], owners: NDArray[np.integer], chosen: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """Symbols [2, classes] of how far each class's tables `chosen` [2, classes] are from those of the class with
    changes before it in the same part (from table 0 for the first), zigzag. Classes are those of several parts, one
    after the other, `owners` [classes] says of which. Without changes a class has no symbol (0)."""
    live = np.flatnonzero(counts)
    steps = np.diff(chosen[:, live].astype(np.int64), axis=1, prepend=0)
    starts = np.diff(owners[live], prepend=-1) != 0
    steps[:, starts] = chosen[:, live[starts]]
    out = np.zeros(chosen.shape, np.int64)
    out[:, live] = np.where(steps < 0, -2 * steps - 1, 2 * steps)
    return out
