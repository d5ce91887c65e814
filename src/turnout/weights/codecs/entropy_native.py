"""Calls native/entropy.c, which splits and encodes in parallel over tensors; same results as entropy_reference.

Owns the layout of the C file's structures. What the pointers lead to is held here for as long as a call lasts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnout.native.loader import library
from turnout.weights.changes import Bits, Change, Positions
from turnout.weights.codecs.ans import SYMBOLS, Tables
from turnout.weights.codecs.classes import classes_of
from turnout.weights.codecs.codec import Bytes


class _Tensor(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("base", "positions", "bits")),
        *((name, ctypes.c_int64) for name in ("elements", "count")),
        *((name, ctypes.c_int32) for name in ("width", "wide", "shift", "mask", "lowest", "classes")),
        *((name, ctypes.c_void_p) for name in ("counts", "gaps", "values", "histograms")),
        *((name, ctypes.c_void_p) for name in ("gap_tables", "value_tables", "part")),
        ("size", ctypes.c_int64),
    ]


_JOBS: Any = np.dtype(_Tensor)


class _Tables(ctypes.Structure):
    _fields_ = [
        ("gap_tables", ctypes.c_int32),
        ("value_tables", ctypes.c_int32),
        ("encode", ctypes.c_void_p),
        ("decode", ctypes.c_void_p),
    ]


class NativeSplits:
    """As entropy_reference.ReferenceSplits."""

    def __init__(self, items: Sequence[tuple[Change, Bits]], fields: Sequence[tuple[int, int]]) -> None:
        solid = np.ascontiguousarray
        items = [(replace(c, positions=solid(c.positions), bits=solid(c.bits)), solid(b)) for c, b in items]
        self._items = items
        self._gaps = [np.empty_like(change.positions) for change, _ in items]
        self._values = [np.empty_like(change.bits) for change, _ in items]
        jobs: NDArray[np.void] = np.zeros(len(items), _JOBS)
        self._jobs = jobs
        jobs["base"] = _addresses([base for _, base in items])
        jobs["positions"] = _addresses([change.positions for change, _ in items])
        jobs["bits"] = _addresses([change.bits for change, _ in items])
        jobs["gaps"], jobs["values"] = _addresses(self._gaps), _addresses(self._values)
        jobs["elements"] = [base.size for _, base in items]
        jobs["count"] = [change.count for change, _ in items]
        jobs["width"] = [base.itemsize for _, base in items]
        jobs["wide"] = [change.positions.itemsize == 8 for change, _ in items]
        jobs["shift"], jobs["mask"] = np.array(fields).T
        exponents = np.zeros((len(items), int(jobs["mask"].max()) + 1), np.int64)
        if jobs["mask"].any():
            jobs["counts"] = _rows(exponents)
            _call("turnout_change_exponents", jobs)
        else:
            exponents[:, 0] = jobs["count"]
        jobs["lowest"], jobs["classes"] = classes_of(exponents)
        self.owners = np.repeat(np.arange(len(items)), jobs["classes"])
        first = np.cumsum(jobs["classes"]) - jobs["classes"]
        self.counts = np.zeros(len(self.owners), np.int64)
        tensor, exponent = np.nonzero(exponents)
        classes = first[tensor] + np.maximum(exponent - jobs["lowest"][tensor], 0)
        np.add.at(self.counts, classes, exponents[tensor, exponent])
        self.histograms = np.zeros((len(self.owners), 2, SYMBOLS), np.uint32)
        jobs["counts"] = _rows(self.counts)[first]
        jobs["histograms"] = _rows(self.histograms)[first]
        _call("turnout_change_split", jobs)
        self._first = first

    def encode(self, tables: Tables, chosen: NDArray[np.uint8]) -> list[Bytes]:
        """As ReferenceSplits.encode."""
        jobs = self._jobs
        parts = [np.empty(size, np.uint8) for size in jobs["size"].tolist()]
        jobs["part"] = _addresses(parts)
        jobs["gap_tables"] = _rows(chosen[0])[self._first]
        jobs["value_tables"] = _rows(chosen[1])[self._first]
        encode = tables.encode
        _call("turnout_change_encode", jobs, _Tables(tables.gaps, tables.values, encode.ctypes.data, None))
        return [part[:size] for part, size in zip(parts, jobs["size"].tolist())]


def native_decode(
    part: Bytes, tables: Tables, base: Bits, out: tuple[Positions, Bits], field: tuple[int, int]
) -> bool:
    """As entropy_reference.reference_decode."""
    positions, bits = out
    gaps, values = np.empty_like(positions), np.empty_like(bits)
    base, part = np.ascontiguousarray(base), np.ascontiguousarray(part)
    base_at, positions_at, bits_at, gaps_at, values_at, part_at = _addresses(
        [base, positions, bits, gaps, values, part]
    )
    widths = base.itemsize, positions.itemsize == 8
    sizes = base.size, positions.size, *widths, *field, 0, 0
    job = _Tensor(base_at, positions_at, bits_at, *sizes, None, gaps_at, values_at, None, None, None, part_at)
    job.size = part.size
    given = _Tables(tables.gaps, tables.values, None, tables.decode.ctypes.data)
    native = library()
    assert native is not None
    return native.turnout_change_decode(ctypes.byref(job), ctypes.byref(given)) == 0


def _call(function: str, jobs: NDArray[np.void], tables: _Tables | None = None) -> None:
    native = library()
    assert native is not None
    given = () if tables is None else (ctypes.byref(tables),)
    getattr(native, function)(ctypes.c_void_p(jobs.ctypes.data), ctypes.c_int32(len(jobs)), *given)


def _addresses(arrays: Sequence[NDArray[np.generic]]) -> list[int]:
    return [array.__array_interface__["data"][0] for array in arrays]


def _rows(array: NDArray[np.generic]) -> NDArray[np.uint64]:
    """The addresses of the rows of a contiguous array."""
    return (array.ctypes.data + array.strides[0] * np.arange(len(array))).astype(np.uint64)
