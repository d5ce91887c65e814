"""One safetensors file as HostTensors: memory-mapped reading, streaming writing, no torch.

Format (huggingface/safetensors, README): 8 bytes little-endian header length, a JSON object of
{name: {dtype, shape, data_offsets: [begin, end]}} with offsets into the data part, then the data.
Reading checks the header against the file before any tensor is handed out: a header that is too long, an
unknown dtype, a size that contradicts its shape, an overlap or a gap is a WeightError that names file and
tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED, HostTensor

HEADER_BYTES_MAX = 100 << 20
ALIGNMENT = 64


def read_file(path: Path) -> Iterator[HostTensor]:
    """The tensors of a file in file order, as views of a read-only memory map."""
    try:
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except OSError as fault:
        raise WeightError(f"{path}: cannot be read: {fault.strerror}") from fault
    for tensor in views(path, data):
        bits = tensor.bits if tensor.bits.flags.aligned else tensor.bits.copy()
        yield HostTensor(tensor.name, tensor.dtype, tensor.shape, bits)


def views(path: Path, data: NDArray[np.uint8]) -> Iterator[HostTensor]:
    """The tensors of the file `path` with the bytes `data`, as views of these, which may lie unaligned: a file is
    dense. What is written to a view is written to `data`."""
    header_end, rows = _header(path, data)
    for name, row in sorted(rows.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = row["data_offsets"]
        raw = data[header_end + begin : header_end + end]
        bits: NDArray[Any] = np.frombuffer(raw, UNSIGNED[ITEM_BYTES[row["dtype"]]])
        yield HostTensor(name, row["dtype"], tuple(row["shape"]), bits)


def write_file(path: Path, tensors: Sequence[HostTensor]) -> int:
    """Writes the tensors in the given order (not synced); returns the file's bytes."""
    with path.open("wb") as file:
        return sum(file.write(piece) for piece in _pieces(tensors))


def checksum(tensors: Sequence[HostTensor]) -> str:
    """blake3 of the file that `write_file` makes of the tensors, 64 hex digits."""
    hasher = blake3(max_threads=1)
    for piece in _pieces(tensors):
        hasher.update(piece)
    return hasher.hexdigest()


def _pieces(tensors: Sequence[HostTensor]) -> Iterator[bytes | memoryview]:
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        rows[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    header = json.dumps(rows, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % ALIGNMENT)
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors:
        yield np.ascontiguousarray(tensor.bits).view(np.uint8).data


def _header(path: Path, data: NDArray[Any]) -> tuple[int, dict[str, Any]]:
    length = int.from_bytes(data[:8].tobytes(), "little") if data.size >= 8 else -1
    if not 2 <= length <= min(HEADER_BYTES_MAX, data.size - 8):
        raise WeightError(
            f"{path}: truncated, or not a safetensors file (header of {length} in {data.size} bytes)"
        )
    try:
        rows = json.loads(data[8 : 8 + length].tobytes())
    except (ValueError, RecursionError) as fault:
        raise WeightError(f"{path}: the header is not JSON: {fault}") from fault
    if not isinstance(rows, dict):
        raise WeightError(f"{path}: the header is not an object")
    rows.pop("__metadata__", None)
    expected = 0
    for name, row in sorted(rows.items(), key=lambda item: _begin(path, item)):
        expected = _checked_end(path, name, row, expected)
    if expected != data.size - 8 - length:
        raise WeightError(
            f"{path}: {data.size - 8 - length} bytes of data where the header tells of {expected}"
        )
    return 8 + length, rows


def _begin(path: Path, item: tuple[str, Any]) -> tuple[int, int]:
    name, row = item
    offsets = row.get("data_offsets") if isinstance(row, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not _counts(offsets):
        raise WeightError(f"{path}: {name}: broken entry in the header")
    return offsets[0], offsets[1]


def _checked_end(path: Path, name: str, row: dict[str, Any], expected: int) -> int:
    begin, end = row["data_offsets"]
    dtype, shape = row.get("dtype"), row.get("shape")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise WeightError(f"{path}: {name}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not _counts(shape):
        raise WeightError(f"{path}: {name}: broken shape {shape!r}")
    needed = math.prod(shape) * ITEM_BYTES[dtype]  # Python's integers: a product beyond 64 bits must not wrap
    if begin != expected or end - begin != needed:
        raise WeightError(f"{path}: {name}: bytes {begin} to {end}, where {dtype} {shape} needs {needed}")
    return end


def _counts(values: list[Any]) -> bool:
    return all(type(n) is int and n >= 0 for n in values)
