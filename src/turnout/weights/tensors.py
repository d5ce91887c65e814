"""Host tensors as bits: what the weight plane reads, digests, writes and compares. No torch here.

Dtypes are safetensors' names. A tensor's `bits` is a flat, contiguous, read-only-by-convention array of
unsigned integers of the element's width, so that bf16 and fp8 need no arithmetic and -0.0, NaN payloads and
subnormals keep their patterns.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnout.native.loader import library

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F32": 4, "I32": 4, "U32": 4,
    "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
_MASKED = {2: ctypes.c_uint16, 4: ctypes.c_uint32}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class HostTensor:
    """One named tensor in host memory: dtype (safetensors' name), shape, flat bits of shape [prod(shape)]."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bits: NDArray[np.unsignedinteger]

    def __post_init__(self) -> None:
        count = math.prod(self.shape)
        width = ITEM_BYTES[self.dtype]
        if self.bits.shape != (count,) or self.bits.dtype != UNSIGNED[width]:
            raise ValueError(
                f"{self.name}: {self.dtype} {list(self.shape)} needs {count} elements of {width} bytes, "
                f"got {self.bits.shape} of {self.bits.dtype}"
            )

    @property
    def nbytes(self) -> int:
        return int(self.bits.nbytes)


def nonfinite_count(tensor: HostTensor) -> int:
    """How many elements are NaN or infinite, from the exponent bits; 0 for integers and bool."""
    masks = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000, "F8_E5M2": 0x7C}
    if tensor.dtype == "F8_E4M3":  # no infinity; NaN is all ones below the sign
        return int(np.count_nonzero((tensor.bits & np.uint8(0x7F)) == 0x7F))
    mask = masks.get(tensor.dtype)
    if mask is None:
        return 0
    typed = tensor.bits.dtype.type(mask)
    native = library()
    if native is not None and typed.itemsize in _MASKED:
        kind = _MASKED[typed.itemsize]
        call = getattr(native, f"turnout_masked_u{typed.itemsize * 8}")
        call.restype = ctypes.c_int64
        bits = np.ascontiguousarray(tensor.bits)
        return int(call(ctypes.c_void_p(bits.ctypes.data), ctypes.c_int64(bits.size), kind(mask)))
    return int(np.count_nonzero((tensor.bits & typed) == typed))


def narrowed(tensor: HostTensor, dtype: str) -> HostTensor:
    """A float32 tensor as bf16 where that is asked for and loses nothing; any other tensor as it is."""
    if (tensor.dtype, dtype) != ("F32", "BF16") or np.any(tensor.bits & np.uint32(0xFFFF)):
        return tensor
    return HostTensor(tensor.name, dtype, tensor.shape, (tensor.bits >> np.uint32(16)).astype(np.uint16))


def converted(tensor: HostTensor, dtype: str) -> HostTensor:
    """A BF16, F16 or F32 tensor as `dtype`, BF16 or F32; what BF16 cannot hold is rounded to nearest even."""
    if tensor.dtype == dtype:
        return tensor
    if tensor.dtype == "BF16":
        bits = tensor.bits.astype(np.uint32) << np.uint32(16)
    else:
        wide = tensor.bits.view(np.float16 if tensor.dtype == "F16" else np.float32).astype(np.float32)
        bits = wide.view(np.uint32)
    if dtype == "BF16":
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        bits = (rounded >> np.uint32(16)).astype(np.uint16)
    return HostTensor(tensor.name, dtype, tensor.shape, bits)
