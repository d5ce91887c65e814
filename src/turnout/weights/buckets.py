"""Buckets: many tensors in one flat run of bytes, as they travel to engines. Pure; sender and receiver use it.

The layout is SGLang 0.5.23's "flattened_bucket": the bytes of the tensors one after another without padding,
each beginning at a multiple of its element size (a bucket is closed where that would not hold). Promises: a
bucket's boundary never matters, since tensors are whole; what does not fit its bytes is a WeightError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED, HostTensor

TENSORS_MAX = 512  # bounds the description of a bucket, which travels in a control body of at most 1 MiB
TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "BF16": "bfloat16", "F16": "float16", "I16": "int16", "U16": "uint16",
    "F32": "float32", "I32": "int32", "U32": "uint32", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
_BY_TORCH = {torch: name for name, torch in TORCH_NAMES.items()}


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in a bucket: bytes from `start` to `end`. dtype is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def dtype_of(name: object) -> str:
    """safetensors' name of a torch dtype, given as a text or as the dtype itself; raises WeightError."""
    text = str(name).removeprefix("torch.")
    if text not in _BY_TORCH:
        raise WeightError(f"dtype {text[:40]} is not known")
    return _BY_TORCH[text]


def slots(described: Iterable[tuple[str, str, Sequence[int]]], aligned: bool = True) -> list[Slot]:
    """Slots of tensors (name, dtype, shape) laid one after another; raises WeightError for a negative size or,
    where they must be `aligned`, a start that is no multiple of the element size."""
    found: list[Slot] = []
    at = 0
    for name, dtype, shape in described:
        width = ITEM_BYTES[dtype]
        if any(side < 0 for side in shape):
            raise WeightError(f"{name} has the shape {list(shape)}")
        if aligned and at % width:
            raise WeightError(f"{name} would begin at byte {at}, {dtype} needs a multiple of {width}")
        end = at + width * int(np.prod(shape, dtype=np.int64))
        found.append(Slot(name, dtype, tuple(shape), at, end))
        at = end
    return found


def buckets(tensors: Iterable[HostTensor], limit_bytes: int) -> Iterator[list[HostTensor]]:
    """The tensors in order, cut into buckets of at most `limit_bytes` (a larger tensor has its own)."""
    held: list[HostTensor] = []
    size = 0
    for tensor in tensors:
        if held and closes(len(held), size, tensor, limit_bytes):
            yield held
            held, size = [], 0
        held.append(tensor)
        size += tensor.nbytes
    if held:
        yield held


def closes(count: int, size: int, tensor: HostTensor, limit_bytes: int) -> bool:
    """Whether a bucket of `count` tensors and `size` bytes ends before this one."""
    full = size + tensor.nbytes > limit_bytes or count == TENSORS_MAX
    return full or size % ITEM_BYTES[tensor.dtype] != 0


def pack(tensors: Sequence[HostTensor], out: NDArray[np.uint8]) -> list[Slot]:
    """Writes a bucket's bytes into `out` [sum of nbytes] and returns its slots."""
    placed = slots((t.name, t.dtype, t.shape) for t in tensors)
    for slot, tensor in zip(placed, tensors):
        out[slot.start : slot.end] = tensor.bits.view(np.uint8)
    return placed


def unpack(data: NDArray[np.uint8], placed: Iterable[Slot]) -> Iterator[HostTensor]:
    """The tensors of a bucket as views of its bytes [n]; raises WeightError for a slot that lies outside."""
    for slot in placed:
        width = ITEM_BYTES[slot.dtype]
        size = width * int(np.prod(slot.shape, dtype=np.int64))
        if not 0 <= slot.start <= slot.end <= data.size or slot.end - slot.start != size:
            raise WeightError(
                f"{slot.name}: {slot.dtype} {list(slot.shape)} needs {size} bytes, the bucket gives bytes "
                f"{slot.start} to {slot.end} of {data.size}"
            )
        part = data[slot.start : slot.end]
        if slot.start % width:
            part = part.copy()
        yield HostTensor(slot.name, slot.dtype, slot.shape, part.view(UNSIGNED[width]))
