"""The weights of a Llama-like model, packed for native/products.c. The packed copy is the only copy.

Owns the layout: query, key and value in one matrix, gate and up in one with their blocks alternating, a tied head
and embedding in one buffer. Promises: packing is a permutation with zeros as padding, so reading back gives the
very bits that were written, and a digest of what is read back is a digest of what is multiplied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnout.engine.patches import Patch, Placed, exchange, packed_places, placed
from turnout.engine.shape import ModelShape
from turnout.engine.storage import Spec, Written, as_bits
from turnout.native.loader import library
from turnout.placement.footprint import drop_pages
from turnout.weights.changes import Bits
from turnout.weights.digest import Sums, element_sums

TILE, DEPTH = 16, 32  # as in native/products.h
ALIGNMENT = 64


@dataclass(frozen=True)
class Matrix:
    """A tensor [rows, inputs] inside a packed buffer: its blocks of TILE rows lie at first, first + step, ..."""

    rows: int
    inputs: int
    first: int
    step: int


@dataclass(frozen=True)
class Slice:
    """A tensor inside a plain buffer: elements start .. start + count."""

    start: int
    count: int


def blocks(n: int) -> int:
    return -(-n // TILE)


def depth_blocks(k: int) -> int:
    return -(-k // DEPTH)


class PackedStorage:
    """A Storage (turnout.engine.storage) of bf16 buffers; `generation` grows with each swap."""

    takes_changes = True

    def __init__(self, config: Any, shape: ModelShape) -> None:
        self.specs: dict[str, Spec] = {}
        self.tied: list[list[str]] = []
        self.generation = 0
        self._parts: dict[str, Matrix | Slice] = {}
        self._sizes: dict[str, int] = {}
        self._layout(config, shape)
        self._live = self.fresh_set()

    def live(self, buffer: str) -> Tensor:
        return self._live[buffer]

    def has(self, buffer: str) -> bool:
        return buffer in self._live

    def fresh(self, buffer: str) -> Tensor:
        return _aligned([self._sizes[buffer]])[0]

    def fresh_set(self) -> dict[str, Tensor]:
        """In one piece of memory: as many small ones, taking the pages costs more than filling them."""
        return dict(zip(self._sizes, _aligned(list(self._sizes.values()))))

    def write(self, buffer: Tensor, name: str, bits: Bits) -> Written | None:
        """A matrix is read back while what was packed is in the cache."""
        part = self._parts[name]
        if isinstance(part, Slice):
            np.copyto(as_bits(buffer)[part.start : part.start + part.count], bits)
            return None
        out, bits = np.zeros(3, np.uint64), np.ascontiguousarray(bits)
        self._call("turnout_pack", bits.ctypes.data, part, buffer.data_ptr(), out.ctypes.data)
        return Written((int(out[0]), int(out[1])), int(out[2]))

    def read(self, buffer: Tensor, name: str) -> Bits:
        part = self._parts[name]
        if isinstance(part, Slice):
            return as_bits(buffer)[part.start : part.start + part.count]
        bits = np.empty(part.rows * part.inputs, np.uint16)
        self._call("turnout_unpack", buffer.data_ptr(), part, bits.ctypes.data)
        return bits

    def sums(self, buffer: Tensor, name: str, dtype: str) -> Sums | None:
        """Over the packed form itself."""
        if dtype != "BF16":
            return None
        part = self._parts[name]
        if isinstance(part, Slice):
            return element_sums(self.read(buffer, name))
        out = np.zeros(3, np.uint64)
        self._call("turnout_digest_packed", buffer.data_ptr(), part, out.ctypes.data)
        return int(out[0]), int(out[1])

    def prepare(self, patches: Sequence[Patch]) -> list[Placed]:
        return [self._placed(patch) for patch in patches]

    def exchange(self, prepared: list[Placed], buffers: dict[str, Tensor], write: bool) -> list[Sums]:
        found = []
        for change in prepared:
            buffer = self.specs[change.patch.name].buffer
            memory = as_bits(buffers.get(buffer, self._live[buffer]))
            found.append(exchange(memory, change, write))
        return found

    def _placed(self, patch: Patch) -> Placed:
        part, size = self._parts[patch.name], self._sizes[self.specs[patch.name].buffer]
        kind = np.int32 if size < 1 << 31 else np.int64
        positions = np.ascontiguousarray(patch.positions, kind)
        if isinstance(part, Slice):
            return placed(patch, positions + kind(part.start), size)
        return placed(patch, packed_places(positions, part.inputs, part.first, part.step), size)

    def swap(self, buffers: dict[str, Tensor]) -> None:
        if len(buffers) < len(self._live):  # those that stay hold the memory of their whole set
            for name in buffers:
                drop_pages(self._live[name].data_ptr(), self._live[name].nbytes)
        self._live.update(buffers)
        self.generation += 1

    def release(self) -> int:
        freed = sum(buffer.nbytes for buffer in self._live.values())
        for buffer in self._live.values():
            drop_pages(buffer.data_ptr(), buffer.nbytes)
        self._live = {name: torch.empty(0, dtype=torch.bfloat16) for name in self._live}
        self.generation += 1
        return freed

    @staticmethod
    def _call(function: str, source: int, part: Matrix, *targets: int) -> None:
        """A C function of native/products.c or digest.c over one matrix."""
        native = library()
        assert native is not None, "the packed storage is made only where the C files were built"
        numbers = [ctypes.c_int64(n) for n in (part.rows, part.inputs, part.first, part.step)]
        getattr(native, function)(ctypes.c_void_p(source), *numbers, *map(ctypes.c_void_p, targets))

    def _layout(self, config: Any, shape: ModelShape) -> None:
        hidden, inter = config.hidden_size, config.intermediate_size
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        for layer in range(shape.layers):
            stem, to = f"model.layers.{layer}", f"layer{layer}"
            rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
            self._matrices(
                f"{to}.qkv", {f"{stem}.self_attn.{n}.weight": (r, hidden) for n, r in rows.items()}
            )
            if config.model_type == "qwen2":
                self._vectors(f"{to}.qkv_bias", {f"{stem}.self_attn.{n}.bias": r for n, r in rows.items()})
            if config.model_type == "qwen3":
                for name in ("q_norm", "k_norm"):
                    self._vectors(f"{to}.{name}", {f"{stem}.self_attn.{name}.weight": shape.head_dim})
            self._matrices(f"{to}.out", {f"{stem}.self_attn.o_proj.weight": (hidden, queries)})
            both = {f"{stem}.mlp.{n}.weight": (inter, hidden) for n in ("gate_proj", "up_proj")}
            self._matrices(f"{to}.gate_up", both, alternating=True)
            self._matrices(f"{to}.down", {f"{stem}.mlp.down_proj.weight": (hidden, inter)})
            for name in ("input_layernorm", "post_attention_layernorm"):
                self._vectors(f"{to}.{name}", {f"{stem}.{name}.weight": hidden})
        self._vectors("norm", {"model.norm.weight": hidden})
        self._matrices("head", {"lm_head.weight": (shape.vocab_size, hidden)})
        embedding = "model.embed_tokens.weight"
        if config.tie_word_embeddings:
            self.specs[embedding], self._parts[embedding] = (
                self.specs["lm_head.weight"],
                self._parts["lm_head.weight"],
            )
            self.tied.append([embedding, "lm_head.weight"])
        else:
            self._vectors("embedding", {embedding: shape.vocab_size * hidden})
            self.specs[embedding] = Spec((shape.vocab_size, hidden), "BF16", "embedding")

    def _matrices(self, buffer: str, tensors: dict[str, tuple[int, int]], alternating: bool = False) -> None:
        at, step = 0, len(tensors) if alternating else 1
        for place, (name, (rows, inputs)) in enumerate(tensors.items()):
            self.specs[name] = Spec((rows, inputs), "BF16", buffer)
            self._parts[name] = Matrix(rows, inputs, place if alternating else at, step)
            at += blocks(rows)
        self._sizes[buffer] = at * depth_blocks(next(iter(tensors.values()))[1]) * TILE * DEPTH

    def _vectors(self, buffer: str, tensors: dict[str, int]) -> None:
        at = 0
        for name, count in tensors.items():
            self.specs[name] = Spec((count,), "BF16", buffer)
            self._parts[name] = Slice(at, count)
            at += count
        self._sizes[buffer] = at


def _aligned(sizes: list[int]) -> list[Tensor]:
    """bf16 tensors of so many elements, content undefined, each at a multiple of ALIGNMENT bytes, in one allocation
    of NumPy, which asks for huge pages where torch does not."""
    spans = [-(-size * 2 // ALIGNMENT) * ALIGNMENT for size in sizes]
    raw = np.empty(sum(spans) + ALIGNMENT, np.uint8)
    starts = np.cumsum([-raw.ctypes.data % ALIGNMENT, *spans]).tolist()
    whole = torch.from_numpy(raw)
    return [whole[at : at + size * 2].view(torch.bfloat16) for at, size in zip(starts, sizes)]
