"""A scripted engine that really takes deltas: it holds tensors, and what it attests is what it holds.

Folders are read by the product's own readers; buckets of a group come over `wire`, which stands for Gloo. A change
is refused where the engine holds another root than the one it is relative to.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from tests.scripted_engine import Answer, ScriptedEngine
from turnout.serving.weights_client import BucketFlags, EngineWeights
from turnout.transfer.delta_group import DeltaGroupTransport
from turnout.weights import buckets, delta_bucket
from turnout.weights.changes import overwrite
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.delta_io import read_delta
from turnout.weights.digest import root_of
from turnout.weights.manifest import load_manifest
from turnout.weights.tensors import HostTensor

FINE = {"success": True, "message": ""}


class DeltaEngine(ScriptedEngine):
    """See the module."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    def hold(self, tensors: Iterable[HostTensor]) -> None:
        self.tensors = {t.name: HostTensor(t.name, t.dtype, t.shape, t.bits.copy()) for t in tensors}
        self.root = root_of(self.tensors.values())
        self.staged: dict[str, HostTensor] = {}
        self.wire = np.empty(0, np.uint8)

    def _behave(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/weights_checker":
            return {**FINE, "per_engine_checksum": root_of(self.tensors.values())}
        if path == "/begin_weight_update":
            if body.get("base_root", self.root) != self.root:
                return Answer(400, {"success": False, "message": f"holds {self.root}"})
            self.staged = self._copies() if "base_root" in body else {}
            return FINE
        if path == "/update_weights_from_distributed":
            self._receive(body)
            return FINE
        if path == "/end_weight_update":
            if body.get("abort"):
                self.staged = {}
            elif body.get("root", root_of(self.staged.values())) != root_of(self.staged.values()):
                return Answer(400, {"success": False, "message": "another root"})
            else:
                self.hold(self.staged.values())
            return FINE
        if path in ("/init_weights_update_group", "/destroy_weights_update_group"):
            return FINE
        return super()._behave(path, body)

    def _receive(self, body: dict[str, Any]) -> None:
        described = zip(body["names"], map(buckets.dtype_of, body["dtypes"]), body["shapes"])
        if body["load_format"] == delta_bucket.DELTA_BUCKET:
            parts = delta_bucket.parts((*row, count) for row, count in zip(described, body["counts"]))
            for change in delta_bucket.unpack(self.wire, parts):
                overwrite(self.staged[change.name].bits, change)
        else:
            for tensor in buckets.unpack(self.wire, buckets.slots(described)):
                self.staged[tensor.name] = HostTensor(
                    tensor.name, tensor.dtype, tensor.shape, tensor.bits.copy()
                )
        self.label = body.get("weight_version", self.label)

    def _load_from_disk(self, body: dict[str, Any]) -> Any:
        folder = Path(body["model_path"])
        manifest = load_manifest(folder)
        if body["load_format"] == "auto":
            self.hold(read_checkpoint(folder))
        else:
            if manifest.base is None or manifest.base.root != self.root:
                return Answer(400, {"success": False, "message": f"relative to {manifest.base}"})
            held = self._copies()
            for change in read_delta(folder, manifest, lambda name: held[name].bits):
                overwrite(held[change.name].bits, change)
            self.hold(held.values())
        self.label = body["weight_version"]
        return {"success": True, "message": "loaded"}

    def _copies(self) -> dict[str, HostTensor]:
        return {n: HostTensor(t.name, t.dtype, t.shape, t.bits.copy()) for n, t in self.tensors.items()}


class WiredGroup(DeltaGroupTransport):
    """The transport with a wire in the place of Gloo."""

    wired: Sequence[DeltaEngine] = ()
    breaks_at = -1
    broadcasts = 0

    async def open(self, engines: Sequence[EngineWeights], deadline_s: float) -> None:
        pass

    async def broadcast(
        self,
        data: torch.Tensor,
        flags: BucketFlags,
        call: Callable[[EngineWeights, str], Awaitable[None]],
        engines: Sequence[EngineWeights],
    ) -> None:
        self.broadcasts += 1
        for engine, wired in zip(engines, self.wired):
            wired.wire = (
                data.numpy() if self.broadcasts != self.breaks_at else np.zeros(data.numel(), np.uint8)
            )
            await call(engine, "wire")
