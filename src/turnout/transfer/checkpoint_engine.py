"""Full versions to SGLang engines through checkpoint-engine's protocol: CUDA memory of this host, ZeroMQ messages.

Each engine gets one `/update_weights_from_ipc` call for a whole update, with the socket of its device; the buckets
follow on that socket (turnout.transfer.ipc_messages). Promises: a version is activated by that call alone, so
engines serve the old one until `activate`; without pyzmq or without a CUDA device nothing is begun and the error
says which is lacking; sockets and memory are gone after each update, however it ends.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing import reductions

from turnout.core.errors import WeightError
from turnout.core.ports import Clock
from turnout.placement.tasks import together
from turnout.serving.weights_client import EngineWeights
from turnout.transfer.ipc_messages import IpcSender, Memory, half_bytes, socket_path
from turnout.transfer.stream import StreamTransport, on_thread
from turnout.transfer.updater import Export, Ready
from turnout.weights.store import WeightStore
from turnout.weights.tensors import HostTensor

POLL_MS = 100


class ZmqPort:
    """A bound REQ socket, for one thread at a time; `stop` is for any other."""

    def __init__(self, path: str, deadline_s: float) -> None:
        zmq: Any = importlib.import_module("zmq")
        self._zmq, self._path, self._polls = zmq, path, max(1, int(deadline_s * 1000 / POLL_MS))
        self._closing = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(path)
        except zmq.ZMQError as fault:
            self.close()
            raise WeightError(f"{path} cannot be bound: {fault}") from fault

    def say(self, message: bytes) -> None:
        self._ready(self._zmq.POLLOUT, "to connect")
        self._socket.send(message)

    def answer(self) -> bytes:
        self._ready(self._zmq.POLLIN, "to answer")
        return bytes(self._socket.recv())

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()

    def stop(self) -> None:
        """Has a wait in its thread end within POLL_MS."""
        self._closing = True

    def _ready(self, event: int, what: str) -> None:
        for _ in range(self._polls):
            if self._socket.poll(POLL_MS, event):
                return
            if self._closing:
                break
        raise WeightError(f"waited in vain for a receiver {what} at {self._path}")


class CudaMemory:
    """Bytes on one device, told to others by a CUDA IPC handle."""

    def __init__(self, device: int, size: int) -> None:
        self._device = device
        self._data: torch.Tensor | None = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")

    @property
    def handle(self) -> tuple[Any, tuple[Any, ...]]:
        assert self._data is not None
        return reductions.reduce_tensor(self._data)

    def write(self, offset: int, bits: NDArray[np.uint8]) -> None:
        assert self._data is not None
        with torch.no_grad():
            self._data[offset : offset + bits.size].copy_(torch.from_numpy(np.ascontiguousarray(bits)))

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        if self._data is not None:
            self._data = None
            torch.cuda.ipc_collect()


class CudaWays:
    """Where engines are and how bytes and messages get there: the first CUDA device, which all engines share, as
    they are started without a placement."""

    device = 0

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise WeightError(
                "checkpoint-engine hands CUDA memory over, and this process sees no CUDA device; "
                "use --update-weight-transport disk, tensor or group"
            )

    def uuid(self) -> str:
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def memory(self, size: int) -> Memory:
        return CudaMemory(self.device, size)

    def port(self, path: str, deadline_s: float) -> ZmqPort:
        return ZmqPort(path, deadline_s)


class _Session:
    """One engine through one update. Its socket is used by a thread of its own only."""

    def __init__(self, port: ZmqPort, memory: Memory, half: int) -> None:
        self._port, self._sender = port, IpcSender(port, memory, half)
        self._thread = ThreadPoolExecutor(1, "turnout-ipc")

    async def do(self, work: Callable[[IpcSender], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work, self._sender)

    async def close(self, fault: BaseException | None) -> None:
        """After whatever is under way has ended; a receiver that waits for a message is told the fault."""
        self._port.stop()
        await self.do(lambda sender: sender.close() if fault is None else sender.give_up(repr(fault)))
        self._thread.shutdown()


class CheckpointEngineTransport(StreamTransport):
    """See the module. `ways` None: the CUDA device of this process."""

    def __init__(
        self, store: WeightStore, clock: Clock, bucket_bytes: int, ways: CudaWays | None = None
    ) -> None:
        super().__init__(store, clock, bucket_bytes)
        self._ways = ways if ways is not None else CudaWays()
        self._sockets = self._largest = 0

    async def end(self, engine: EngineWeights, ready: Ready, deadline_s: float) -> None:
        """The update's one call has put it into place."""

    def _fix(self, export: Export) -> Ready:
        def noted() -> Iterator[HostTensor]:
            for tensor in export():
                self._largest = max(self._largest, tensor.nbytes)
                yield tensor

        return super()._fix(noted)

    async def _send(self, ready: Ready, export: Export, deadline_s: float) -> None:
        uuid, half = self._ways.uuid(), half_bytes(self._bucket_bytes, self._largest)
        calls: list[Coroutine[Any, Any, None]] = []
        sessions: list[_Session] = []
        fault: BaseException | None = None
        try:
            for engine in self._receivers:
                self._sockets += 1
                path = socket_path(uuid, self._sockets)
                port = self._ways.port(path, deadline_s)
                sessions.append(_Session(port, self._ways.memory(2 * half), half))
                calls.append(engine.from_ipc({uuid: path}, ready.version.label, self.on_update, deadline_s))
            await together([*calls, self._stream(export, sessions)])
        except BaseException as found:
            fault = found
            raise
        finally:
            for call in calls:
                call.close()  # those that were never begun
            await asyncio.gather(*(session.close(fault) for session in sessions))

    async def _stream(self, export: Export, sessions: Sequence[_Session]) -> None:
        await together(session.do(IpcSender.begin) for session in sessions)
        async for bucket, _ in on_thread(self.cut(export)):
            await together(session.do(partial(_say, bucket)) for session in sessions)
        await together(session.do(IpcSender.finish) for session in sessions)


def _say(bucket: Sequence[HostTensor], sender: IpcSender) -> None:
    sender.bucket(bucket)
