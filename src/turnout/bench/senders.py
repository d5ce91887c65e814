"""The sender's side of weight updates that do not go through files, in SGLang's wire form.

The kit brings a sender of its own, so that a fault which a trainer's sender and an engine share is seen. torch is
imported at the first use only. What was sent stays alive until the sender object is dropped: receivers map it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import numpy as np

from turnout.weights.tensors import HostTensor

FLATTENED = "flattened_bucket"
TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I32": "int32"}
GROUP_DEADLINE_S = 30.0


class HandleSender:
    """Tensors in shared memory, described by base64 pickles as torch's multiprocessing makes them."""

    def __init__(self) -> None:
        import torch.multiprocessing  # noqa: PLC0415

        torch.multiprocessing.set_sharing_strategy("file_system")  # file descriptors don't travel over HTTP
        with _output_closed():
            self._kept: list[Any] = [torch.zeros(1).share_memory_()]

    def named(self, tensors: Sequence[HostTensor]) -> str:
        """A list of (name, tensor), each tensor in a segment of its own."""
        shared = [(tensor.name, as_torch(tensor).share_memory_()) for tensor in tensors]
        self._kept.append(shared)
        return _pickled(shared)

    def bucket(self, tensors: Sequence[HostTensor]) -> str:
        """All tensors as one run of bytes, with a description of where each lies."""
        import torch  # noqa: PLC0415

        data = np.concatenate([np.ascontiguousarray(t.bits).view(np.uint8).reshape(-1) for t in tensors])
        flat = torch.from_numpy(data).share_memory_()
        self._kept.append(flat)
        metadata, start = [], 0
        for tensor in tensors:
            metadata.append(
                SimpleNamespace(
                    name=tensor.name,
                    shape=torch.Size(tensor.shape),
                    dtype=getattr(torch, TORCH_DTYPES[tensor.dtype]),
                    start_idx=start,
                    end_idx=start + tensor.nbytes,
                    numel=tensor.nbytes,
                )
            )
            start += tensor.nbytes
        return _pickled({"flattened_tensor": flat, "metadata": metadata})


class GroupSender:
    """Rank 0 of a Gloo group with an engine's ranks. The store's keys are those of SGLang 0.5.23: torch's own
    under the group's name."""

    def __init__(self, name: str, engine_ranks: int) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        self.name, self.world = name, 1 + engine_ranks
        self.port = _free_port()
        self._dist, self._limit = dist, timedelta(seconds=GROUP_DEADLINE_S)
        self._store = dist.TCPStore(
            "127.0.0.1", self.port, self.world, True, self._limit, wait_for_workers=False
        )
        self._backend: Any = None

    async def join(self) -> None:
        """Meets the engine's ranks; blocks a thread until they are there."""
        prefixed = self._dist.PrefixStore(f"{self.name}/", self._dist.PrefixStore(self.name, self._store))
        inner = self._dist.PrefixStore("cpu/", prefixed)

        def meet() -> Any:
            return self._dist.ProcessGroupGloo(inner, 0, self.world, self._limit)

        self._backend = await asyncio.to_thread(meet)

    async def send(self, tensors: Sequence[HostTensor], flat: bool) -> None:
        """Broadcasts the tensors one by one, or as one run of bytes."""
        import torch  # noqa: PLC0415

        parts = [as_torch(tensor) for tensor in tensors]
        if flat:
            parts = [torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])]
        options = self._dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._limit

        def broadcast() -> None:
            for work in [self._backend.broadcast([part], options) for part in parts]:
                work.wait(self._limit)

        await asyncio.to_thread(broadcast)

    def close(self) -> None:
        """Closes the connections; the store goes with this object."""
        self._backend = None


def as_torch(tensor: HostTensor) -> Any:
    """A torch tensor of its own memory."""
    import torch  # noqa: PLC0415

    raw = torch.from_numpy(np.ascontiguousarray(tensor.bits).view(np.uint8).reshape(-1).copy())
    return raw.view(getattr(torch, TORCH_DTYPES[tensor.dtype])).reshape(tensor.shape)


def packed(tensors: Sequence[HostTensor], limit: int) -> list[list[HostTensor]]:
    """Buckets of at most `limit` bytes in order; a larger tensor has one of its own."""
    buckets: list[list[HostTensor]] = []
    for tensor in tensors:
        if buckets and sum(t.nbytes for t in buckets[-1]) + tensor.nbytes <= limit:
            buckets[-1].append(tensor)
        else:
            buckets.append([tensor])
    return buckets


@contextmanager
def _output_closed() -> Iterator[None]:
    """The first share starts torch's manager of segments, which lives as long as any receiver: were it to
    inherit our output, who reads that from a pipe would wait for the engine's end."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    kept = [(number, os.dup(number)) for number in (1, 2)]
    try:
        for number, _ in kept:
            os.dup2(nowhere, number)
        yield
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)


def _pickled(value: Any) -> str:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return base64.b64encode(buffer.getvalue()).decode()


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
