"""Versions as handles of shared memory, for engines on this host (`update_weights_from_tensor`).

Each bucket lies in one segment that all engines and all their ranks read; the call carries SGLang's pickle of a
flattened bucket: names of torch's own functions and plain data, so that a stock SGLang reads it too. Promises:
one bucket's memory at a time besides the next one's tensors; a segment is gone when its bucket was answered or
has failed.
"""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from turnout.core.ports import Clock
from turnout.placement.shared_memory import sweep
from turnout.placement.tasks import together
from turnout.serving.weights_client import BucketFlags, EngineWeights
from turnout.transfer.segment import Segment
from turnout.transfer.stream import Bucket, StreamTransport
from turnout.weights.buckets import TORCH_NAMES, Slot, pack
from turnout.weights.store import WeightStore

PROTOCOL = 4


class TensorTransport(StreamTransport):
    """See the module."""

    def __init__(self, store: WeightStore, clock: Clock, bucket_bytes: int) -> None:
        super().__init__(store, clock, bucket_bytes)
        sweep()

    async def send(self, bucket: Bucket, engines: Sequence[EngineWeights], flags: BucketFlags) -> None:
        segment = Segment(sum(tensor.nbytes for tensor in bucket))
        try:
            slots = await asyncio.to_thread(pack, bucket, segment.data)
            payload = flattened_bucket(segment, slots)
            await together(engine.tensors(payload, flags) for engine in engines)
        finally:
            segment.close()


@dataclass(frozen=True)
class _Tensor:
    """Pickles as a uint8 tensor over the whole of a segment."""

    segment: Segment


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
            metadata = (0, torch.Size([obj.segment.size]), (1,), False)
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
    buffer = io.BytesIO()
    _Pickler(buffer, PROTOCOL).dump({"flattened_tensor": _Tensor(segment), "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode()
