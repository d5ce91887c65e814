"""Samples as bytes, for trainer ranks in other processes and for files: columns in safetensors' form, no pickle.

One array per field of TrainSample holds the values of all samples, `<field>.lengths` those of each (bytes too); any
other field is one array of UTF-8 JSON (its sequences are tuples). Promises: `samples_of(bytes_of(samples))
== samples`, for any fields that TrainSample has or gets: int64 and float64 lose nothing of Python's numbers, but an
integer among floats is a float then.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from turnout.core.types import TrainSample

LENGTHS = ".lengths"
KINDS = {"I64": "<i8", "F64": "<f8", "U8": "u1"}


def bytes_of(samples: Sequence[TrainSample], metadata: dict[str, str] | None = None) -> bytes:
    """See the module; `metadata` goes into the header."""
    columns: dict[str, NDArray[Any]] = {"samples": np.array([len(samples)])}
    for field in fields(TrainSample):
        values = [getattr(sample, field.name) for sample in samples]
        numbers = _numbers(values)
        if numbers is None:
            columns[field.name] = np.frombuffer(json.dumps(values).encode(), np.uint8)
        else:
            columns[field.name] = numbers
            columns[field.name + LENGTHS] = np.array([len(value) for value in values], np.int64)
    return save(columns, metadata)


def samples_of(data: bytes | memoryview) -> tuple[TrainSample, ...]:
    """See the module. Raises ValueError, KeyError or TypeError for other bytes."""
    columns = _columns(data)
    count = int(columns.pop("samples")[0])
    rows: dict[str, Sequence[Any]] = {}
    for name in [name for name in columns if not name.endswith(LENGTHS)]:
        lengths = columns.get(name + LENGTHS)
        if lengths is None:
            found = json.loads(columns[name].tobytes())
            rows[name] = [tuple(value) if isinstance(value, list) else value for value in found]
            continue
        column = columns[name]
        values = column.tobytes() if column.dtype == np.uint8 else tuple(column.tolist())
        ends = accumulate(lengths.tolist(), initial=0)
        rows[name] = [values[begin:end] for begin, end in pairwise(ends)]
    return tuple(TrainSample(**{name: row[at] for name, row in rows.items()}) for at in range(count))


def _columns(data: bytes | memoryview) -> dict[str, NDArray[Any]]:
    """Views of the columns: safetensors' own reader copies, and takes only bytes."""
    start = 8 + int.from_bytes(data[:8], "little")
    found: dict[str, NDArray[Any]] = {}
    header = json.loads(bytes(data[8:start]))
    header.pop("__metadata__", None)
    for name, told in header.items():
        kind, (begin, end) = np.dtype(KINDS[told["dtype"]]), told["data_offsets"]
        found[name] = np.frombuffer(data, kind, (end - begin) // kind.itemsize, start + begin)
    return found


def _numbers(values: Sequence[Any]) -> NDArray[Any] | None:
    """All values one after another; None where they are neither bytes nor tuples of numbers."""
    if all(isinstance(value, bytes) for value in values):
        return np.frombuffer(b"".join(values), np.uint8)
    if not all(isinstance(value, tuple) for value in values):
        return None
    flat = list(chain.from_iterable(values))
    if not flat:
        return np.empty(0, np.int64)
    found = np.array(flat)
    return found if found.dtype in (np.int64, np.float64) else None
