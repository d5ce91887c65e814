"""Weights of the trainer under the names of the HF checkpoint it came from.

Promises: exactly the tensors of the checkpoint (a tied head appears where the checkpoint had it, experts
that the model code fuses come apart again, rows that pad the vocabulary stay out), each in the compute dtype, as
copies that later steps do not touch. A checkpoint that does not cover the model, or has other shapes, is refused
when it is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from turnout.core.errors import Fault, ModelError
from turnout.weights.tensors import HostTensor

VOCABULARY = (
    "embed_tokens.weight",
    "lm_head.weight",
)  # may have more rows in the model than in its checkpoint
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_NAMES = {torch.bfloat16: ("BF16", torch.int16, np.uint16), torch.float32: ("F32", torch.int32, np.uint32)}


@dataclass(frozen=True)
class ExportEntry:
    """One tensor of the checkpoint and where it lives: a parameter, or a slice of a fused one."""

    name: str
    parameter: str
    expert: int | None = None
    half: int | None = None  # 0 gate, 1 up: halves of the fused gate_up_proj
    rows: int | None = None  # of the checkpoint, where the model's vocabulary is padded

    def view(self, parameters: Mapping[str, Tensor]) -> Tensor:
        tensor = parameters[self.parameter]
        if self.expert is None:
            return tensor if self.rows is None else tensor[: self.rows]
        tensor = tensor[self.expert]
        return tensor if self.half is None else tensor.chunk(2)[self.half]


def plan_export(folder: Path, parameters: Mapping[str, Tensor], tied_head: str | None) -> list[ExportEntry]:
    """Entries for every tensor of the checkpoint that the model has, sorted by name.

    `tied_head` is the embedding's parameter name where the head shares it. Raises ModelError with every
    tensor that is missing or has another shape.
    """
    shapes = checkpoint_shapes(folder)
    entries: list[ExportEntry] = []
    faults: list[Fault] = []
    covered: set[str] = set()
    for name in sorted(shapes):
        entry = _entry(name, parameters, tied_head)
        if entry is None:
            continue  # old checkpoints carry buffers, such as rotary frequencies, that no model code reads
        covered.add(entry.parameter)
        shape = tuple(entry.view(parameters).shape)
        if name.endswith(VOCABULARY) and shape[1:] == shapes[name][1:] and shape[0] > shapes[name][0]:
            entry = replace(entry, rows=shapes[name][0])
        elif shape != shapes[name]:
            faults.append(Fault(f"{folder}: {name}", str(shapes[name]), f"the model code has shape {shape}"))
        entries.append(entry)
    missing = sorted(set(parameters) - covered)
    faults += [Fault(f"{folder}: {name}", "", "the checkpoint lacks this tensor") for name in missing]
    if faults:
        raise ModelError(faults)
    return entries


def _entry(name: str, parameters: Mapping[str, Tensor], tied_head: str | None) -> ExportEntry | None:
    if name in parameters:
        return ExportEntry(name, name)
    if name == "lm_head.weight" and tied_head is not None:
        return ExportEntry(name, tied_head)
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    base, expert, part = match.group(1), int(match.group(2)), match.group(3)
    parameter = f"{base}.down_proj" if part == "down_proj" else f"{base}.gate_up_proj"
    half = {"gate_proj": 0, "up_proj": 1}.get(part)
    return ExportEntry(name, parameter, expert, half) if parameter in parameters else None


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of an HF folder by name, from the headers of its safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _files(folder):
        with safe_open(path, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118
                shapes[name] = tuple(opened.get_slice(name).get_shape())
    return shapes


def checkpoint_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor of an HF folder."""
    files: dict[str, Path] = {}
    for path in _files(folder):
        with safe_open(path, framework="np") as opened:
            files |= dict.fromkeys(opened.keys(), path)
    return files


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for file in files:
        if not (folder / file).exists():
            raise ModelError(
                Fault(str(folder / file), "", "the file is missing", "give a safetensors checkpoint")
            )
    return [folder / file for file in files]


def export_tensors(
    entries: list[ExportEntry], parameters: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Iterator[HostTensor]:
    """One host copy per entry, made as it is asked for; in `dtype`, None: as it is."""
    for entry in entries:
        yield _copy(entry, parameters, dtype)


def _copy(entry: ExportEntry, parameters: Mapping[str, Tensor], kind: torch.dtype | None) -> HostTensor:
    """A function of its own, so that the generator does not hold one copy while it makes the next."""
    tensor = entry.view(parameters).detach().to("cpu", kind, copy=True).contiguous()
    dtype, signed, unsigned = _NAMES[tensor.dtype]
    bits = tensor.view(-1).view(signed).numpy().view(unsigned)
    return HostTensor(entry.name, dtype, tuple(tensor.shape), bits)
