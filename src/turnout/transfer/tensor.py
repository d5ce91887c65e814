"""Versions as handles of shared memory, for engines on this host (`update_weights_from_tensor`).

Each bucket lies in one segment that all engines and all their ranks read; the call carries SGLang's pickle of a
flattened bucket: names of torch's own functions and plain data, so that a stock SGLang reads it too. Promises: one
bucket's memory at a time, of at most SEGMENT_BYTES, and one tensor of the export; a segment is filled again only
when its bucket was answered, and gone where that failed. It stays between updates, since new pages of shared memory
cost more than ten copies into old ones; that of a larger tensor goes with its update.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions

from turnout.core.ports import Clock
from turnout.placement.shared_memory import sweep
from turnout.placement.tasks import together
from turnout.serving.weights_client import BucketFlags, EngineWeights
from turnout.transfer.segment import Segment
from turnout.transfer.stream import StreamTransport
from turnout.transfer.transport import Export, Ready
from turnout.weights.buckets import TORCH_NAMES, Slot, closes, slots
from turnout.weights.store import WeightStore

PROTOCOL = 4
SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True)
class Filled:
    """A bucket where engines read it."""

    segment: Segment
    slots: list[Slot]


class TensorTransport(StreamTransport):
    """See the module."""

    def __init__(self, store: WeightStore, clock: Clock, bucket_bytes: int) -> None:
        super().__init__(store, clock, min(bucket_bytes, SEGMENT_BYTES))
        sweep()
        self._segment: Segment | None = None
        self._enough = 0  # bytes of a segment for every bucket of the version

    def _fix(self, export: Export) -> Ready:
        ready = super()._fix(export)
        self._enough = min(ready.bytes, self._bucket_bytes)
        return ready

    def cut(self, export: Export) -> Iterator[tuple[Filled, bool]]:
        """Every tensor is copied where it is read as soon as it is there."""
        described: list[tuple[str, str, tuple[int, ...]]] = []
        size, segment = 0, self._room(0)
        try:
            for tensor in export():
                if described and closes(len(described), size, tensor, self._bucket_bytes):
                    yield Filled(segment, slots(described)), False
                    described, size = [], 0
                if not described:
                    segment = self._room(tensor.nbytes)
                np.copyto(segment.data[size : size + tensor.nbytes], tensor.bits.view(np.uint8))
                described.append((tensor.name, tensor.dtype, tensor.shape))
                size += tensor.nbytes
                del tensor  # the next one is made before it would be let go
            if described:
                yield Filled(segment, slots(described)), True
        finally:
            if self._segment is not None and self._segment.size > SEGMENT_BYTES:
                self._forget()

    async def send(self, bucket: Filled, engines: Sequence[EngineWeights], flags: BucketFlags) -> None:
        payload = flattened_bucket(bucket.segment, bucket.slots)
        await together(engine.tensors(payload, flags) for engine in engines)

    async def close(self) -> None:
        self._forget()

    def _room(self, size: int) -> Segment:
        """The segment for a bucket that begins, made where there is none, it is too small, or its name is gone:
        torch removes names that a process which ends had open."""
        if self._segment is None or self._segment.size < size or not self._segment.named:
            self._forget()
            self._segment = Segment(max(size, self._enough))
        return self._segment

    def _forget(self) -> None:
        if self._segment is not None:
            self._segment.close()
        self._segment = None


@dataclass(frozen=True)
class _Tensor:
    """Pickles as a uint8 tensor over the first `size` bytes of a segment."""

    segment: Segment
    size: int


@dataclass(frozen=True)
class _TypedStorage:
    segment: Segment


@dataclass(frozen=True)
class _UntypedStorage:
    segment: Segment


class _Pickler(pickle.Pickler):
    """Writes the calls that torch's ForkingPickler would, for a segment that is no storage of this process. The
    empty name of a manager has the reader use one of its own: this process runs none."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Tensor):
            metadata = (0, torch.Size([obj.size]), (1,), False)
            return reductions.rebuild_tensor, (torch.Tensor, _TypedStorage(obj.segment), metadata)
        if isinstance(obj, _TypedStorage):
            return reductions.rebuild_typed_storage, (_UntypedStorage(obj.segment), torch.uint8)
        if isinstance(obj, _UntypedStorage):
            arguments = (torch.UntypedStorage, b"", obj.segment.handle, obj.segment.size)
            return reductions.rebuild_storage_filename, arguments
        return NotImplemented


def flattened_bucket(segment: Segment, slots: Sequence[Slot]) -> str:
    """The base64 pickle of a bucket. Its parts are plain namespaces: SGLang reads attributes, and the class it
    uses itself is not installed here."""
    metadata = [
        SimpleNamespace(
            name=slot.name,
            shape=torch.Size(slot.shape),
            dtype=getattr(torch, TORCH_NAMES[slot.dtype]),
            start_idx=slot.start,
            end_idx=slot.end,
            numel=slot.end - slot.start,
        )
        for slot in slots
    ]
    flat = _Tensor(segment, slots[-1].end)
    buffer = io.BytesIO()
    _Pickler(buffer, PROTOCOL).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode()
