"""The tensors of an /update_weights_from_tensor call: SGLang's pickle of shared-memory handles, read safely.

A pickle can name any function to be called. The reader here knows exactly the names that tensors in shared
memory need and maps each to a function of this file that checks its arguments; anything else is a WeightError.
No torch code runs on the payload, but for opening a segment that torch's own manager counts users of.

Promises: what is returned are views of the sender's segments, valid until it frees them (after the reply).
"""

from __future__ import annotations

import base64
import binascii
import io
import mmap
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.weights.buckets import TORCH_NAMES, Slot, dtype_of, unpack
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED, HostTensor

FLATTENED = "flattened_bucket"
SEGMENTS = Path("/dev/shm")  # noqa: S108 - where shm_open keeps names on Linux
HEADER_BYTES = 64  # torch keeps its count of users before the data of a shared segment
_HANDLE = re.compile(rb"/[A-Za-z0-9_.-]{1,200}")
_REDUCTIONS = "torch.multiprocessing.reductions"
_BUCKET = "sglang.srt.weight_sync.tensor_bucket"


@dataclass(frozen=True)
class _Array:
    """A tensor of the payload: its dtype (safetensors' name), shape and bits."""

    dtype: str
    shape: tuple[int, ...]
    bits: NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class _Storage:
    """The bytes of a storage and the dtype it is seen as (safetensors' name, None: plain bytes)."""

    data: NDArray[np.uint8]
    dtype: str | None = None


class _Sealed(type):
    """Classes that a pickle can name, and so could try to change."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls.__name__}.{name} is not to be set")


class _PerRank(metaclass=_Sealed):
    """SGLang's LocalSerializedTensor: one pickle per tensor parallel rank."""

    def __init__(self, values: list[bytes] | None = None) -> None:
        self.values = values if values is not None else []


def read_payload(entries: list[str], load_format: str | None, rank: int = 0) -> list[HostTensor]:
    """The tensors for one tensor parallel rank. `entries`: base64 pickles, one per rank. Raises WeightError for
    everything that is not exactly that."""
    if not 0 <= rank < len(entries):
        raise WeightError(f"{len(entries)} serialized_named_tensors came, rank {rank} has none")
    try:
        content = base64.b64decode(entries[rank], validate=True)
    except (binascii.Error, ValueError) as fault:
        raise WeightError(f"serialized_named_tensors[{rank}] is not base64: {fault}") from fault
    found = _load(content)
    return _bucket(found) if load_format == FLATTENED else _named(found, rank)


def _load(content: bytes) -> Any:
    try:
        return _Reader(io.BytesIO(content)).load()
    except WeightError:
        raise
    except Exception as fault:  # whatever a hostile pickle makes the reader raise is one refusal
        raise WeightError(f"the pickle of tensors cannot be read: {fault}") from fault


def _named(found: Any, rank: int) -> list[HostTensor]:
    if not isinstance(found, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in found
    ):
        raise WeightError("the payload must be a list of (name, tensor)")
    tensors = []
    for name, value in found:
        array = _load(bytes(value.values[rank])) if isinstance(value, _PerRank) else value
        if not isinstance(array, _Array):
            raise WeightError(f"{name} is not a tensor")
        tensors.append(HostTensor(name, array.dtype, array.shape, array.bits))
    return tensors


def _bucket(found: Any) -> list[HostTensor]:
    if not isinstance(found, dict) or not {"flattened_tensor", "metadata"} <= found.keys():
        raise WeightError("a flattened bucket has flattened_tensor and metadata")
    flat, metadata = found["flattened_tensor"], found["metadata"]
    if not isinstance(flat, _Array) or not isinstance(metadata, list):
        raise WeightError("a flattened bucket is one tensor and a list of its parts")
    width = ITEM_BYTES[flat.dtype]  # indices count elements of the flat tensor: bytes since SGLang 0.5.13
    try:
        placed = [
            Slot(
                str(m.name),
                dtype_of(m.dtype),
                tuple(map(int, m.shape)),
                m.start_idx * width,
                m.end_idx * width,
            )
            for m in metadata
        ]
    except (AttributeError, TypeError, ValueError) as fault:
        raise WeightError(f"a part of the bucket is not described as SGLang does: {fault}") from fault
    return list(unpack(flat.bits.view(np.uint8), placed))


def _rebuild_tensor(_kind: Any, storage: Any, metadata: Any) -> _Array:
    """torch's rebuild_tensor: offset, size, stride in elements of a typed storage."""
    if not isinstance(storage, _Storage) or storage.dtype is None:
        raise WeightError("a tensor of the payload has no typed storage")
    offset, size, stride = int(metadata[0]), tuple(map(int, metadata[1])), tuple(map(int, metadata[2]))
    width = ITEM_BYTES[storage.dtype]
    usable = storage.data.size // width * width
    elements = storage.data[:usable].view(UNSIGNED[width])
    count = int(np.prod(size, dtype=np.int64))
    last = offset + sum((n - 1) * step for n, step in zip(size, stride)) if count else offset
    negative = min((0, offset, *size, *stride)) < 0
    if len(size) != len(stride) or negative or max(last + bool(count), count) > elements.size:
        raise WeightError(
            f"a tensor {list(size)} does not lie within its storage of {elements.size} elements"
        )
    view = np.lib.stride_tricks.as_strided(
        elements[offset:], size, [step * width for step in stride], writeable=False
    )
    return _Array(storage.dtype, size, np.ascontiguousarray(view).reshape(-1))


def _rebuild_typed(storage: Any, dtype: Any) -> _Storage:
    if not isinstance(storage, _Storage):
        raise WeightError("a typed storage of the payload is not made of bytes")
    return _Storage(storage.data, dtype_of(dtype))


def _rebuild_shared(_kind: Any, manager: Any, handle: Any, size: Any, dtype: Any = None) -> _Storage:
    """torch's rebuild_storage_filename. A segment without a manager is its sender's alone, and only read."""
    if not isinstance(handle, bytes) or not _HANDLE.fullmatch(handle) or not isinstance(manager, bytes):
        raise WeightError(f"{handle!r} is not the name of a shared-memory segment")
    if not isinstance(size, int) or size < 0:
        raise WeightError(f"{size!r} is not the size of a segment")
    seen = None if dtype is None else dtype_of(dtype)
    try:
        if not manager:
            with (SEGMENTS / handle[1:].decode()).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return _Storage(np.frombuffer(mapped, np.uint8, size, HEADER_BYTES), seen)
        storage = torch.UntypedStorage._new_shared_filename_cpu(manager, handle, size)
        storage._shared_decref()  # the sender counted this reader when it made the handle
        return _Storage(torch.empty(0, dtype=torch.uint8).set_(storage).numpy(), seen)
    except (OSError, RuntimeError, ValueError) as fault:
        raise WeightError(f"shared-memory segment {handle.decode()} cannot be opened: {fault}") from fault


def _rebuild_fd(*_arguments: Any) -> None:
    raise WeightError(
        "the tensors are shared by file descriptor, which only a child process can receive; "
        "set torch.multiprocessing's sharing strategy to file_system"
    )


def _rebuild_cuda(*_arguments: Any) -> None:
    raise WeightError("the tensors are CUDA handles; this engine computes on the CPU")


def _size(values: Any = ()) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


class _Description(SimpleNamespace, metaclass=_Sealed):
    """SGLang's FlattenedTensorMetadata: made from its values, or made empty and then given its state."""

    def __new__(cls, *values: Any) -> Any:
        names = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")
        return SimpleNamespace(**dict(zip(names, values))) if values else super().__new__(cls)


_KNOWN: dict[tuple[str, str], Callable[..., Any] | str] = {
    (_REDUCTIONS, "rebuild_tensor"): _rebuild_tensor,
    (_REDUCTIONS, "rebuild_typed_storage"): _rebuild_typed,
    (_REDUCTIONS, "rebuild_storage_filename"): _rebuild_shared,
    (_REDUCTIONS, "rebuild_storage_empty"): lambda _kind: _Storage(np.empty(0, np.uint8)),
    (_REDUCTIONS, "rebuild_storage_fd"): _rebuild_fd,
    (_REDUCTIONS, "rebuild_cuda_tensor"): _rebuild_cuda,
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): _rebuild_cuda,
    ("torch", "Size"): _size,
    ("types", "SimpleNamespace"): SimpleNamespace,
    (_BUCKET, "FlattenedTensorMetadata"): _Description,
    ("sglang.srt.model_executor.model_runner", "LocalSerializedTensor"): _PerRank,
    (
        "sglang.srt.model_executor.model_runner_components.weight_updater",
        "LocalSerializedTensor",
    ): _PerRank,
    **{("torch", name): name for name in TORCH_NAMES.values()},
    **{
        kind: ".".join(kind)
        for kind in (
            ("torch", "Tensor"),
            ("torch.nn.parameter", "Parameter"),
            ("torch", "UntypedStorage"),
            ("torch.storage", "UntypedStorage"),
        )
    },
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if found is None:
            raise WeightError(f"{module}.{name} has no place in a pickle of tensors")
        # a fresh wrapper, so that a pickle which changes what it found changes nothing here
        return partial(found) if isfunction(found) else found
