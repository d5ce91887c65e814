"""The attention function that the models of transformers call, over a paged KV cache.

Owns the layout of the cache: keys [page, kv_head, head_dim, PAGE], values [page, kv_head, PAGE, padded_dim],
padded_dim being head_dim rounded up to 16 (native/attention.c says why). Promises: a row's result depends on
its own query and the keys and values of its own sequence at positions up to its own, bit for bit.

What a step needs travels as the keyword `step` through the model's forward; nothing is global.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from turnout.core.errors import Fault, InvariantBroken, ModelError
from turnout.engine.settings import KERNEL_PAGE_TOKENS as PAGE
from turnout.native.loader import library
from turnout.placement.footprint import drop_pages, resident_bytes_at

NAME = "turnout_paged"


@dataclass
class StepRows:
    """The rows of one step, padded. `sequence` [rows] int32: line of `table`, -1 for padding; `position`
    [rows] int32; `table` [lines, width] int32: page numbers."""

    sequence: Tensor
    position: Tensor
    table: Tensor
    cache: KvCache


@dataclass
class KvCache:
    """One pair of tensors per layer; `dtype` is the model's."""

    pages: int
    kv_heads: int
    head_dim: int
    layers: int
    dtype: torch.dtype
    keys: list[Tensor] = field(init=False)
    values: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        if self.head_dim % 8:
            raise ModelError(Fault("head_dim", str(self.head_dim), "must be a multiple of 8"))
        self.allocate()

    def allocate(self) -> None:
        """Takes the memory; the cache is empty then."""
        padded = -(-self.head_dim // 16) * 16
        key_shape = (self.pages, self.kv_heads, self.head_dim, PAGE)
        value_shape = (self.pages, self.kv_heads, PAGE, padded)
        self.keys = [torch.zeros(key_shape, dtype=self.dtype) for _ in range(self.layers)]
        self.values = [torch.zeros(value_shape, dtype=self.dtype) for _ in range(self.layers)]

    def release(self) -> int:
        """Frees the memory and returns how many bytes that were: pages that nothing was written to were never
        there. Nothing may be computed until `allocate`."""
        freed = sum(resident_bytes_at(t.data_ptr(), t.nbytes) for t in (*self.keys, *self.values))
        for tensor in (*self.keys, *self.values):
            drop_pages(tensor.data_ptr(), tensor.nbytes)
        self.keys, self.values = [], []
        return freed

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))


class _Call(ctypes.Structure):
    """`turnout_attention` of native/attention.c."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "key_pages", "value_pages")],
        *[(name, ctypes.c_void_p) for name in ("table", "sequence", "position")],
        *[
            (f"{name}_{axis}", ctypes.c_int64)
            for name in ("query", "key", "value")
            for axis in ("row", "head")
        ],
        ("out_row", ctypes.c_int64),
        *[(name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "head_dim", "table_width")],
        ("scale", ctypes.c_float),
        ("bf16", ctypes.c_int32),
    )


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - transformers' interface
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, rows, head_dim], key and value [1, kv_heads, rows,
    head_dim]; returns [1, rows, heads, head_dim]. Writes key and value into the cache first."""
    step = kwargs.get("step")
    if not isinstance(step, StepRows):
        raise InvariantBroken("the paged attention function was called without the rows of a step")
    if kwargs.get("sliding_window") is not None or kwargs.get("softcap") is not None:
        raise ModelError(Fault("model", "", "sliding windows and capped scores are not served"))
    scale = kwargs.get("scaling")
    call = _reference if library() is None else _native
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = call(
        step,
        layer,
        (query[0], key[0], value[0]),
        float(scale if scale is not None else query.shape[-1] ** -0.5),
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Makes `attn_implementation=NAME` known. No mask function is registered: none is built then."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415 - slow, see engine.model

    ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention)


def _native(step: StepRows, layer: int, qkv: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in qkv)
    heads, rows, dim = query.shape
    cache = step.cache
    out = torch.empty((rows, heads, dim), dtype=query.dtype)
    call = _Call(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
        cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(),
        step.table.data_ptr(), step.sequence.data_ptr(), step.position.data_ptr(),
        query.stride(1), query.stride(0), key.stride(1), key.stride(0), value.stride(1), value.stride(0), 0,
        rows, heads, cache.kv_heads, dim, step.table.shape[1], scale, int(query.dtype == torch.bfloat16),
    )  # fmt: skip
    native = library()
    if native is None or native.turnout_paged_attention(ctypes.byref(call)):
        raise MemoryError("no memory for the scores of one step's attention")
    return out


def _reference(step: StepRows, layer: int, qkv: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
    """The same function in torch, a row at a time: slow, for machines without a C compiler and for tests."""
    query, key, value = (t.transpose(0, 1) for t in qkv)
    cache, dim = step.cache, query.shape[-1]
    keys, values = cache.keys[layer], cache.values[layer]
    live = [i for i, sequence in enumerate(step.sequence.tolist()) if sequence >= 0]
    positions = step.position[live].long()
    pages = step.table[step.sequence[live].long(), positions // PAGE].long()
    keys[pages, :, :, positions % PAGE] = key[live]
    values[pages, :, positions % PAGE, :dim] = value[live]
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    group = query.shape[1] // cache.kv_heads
    for row in live:
        length = int(step.position[row]) + 1
        line = step.table[int(step.sequence[row]), : -(-length // PAGE)].long()
        k = keys[line].permute(1, 0, 3, 2).reshape(cache.kv_heads, -1, dim)[:, None, :length].float()
        v = values[line].permute(1, 0, 2, 3).reshape(cache.kv_heads, len(line) * PAGE, -1)
        q = query[row].view(cache.kv_heads, group, 1, dim).float() * scale
        weights = torch.softmax((q * k).sum(-1), dim=-1)
        mixed = (weights[..., None] * v[:, None, :length, :dim].float()).sum(-2)
        out[row] = mixed.reshape(-1, dim).to(query.dtype)
    return out
