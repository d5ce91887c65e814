"""Where the live weights lie, by their names in a checkpoint.

A storage is a set of buffers, each holding one or more tensors (a stack of experts, a fused product). An update
fills new buffers and swaps them with the live ones, or writes single elements in place; both happen between two
steps, so that whoever computes sees the old weights or the new ones, never half of each. `ModuleStorage` keeps them
as the parameters of a torch module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from turnout.engine.live_dtypes import as_stored
from turnout.engine.patches import Patch, Placed, exchange, placed
from turnout.placement.footprint import drop_pages
from turnout.weights.changes import Bits
from turnout.weights.digest import Sums, element_sums

Prepared = Any  # what a storage makes of patches ahead of their activation
Buffer = Any  # what a storage says it is: a tensor, or a handle on one tensor in every rank


@dataclass(frozen=True)
class Written:
    """What was read back of a tensor that was just written, in the live dtype: the sums of its digest, and how many
    of its elements are NaN or infinite."""

    sums: Sums
    nonfinite: int


@dataclass(frozen=True)
class Spec:
    """Shape and live dtype (safetensors' name, BF16 or F32) of one tensor; `buffer` says which one holds it."""

    shape: tuple[int, ...]
    dtype: str
    buffer: str


class Storage(Protocol):
    """What LiveWeights needs. `specs` has every name a checkpoint may use; names with the same buffer and `tied`
    together are one tensor. Bits are flat, of the live dtype's width."""

    specs: dict[str, Spec]
    tied: list[list[str]]
    takes_changes: bool  # whether `prepare` and `exchange` can be called

    def live(self, buffer: str) -> Buffer: ...
    def fresh(self, buffer: str) -> Buffer:
        """A new buffer of the right size, its content undefined."""
        ...

    def fresh_set(self) -> dict[str, Buffer]:
        """All buffers new, for an update of every tensor: a storage may take their memory at once."""
        ...

    def write(self, buffer: Buffer, name: str, bits: Bits) -> Written | None:
        """What lies there then, where that comes with it; None: `sums` says it."""
        ...

    def read(self, buffer: Buffer, name: str) -> Bits:
        """The tensor's bits: a view where the layout allows it, else a copy."""
        ...

    def sums(self, buffer: Buffer, name: str, dtype: str) -> Sums | None:
        """The digest's sums over the tensor's elements as `dtype`; None where that cannot hold them exactly."""
        ...

    def prepare(self, patches: Sequence[Patch]) -> Prepared:
        """Has every process ready to write its part of the patches; no live buffer changes."""
        ...

    def exchange(self, prepared: Prepared, buffers: dict[str, Buffer], write: bool) -> list[Sums]:
        """Writes prepared patches into these buffers, or the live ones where one is not named (then it is called
        between two steps); by patch, what to add to the sums of the tensor's digest. Not `write`: what writing
        would add. Raises WeightError where processes that hold the same elements differ."""
        ...

    def swap(self, buffers: dict[str, Buffer]) -> None:
        """Puts new buffers in place of the live ones. Called between two steps."""
        ...

    def release(self) -> int:
        """Frees the memory of the live buffers and returns how many bytes that were. From then on only `fresh`
        and a `swap` of every buffer are called."""
        ...


class ModuleStorage:
    """The parameters of a torch module. Stacked experts are taken apart: a checkpoint has one tensor per expert
    and projection, the module one stack [experts, gate then up, hidden]."""

    takes_changes = True

    def __init__(self, module: nn.Module) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._index: dict[str, tuple[int, int, int] | None] = {}  # expert, first row, rows
        self.specs: dict[str, Spec] = {}
        buffers: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            buffer = buffers.setdefault(id(parameter), name)
            self._parameters[buffer] = parameter
            for tensor, index in _checkpoint_names(name, parameter):
                shape = tuple(parameter.shape) if index is None else (index[2], parameter.shape[2])
                self.specs[tensor] = Spec(shape, SAFETENSORS[parameter.dtype], buffer)
                self._index[tensor] = index
        self.tied = _tied(self.specs, self._index)

    def live(self, buffer: str) -> Tensor:
        return self._parameters[buffer].data

    def fresh(self, buffer: str) -> Tensor:
        live = self._parameters[buffer].data
        return torch.empty(live.shape, dtype=live.dtype)

    def fresh_set(self) -> dict[str, Tensor]:
        return {buffer: self.fresh(buffer) for buffer in self._parameters}

    def write(self, buffer: Tensor, name: str, bits: Bits) -> None:
        np.copyto(self.read(buffer, name), bits)

    def read(self, buffer: Tensor, name: str) -> Bits:
        index = self._index[name]
        view = buffer if index is None else buffer[index[0], index[1] : index[1] + index[2]]
        return as_bits(view)

    def sums(self, buffer: Tensor, name: str, dtype: str) -> Sums | None:
        stored = as_stored(self.read(buffer, name), self.specs[name].dtype, dtype)
        return None if stored is None else element_sums(stored)

    def prepare(self, patches: Sequence[Patch]) -> list[Placed]:
        return [placed(patch, patch.positions, 0) for patch in patches]

    def exchange(self, prepared: list[Placed], buffers: dict[str, Tensor], write: bool) -> list[Sums]:
        found = []
        for change in prepared:
            name = change.patch.name
            buffer = self.specs[name].buffer
            memory = self.read(buffers[buffer] if buffer in buffers else self.live(buffer), name)
            found.append(exchange(memory, change, write))
        return found

    def swap(self, buffers: dict[str, Tensor]) -> None:
        for name, buffer in buffers.items():
            self._parameters[name].data = buffer

    def release(self) -> int:
        freed = 0
        for parameter in self._parameters.values():
            held = parameter.data.untyped_storage()
            freed += held.nbytes()
            drop_pages(held.data_ptr(), held.nbytes())
            parameter.data = torch.empty(1, dtype=parameter.dtype).expand(parameter.shape)  # one element
        return freed


SAFETENSORS = {torch.bfloat16: "BF16", torch.float32: "F32"}


def as_bits(view: Tensor) -> Bits:
    """The elements of a dense tensor as a flat array of their bit patterns, sharing memory."""
    if view.dtype == torch.bfloat16:
        return view.view(torch.int16).numpy().view(np.uint16).reshape(-1)
    return view.view(torch.int32).numpy().view(np.uint32).reshape(-1)


def _checkpoint_names(name: str, parameter: nn.Parameter) -> list[tuple[str, tuple[int, int, int] | None]]:
    """The checkpoint's tensors in a parameter, each with its expert, first row and rows inside the stack."""
    stem, _, leaf = name.rpartition(".")
    if parameter.dim() != 3 or leaf not in ("gate_up_proj", "down_proj"):
        return [(name, None)]
    experts, rows = parameter.shape[:2]
    if leaf == "down_proj":
        return [(f"{stem}.{e}.down_proj.weight", (e, 0, rows)) for e in range(experts)]
    half = rows // 2
    parts = (("gate_proj", 0), ("up_proj", half))
    return [(f"{stem}.{e}.{part}.weight", (e, at, half)) for e in range(experts) for part, at in parts]


def _tied(specs: dict[str, Spec], index: dict[str, tuple[int, int, int] | None]) -> list[list[str]]:
    whole: dict[str, list[str]] = {}
    for name, spec in specs.items():
        if index[name] is None:
            whole.setdefault(spec.buffer, []).append(name)
    return [names for names in whole.values() if len(names) > 1]
