"""The sender's side of checkpoint-engine's protocol: what is said to one receiver, in which order.

Protocol: MoonshotAI's checkpoint-engine 0.4.2, `worker.update_weights_from_ipc` (SGLang 0.5.23 runs it behind
`/update_weights_from_ipc`). The sender binds a REQ socket, the receiver connects a REP socket and learns the path
by its device's uuid. Messages are pickles: a handle (callable, arguments) that rebuilds a byte tensor; then for
each bucket a list of {name, dtype, shape, offset into that tensor}; then None (the receiver lets the memory go),
then None again (post-load work runs). Each is answered with b"", or with a text that says what went wrong; an
exception sent in place of a message ends the receiver.

Promises: the memory holds two buckets, and a bucket's half is written only after the bucket before it in that half
was answered; a refusal or a missing answer is a WeightError, after which the receiver was told to end if it can be.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.weights.buckets import TENSORS_MAX, TORCH_NAMES
from turnout.weights.tensors import HostTensor

ALIGNMENT = 256  # of a tensor's start, as the package's own sender lays them
ANSWER_MAX = 2000


class Described(TypedDict):
    """One tensor in the shared memory."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int


class Port(Protocol):
    """One REQ socket: a message, then its answer. Both raise WeightError where that takes too long."""

    def say(self, message: bytes) -> None: ...

    def answer(self) -> bytes: ...

    def close(self) -> None: ...


class Memory(Protocol):
    """Bytes that the receiver can open by `handle`."""

    @property
    def handle(self) -> tuple[Any, tuple[Any, ...]]: ...

    def write(self, offset: int, bits: NDArray[np.uint8]) -> None: ...

    def settle(self) -> None:
        """Returns when all that was written can be read by others."""
        ...

    def close(self) -> None: ...


def socket_path(device: str, number: int) -> str:
    """Where the update `number` of this sender meets the receiver on a device, as the package names it."""
    return f"ipc://@checkpoint-engine-{device}-{number}.sock"


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def half_bytes(bucket_bytes: int, largest: int) -> int:
    """Room for any bucket of at most `bucket_bytes` (the largest tensor may have one of its own), each of its
    tensors aligned."""
    return aligned(max(bucket_bytes, largest)) + TENSORS_MAX * ALIGNMENT


def describe(bucket: Sequence[HostTensor], start: int) -> list[Described]:
    """A bucket laid one tensor after another from `start` on."""
    found, at = [], start
    for tensor in bucket:
        dtype = getattr(torch, TORCH_NAMES[tensor.dtype])
        found.append(Described(name=tensor.name, dtype=dtype, shape=torch.Size(tensor.shape), offset=at))
        at += aligned(tensor.nbytes)
    return found


class IpcSender:
    """One receiver through one update: `begin`, `bucket` for each, then `finish`; `give_up` after a failure.
    Blocks: called from worker threads, one at a time."""

    def __init__(self, port: Port, memory: Memory, half: int) -> None:
        self._port, self._memory, self._half = port, memory, half
        self._number = 0
        self._waits = False  # for an answer

    def begin(self) -> None:
        self._say(self._memory.handle)

    def bucket(self, bucket: Sequence[HostTensor]) -> None:
        """Fills one half of the memory while the receiver may still read the other, then announces it."""
        described = describe(bucket, self._number % 2 * self._half)
        for entry, tensor in zip(described, bucket):
            self._memory.write(entry["offset"], tensor.bits.view(np.uint8))
        self._memory.settle()
        self._number += 1
        self._answered()
        self._say(described)

    def finish(self) -> None:
        """Returns when the receiver has done its post-load work."""
        self._answered()
        self._say(None)
        self._answered()
        self._memory.close()
        self._say(None)
        self._answered()

    def give_up(self, why: str) -> None:
        """Ends the receiver where it still answers; closes everything either way."""
        with contextlib.suppress(WeightError):
            if self._waits:
                self._port.answer()
            self._say(RuntimeError(why))
        self.close()

    def close(self) -> None:
        self._port.close()
        self._memory.close()

    def _say(self, message: object) -> None:
        self._port.say(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        self._waits = True

    def _answered(self) -> None:
        answer = self._port.answer()
        self._waits = False
        if answer:
            raise WeightError(f"the receiver refused: {answer.decode(errors='replace')[-ANSWER_MAX:]}")
