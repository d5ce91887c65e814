"""Calls of the C functions for a train step (turnout/native/train_ops.c), for bf16 tensors on a CPU."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from turnout.native.loader import library


def available(device: torch.device) -> bool:
    """Whether there are C functions for bf16 tensors there."""
    return device.type == "cpu" and library() is not None


def usable(like: Tensor) -> bool:
    """Whether there are C functions for tensors like this one."""
    return like.dtype == torch.bfloat16 and available(like.device)


def call(name: str, *values: Tensor | float | None) -> None:
    """Calls the C function with pointers of tensors (contiguous), NULL for None, int64 for int, float for float."""
    native = library()
    assert native is not None
    getattr(native, name)(*map(_argument, values))


def _argument(value: Tensor | float | None) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    return ctypes.c_int64(value) if isinstance(value, int) else ctypes.c_float(value)
