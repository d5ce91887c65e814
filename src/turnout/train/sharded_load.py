"""Weights of an HF folder for one rank: it reads the parts that it computes with, layer by layer.

Promises: no rank ever holds the whole model: beside its share there is at most one layer (or embedding and head) of
its tensor-parallel and expert-parallel part in memory. Errors as of turnout.train.model and turnout.train.export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from turnout.core.errors import Fault, InvariantBroken, ModelError
from turnout.train import attention
from turnout.train.export import ExportEntry, checkpoint_files, plan_export
from turnout.train.head import HeadOptions
from turnout.train.model import CausalModel, prepare, read_config

Place = tuple[tuple[int, ...], tuple[int, ...]]  # where a part begins, and its shape


def empty_causal_model(folder: Path, options: HeadOptions, gradient_checkpointing: bool) -> CausalModel:
    """The model of an HF folder with parameters that have no data, and buffers that have."""
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(
            read_config(folder), dtype=torch.float32, attn_implementation=attention.NAME
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, part in list(module.named_modules()):
        if hasattr(part, "inv_freq"):  # derived from the configuration
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, type(part)(module.config).to(device))
    return prepare(module, folder, options, gradient_checkpointing)


class Source:
    """The tensors of an HF folder as parameters of the model, in `dtype`; `entries` are those of its export."""

    def __init__(self, folder: Path, model: CausalModel, dtype: torch.dtype) -> None:
        named = dict(model.module.named_parameters())
        self.entries = plan_export(folder, named, model.tied_head)
        padded = [entry.name for entry in self.entries if entry.rows is not None]
        if padded:
            reason = "has fewer rows than the vocabulary of its config.json"
            raise ModelError([Fault(f"{folder}: {name}", "", reason) for name in padded])
        self._files: Mapping[str, Path] = checkpoint_files(folder)
        self._opened: dict[Path, Any] = {}
        self._parts: dict[str, list[ExportEntry]] = {}
        for entry in self.entries:
            self._parts.setdefault(entry.parameter, []).append(entry)
        self._dtype = dtype
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def read(self, parameter: str, place: Place) -> Tensor:
        """A part of a parameter. Experts that lie apart in the folder are not divided but in their number."""
        start, shape = place
        out = torch.empty(shape, dtype=self._dtype, device=self.device)
        parts = self._parts[parameter]
        if parts[0].expert is None:
            own = next((entry for entry in parts if entry.name == parameter), parts[0])
            out.copy_(self._slice(own.name, start, shape))
            return out
        if any(start[1:]):
            raise InvariantBroken(f"{parameter}: a part of an expert is asked for")
        for entry in parts:
            index = (entry.expert or 0) - start[0]
            if 0 <= index < shape[0]:
                target = out[index] if entry.half is None else out[index].chunk(2)[entry.half]
                target.copy_(self._slice(entry.name, (0,) * target.dim(), tuple(target.shape)))
        return out

    def _slice(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        path = self._files[name]
        if path not in self._opened:  # a header is long where there are many experts
            self._opened[path] = safe_open(path, framework="pt")
        part = tuple(slice(at, at + size) for at, size in zip(start, shape))
        return self._opened[path].get_slice(name)[part]
