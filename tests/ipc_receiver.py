"""A receiver of checkpoint-engine's protocol for tests, after `worker.update_weights_from_ipc` of 0.4.2: shared
memory where that has CUDA's, and a socket of queues for where pyzmq is not installed."""

from __future__ import annotations

import pickle
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.transfer.segment import HEADER_BYTES, Segment

Load = Callable[[list[tuple[str, torch.Tensor]]], None]
UUID = "GPU-of-the-tests"


def rebuild(
    name: bytes, size: int, _a: None, _b: None, _c: None, _d: None, device: int | None
) -> torch.Tensor:
    """In the place of torch's rebuild_cuda_tensor, whose seventh argument is the device too."""
    assert device == 3, "the receiver's own device was not put in"
    path = f"/dev/shm{name.decode()}"
    return torch.from_file(path, True, HEADER_BYTES + size, dtype=torch.uint8)[HEADER_BYTES:]


class SharedMemory:
    """A Memory of this host."""

    def __init__(self, size: int) -> None:
        self._segment = Segment(size)

    @property
    def handle(self) -> tuple[Any, tuple[Any, ...]]:
        return rebuild, (self._segment.handle, self._segment.size, None, None, None, None, None)

    def write(self, offset: int, bits: NDArray[np.uint8]) -> None:
        self._segment.data[offset : offset + bits.size] = bits

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self._segment.close()


class QueuePort:
    """Both ends of one REQ and REP pair; the order of message and answer is enforced."""

    def __init__(self, deadline_s: float = 10.0) -> None:
        self._there: queue.Queue[bytes] = queue.Queue(1)
        self._back: queue.Queue[bytes] = queue.Queue(1)
        self._deadline_s, self._waits, self._stopped = deadline_s, False, False
        self.closed = False

    def say(self, message: bytes) -> None:
        assert not self._waits, "a REQ socket sends only after an answer"
        self._waits = True
        self._there.put_nowait(message)

    def answer(self) -> bytes:
        for _ in range(int(self._deadline_s * 20)):
            try:
                found = self._back.get(timeout=0.05)
            except queue.Empty:
                if self._stopped:
                    break
                continue
            self._waits = False
            return found
        raise WeightError("waited in vain")

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self.closed = True

    def recv(self) -> bytes:
        return self._there.get(timeout=10)

    def send(self, message: bytes) -> None:
        self._back.put_nowait(message)


def receive(port: Any, load: Load, device: int = 3) -> None:
    """`port` has recv and send, as a REP socket has."""
    function, arguments = pickle.loads(port.recv())
    given = list(arguments)
    given[6] = device
    buffer = function(*given)
    assert buffer.dtype == torch.uint8
    port.send(b"")
    released = False
    while True:
        payload = pickle.loads(port.recv())
        if released:
            assert payload is None
            port.send(b"")
            return
        if payload is None:
            released, buffer = True, None
            port.send(b"")
        elif isinstance(payload, Exception):
            raise payload
        else:
            try:
                load(tensors(payload, buffer))
            except ValueError as fault:
                port.send(str(fault).encode())
            else:
                port.send(b"")


def tensors(payload: list[dict[str, Any]], buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    found = []
    for item in payload:
        start, count = item["offset"], item["dtype"].itemsize * item["shape"].numel()
        assert start % 256 == 0
        found.append((item["name"], buffer[start : start + count].view(item["dtype"]).view(item["shape"])))
    return found
