"""Weights of the live model by their names in a checkpoint: validate, overwrite, attest.

Promises: `prepare` changes nothing and raises WeightError with every fault found (names both ways, shapes,
dtypes, non-finite values, a digest that is not the manifest's); `activate` writes into the live parameters
and returns the root digest **computed from them afterwards**, raising WeightError where it is not the
prepared one: the live weights are then unknown and nothing may be served from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from turnout.core.errors import WeightError
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_digest, root_of, tensor_digest
from turnout.weights.manifest import DONE, MANIFEST, WeightManifest, load_manifest
from turnout.weights.tensors import HostTensor, nonfinite_count

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a derived buffer that old Llama checkpoints carry
SAFETENSORS = {torch.bfloat16: "BF16", torch.float32: "F32"}
EXACT = {("BF16", "BF16"), ("F32", "F32"), ("BF16", "F32"), ("F16", "F32")}
FAULTS_SHOWN = 8


@dataclass(frozen=True)
class Prepared:
    """A validated checkpoint, still on disk (memory-mapped). `root` is what the live tensors must give;
    `rounded` says that float32 values were rounded to the engine's bf16, as allowed at the start only."""

    folder: Path
    tensors: tuple[HostTensor, ...]
    root: str
    manifest: WeightManifest | None
    rounded: bool = False


class LiveWeights:
    """The parameters of a live module under their checkpoint names."""

    def __init__(self, module: nn.Module) -> None:
        self.views = _views(module)
        by_storage: dict[int, list[str]] = {}
        for name, view in self.views.items():
            by_storage.setdefault(view.data_ptr(), []).append(name)
        self.tied = [names for names in by_storage.values() if len(names) > 1]

    def prepare(self, folder: Path, may_round: bool = False) -> Prepared:
        """Reads and checks a checkpoint folder against the live model. No live tensor changes."""
        manifest = None
        if (folder / MANIFEST).exists() or (folder / DONE).exists():
            manifest = load_manifest(folder)
            if manifest.kind != "full":
                raise WeightError(f"{folder}: holds a {manifest.kind} version; a full one is needed")
        if not folder.is_dir():
            raise WeightError(f"{folder}: no such folder")
        tensors = tuple(t for t in read_checkpoint(folder) if not t.name.endswith(IGNORED_SUFFIX))
        faults = [*self._name_faults(tensors), *self._tensor_faults(tensors, may_round)]
        if faults:
            more = f"; and {len(faults) - FAULTS_SHOWN} more" if len(faults) > FAULTS_SHOWN else ""
            raise WeightError(f"{folder}: " + "; ".join(faults[:FAULTS_SHOWN]) + more)
        root = root_of(tensors)
        if manifest is not None and root != manifest.version.root:
            raise WeightError(f"{folder}: root digest {root}, the manifest says {manifest.version.root}")
        rounded = any(not self._exact(t) for t in tensors)
        return Prepared(folder, tensors, root, manifest, rounded)

    def activate(self, prepared: Prepared) -> str:
        """Overwrites the live parameters and returns their root digest, see the module."""
        for tensor in prepared.tensors:
            _overwrite(self.views[tensor.name], tensor)
        root = self.root({t.name: t.dtype for t in prepared.tensors})
        if not prepared.rounded and root != prepared.root:
            raise WeightError(f"live tensors give root {root}, {prepared.folder} gave {prepared.root}")
        return root

    def root(self, stored: dict[str, str]) -> str:
        """The root digest of the live tensors under these names, in the dtype they were stored in."""
        lines = {}
        for name, dtype in stored.items():
            tensor = _as_stored(name, self.views[name], dtype)
            lines[name] = (tensor.dtype, tensor.shape, tensor_digest(tensor))
        return root_digest(lines)

    def _exact(self, tensor: HostTensor) -> bool:
        return (tensor.dtype, SAFETENSORS[self.views[tensor.name].dtype]) in EXACT

    def _name_faults(self, tensors: tuple[HostTensor, ...]) -> list[str]:
        given = {t.name: t for t in tensors}
        covered = set(given)
        faults = [f"{name} is not a tensor of this model" for name in given if name not in self.views]
        for names in self.tied:
            present = [name for name in names if name in given]
            covered.update(names if present else ())
            if any(not np.array_equal(given[n].bits, given[present[0]].bits) for n in present[1:]):
                faults.append(f"{' and '.join(present)} are tied in this model and differ in the checkpoint")
        missing = [name for name in self.views if name not in covered]
        return [*faults, *(f"{name} is missing" for name in missing)]

    def _tensor_faults(self, tensors: tuple[HostTensor, ...], may_round: bool) -> list[str]:
        faults = []
        for tensor in tensors:
            view = self.views.get(tensor.name)
            if view is None:
                continue
            if tensor.shape != tuple(view.shape):
                faults.append(
                    f"{tensor.name} has shape {list(tensor.shape)}, the model's is {list(view.shape)}"
                )
            live = SAFETENSORS[view.dtype]
            if (tensor.dtype, live) not in EXACT and not (may_round and tensor.dtype in ("F32", "F16")):
                faults.append(f"{tensor.name} is {tensor.dtype}, which {live} cannot hold exactly")
            bad = nonfinite_count(tensor)
            if bad:
                faults.append(f"{tensor.name} has {bad} values that are NaN or infinite")
        return faults


def _views(module: nn.Module) -> dict[str, Tensor]:
    """Live parameters by checkpoint name. Stacked experts are taken apart: a checkpoint has one tensor per
    expert and projection, the module one stack [experts, gate then up, hidden]."""
    views: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj" and parameter.dim() == 3:
            half = parameter.shape[1] // 2
            for expert in range(parameter.shape[0]):
                views[f"{stem}.{expert}.gate_proj.weight"] = parameter.data[expert, :half]
                views[f"{stem}.{expert}.up_proj.weight"] = parameter.data[expert, half:]
        elif leaf == "down_proj" and parameter.dim() == 3:
            for expert in range(parameter.shape[0]):
                views[f"{stem}.{expert}.down_proj.weight"] = parameter.data[expert]
        else:
            views[name] = parameter.data
    return views


def _bits(view: Tensor) -> NDArray[np.unsignedinteger]:
    """The live elements as a flat array of their bit patterns, sharing memory."""
    if view.dtype == torch.bfloat16:
        return view.view(torch.int16).numpy().view(np.uint16).reshape(-1)
    return view.view(torch.int32).numpy().view(np.uint32).reshape(-1)


def _overwrite(view: Tensor, tensor: HostTensor) -> None:
    live = _bits(view)
    if tensor.dtype == SAFETENSORS[view.dtype]:
        np.copyto(live, tensor.bits)
    elif tensor.dtype == "BF16":
        np.left_shift(tensor.bits, np.uint32(16), out=live, dtype=np.uint32, casting="unsafe")
    else:
        wide = tensor.bits.view(np.float16 if tensor.dtype == "F16" else np.float32).astype(np.float32)
        view.copy_(torch.from_numpy(wide).view(view.shape))


def _as_stored(name: str, view: Tensor, dtype: str) -> HostTensor:
    """A live tensor in the dtype it was stored in; in the live dtype where it does not fit that exactly."""
    bits, live, shape = _bits(view), SAFETENSORS[view.dtype], tuple(view.shape)
    if live == "F32" and dtype == "BF16" and not np.any(bits & np.uint32(0xFFFF)):
        return HostTensor(name, dtype, shape, (bits >> np.uint32(16)).astype(np.uint16))
    if live == "F32" and dtype == "F16":
        half = bits.view(np.float32).astype(np.float16)
        if np.array_equal(half.astype(np.float32).view(np.uint32), bits):
            return HostTensor(name, dtype, shape, half.view(np.uint16))
    return HostTensor(name, live, shape, bits)
