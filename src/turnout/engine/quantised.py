"""A module whose linear layers keep their weights quantised, and the Storage of such an engine.

A weight is quantised when it comes in, whole, so neither the order of tensors nor the boundaries of buckets matter
and nothing is left to do after the last one. Embeddings, head, norms, routers and stacked experts stay as they are.
Promises: what is attested is the export that was received, and only while the stored form is still the one that
was made of it; a stored form that changed since is a WeightError that names the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout.core.errors import WeightError
from turnout.engine.linear import RowBlockLinear, row_blocks
from turnout.engine.live_dtypes import as_stored
from turnout.engine.patches import Patch
from turnout.engine.quantise import Quantised, empty, quantise
from turnout.engine.storage import ModuleStorage, Spec, as_bits
from turnout.weights.changes import Bits
from turnout.weights.digest import Sums, add, element_sums

EXACT_SOURCES = ("F32", "BF16", "F16")


class QuantisedLinear(nn.Module):
    """x [..., in] -> [..., out] by row blocks, on the dequantised weight."""

    def __init__(self, linear: RowBlockLinear, scheme: str) -> None:
        super().__init__()
        self.stored = empty(linear.weight.shape, scheme)
        self.bias, self.row_block, self.dtype = linear.bias, linear.row_block, linear.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        weight = self.stored.dequantised(self.dtype)
        flat = x.reshape(-1, weight.shape[1])
        out = row_blocks(flat, self.row_block, lambda rows: F.linear(rows, weight, self.bias))
        return out.view(*x.shape[:-1], weight.shape[0])


@dataclass(eq=False)
class Slot:
    """One quantised weight. `sources`: the digest's sums over the export it was made of, by the dtypes that hold
    it exactly; `mark`: those over the stored form, as it was made."""

    stored: Quantised
    sources: dict[str, Sums] = field(default_factory=dict)
    mark: Sums | None = None

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes


class QuantisedStorage:
    """A Storage (turnout.engine.storage) over a module that `convert` went through. What it was given is not kept,
    so it takes whole tensors only, no changes of them."""

    takes_changes = False

    def __init__(self, module: nn.Module, scheme: str) -> None:
        self._plain = ModuleStorage(module)
        self._scheme = scheme
        self.tied = self._plain.tied
        self.specs = dict(self._plain.specs)
        self._layers: dict[str, QuantisedLinear] = {}
        self._live: dict[str, Slot] = {}
        for name, layer in module.named_modules():
            if isinstance(layer, QuantisedLinear):
                weight = f"{name}.weight"
                dtype = "BF16" if layer.dtype == torch.bfloat16 else "F32"
                self.specs[weight] = Spec(tuple(layer.stored.values.shape), dtype, weight)
                self._layers[weight], self._live[weight] = layer, Slot(layer.stored)

    def live(self, buffer: str) -> Tensor | Slot:
        return self._live[buffer] if buffer in self._layers else self._plain.live(buffer)

    def fresh(self, buffer: str) -> Tensor | Slot:
        if buffer not in self._layers:
            return self._plain.fresh(buffer)
        return Slot(empty(torch.Size(self.specs[buffer].shape), self._scheme))

    def fresh_set(self) -> dict[str, Tensor | Slot]:
        return {buffer: self.fresh(buffer) for buffer in {spec.buffer for spec in self.specs.values()}}

    def write(self, buffer: Tensor | Slot, name: str, bits: Bits) -> None:
        if not isinstance(buffer, Slot):
            self._plain.write(buffer, name, bits)
            return
        spec = self.specs[name]
        buffer.stored = quantise(_as_tensor(bits, spec), self._scheme)
        stored = ((dtype, as_stored(bits, spec.dtype, dtype)) for dtype in EXACT_SOURCES)
        buffer.sources = {dtype: element_sums(held) for dtype, held in stored if held is not None}
        buffer.mark = _mark(buffer.stored)

    def read(self, buffer: Tensor | Slot, name: str) -> Bits:
        """Of a quantised tensor: what is computed with, so rounded."""
        if not isinstance(buffer, Slot):
            return self._plain.read(buffer, name)
        return as_bits(buffer.stored.dequantised(self._layers[name].dtype))

    def sums(self, buffer: Tensor | Slot, name: str, dtype: str) -> Sums | None:
        """Over the export that was received, once the stored form was seen to be what was made of it."""
        if not isinstance(buffer, Slot):
            return self._plain.sums(buffer, name, dtype)
        if _mark(buffer.stored) != buffer.mark:
            raise WeightError(f"{name}: its quantised form changed since it was made")
        return buffer.sources.get(dtype)

    def prepare(self, patches: Sequence[Patch]) -> NoReturn:  # noqa: ARG002
        raise WeightError(
            "a quantised engine keeps no exact weights that could be changed: a full update is needed"
        )

    def exchange(self, prepared: Any, buffers: dict[str, Any], write: bool) -> NoReturn:  # noqa: ARG002
        self.prepare(())

    def swap(self, buffers: dict[str, Tensor | Slot]) -> None:
        plain = {name: buffer for name, buffer in buffers.items() if not isinstance(buffer, Slot)}
        self._plain.swap(plain)
        for name, buffer in buffers.items():
            if isinstance(buffer, Slot):
                self._live[name], self._layers[name].stored = buffer, buffer.stored

    def release(self) -> int:
        freed = sum(slot.nbytes for slot in self._live.values())
        for name, layer in self._layers.items():
            layer.stored = Quantised(torch.empty(0), torch.empty(0))
            self._live[name] = Slot(layer.stored)
        return freed + self._plain.release()


def convert(module: nn.Module, scheme: str) -> None:
    """Replaces every linear layer of a live model but the head; their weights are undefined until a swap."""
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, RowBlockLinear) and name != "lm_head":
                setattr(parent, name, QuantisedLinear(layer, scheme))


def _as_tensor(bits: Bits, spec: Spec) -> Tensor:
    flat = torch.from_numpy(np.array(bits).view(np.int16 if spec.dtype == "BF16" else np.int32))
    return flat.view(torch.bfloat16 if spec.dtype == "BF16" else torch.float32).view(spec.shape)


def _mark(stored: Quantised) -> Sums:
    values = stored.values.view(torch.int8).numpy().view(np.uint8).reshape(-1)
    scales = stored.scales.view(torch.int32).numpy().view(np.uint32).reshape(-1)
    return add(element_sums(values), element_sums(scales, values.size))
