"""Versions by checkpoint-engine's protocol: every message and byte, what a refusal and a silence do."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ipc_receiver import UUID, QueuePort, SharedMemory, receive
from tests.scripted_engine import Answer, ScriptedEngine
from tests.unit.rollout.parts import Log
from tests.weight_files import assets, model
from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore, RealClock
from turnout.placement.shared_memory import FOLDER
from turnout.transfer import checkpoint_engine
from turnout.transfer.checkpoint_engine import CheckpointEngineTransport, CudaWays
from turnout.transfer.ipc_messages import (
    ALIGNMENT,
    IpcSender,
    aligned,
    describe,
    half_bytes,
    socket_path,
)
from turnout.transfer.updater import Updater
from turnout.weights.buckets import buckets, dtype_of
from turnout.weights.digest import root_of
from turnout.weights.store import WeightStore
from turnout.weights.tensors import UNSIGNED, HostTensor

BASE = WeightVersion(0, 0, root_of(model(0)))
IPC = "/update_weights_from_ipc"


def as_host(name: str, tensor: torch.Tensor) -> HostTensor:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()
    bits = data.view(UNSIGNED[tensor.dtype.itemsize])
    return HostTensor(name, dtype_of(tensor.dtype), tuple(tensor.shape), bits)


def segments() -> list[str]:
    return [path.name for path in FOLDER.glob(f"turnout_{os.getpid()}_*")]


def test_tensors_lie_aligned_and_fit_a_half():
    bucket = model(1)
    described = describe(bucket, 4096)
    ends = [d["offset"] + tensor.nbytes for d, tensor in zip(described, bucket)]
    assert all(d["offset"] % ALIGNMENT == 0 for d in described) and described[0]["offset"] == 4096
    assert all(d["offset"] >= end for d, end in zip(described[1:], ends))
    largest = max(tensor.nbytes for tensor in bucket)
    for limit in (1, 60, 1 << 20):
        half = half_bytes(limit, largest)
        for part in buckets(bucket, limit):
            assert sum(aligned(tensor.nbytes) for tensor in part) <= half
    assert socket_path("GPU-7", 4) == "ipc://@checkpoint-engine-GPU-7-4.sock"


def talk(load: Any, limit: int) -> tuple[list[str], QueuePort]:
    """A whole update of model(1) to a receiver in another thread; what the receiver ended with."""
    port, ended = QueuePort(), []

    def run() -> None:
        try:
            receive(port, load)
            ended.append("")
        except RuntimeError as fault:
            ended.append(str(fault))

    thread = threading.Thread(target=run)
    thread.start()
    largest = max(tensor.nbytes for tensor in model(1))
    half = half_bytes(limit, largest)
    sender = IpcSender(port, SharedMemory(2 * half), half)
    try:
        sender.begin()
        for bucket in buckets(iter(model(1)), limit):
            sender.bucket(bucket)
        sender.finish()
    except WeightError as fault:
        sender.give_up(str(fault))
    finally:
        thread.join(10)
    assert port.closed or not ended[0]
    assert segments() == []
    return ended, port


@pytest.mark.parametrize("limit", [1, 60, 1 << 20])
def test_a_receiver_gets_every_bit_in_any_bucket_size(limit):
    got: list[HostTensor] = []
    ended, _ = talk(lambda found: got.extend(as_host(*each) for each in found), limit)
    assert ended == [""]
    assert root_of(got) == root_of(model(1)) and len(got) == len(model(1))


def test_a_bucket_is_not_overwritten_while_it_is_read():
    """The sender fills the other half meanwhile."""
    changed: list[bool] = []

    def load(found: list[tuple[str, torch.Tensor]]) -> None:
        views = [tensor.reshape(-1).view(torch.uint8) for _, tensor in found]
        before = [view.clone() for view in views]
        time.sleep(0.01)
        changed.append(not all(torch.equal(view, old) for view, old in zip(views, before)))

    ended, _ = talk(load, 1)
    assert ended == [""] and len(changed) > 3 and not any(changed)


def test_a_receiver_that_refuses_ends_the_update_and_is_told():
    def load(found: list[tuple[str, torch.Tensor]]) -> None:
        raise ValueError("no such parameter")

    ended, _ = talk(load, 1)
    assert len(ended) == 1 and "the receiver refused: no such parameter" in ended[0]


def test_a_receiver_that_is_silent_is_an_error():
    port = QueuePort(0.2)
    half = half_bytes(1 << 20, 0)
    sender = IpcSender(port, SharedMemory(2 * half), half)
    sender.begin()
    with pytest.raises(WeightError, match="waited in vain"):
        sender.bucket(model(1))
    sender.give_up("late")
    assert port.closed and segments() == [] and isinstance(pickle.loads(port.recv()), tuple)


class QueueWays(CudaWays):
    """Queues and shared memory."""

    def __init__(self) -> None:
        self.ports: dict[str, QueuePort] = {}

    def uuid(self) -> str:
        return UUID

    def memory(self, size: int) -> Any:
        return SharedMemory(size)

    def port(self, path: str, deadline_s: float) -> Any:
        return self.ports.setdefault(path, QueuePort(deadline_s))

    def receiver(self, path: str) -> tuple[Any, Callable[[], None]]:
        return self.ports[path], lambda: None


class ZmqWays(QueueWays):
    """Real sockets."""

    def port(self, path: str, deadline_s: float) -> Any:
        return checkpoint_engine.ZmqPort(path, deadline_s)

    def receiver(self, path: str) -> tuple[Any, Callable[[], None]]:
        import zmq

        context = zmq.Context()
        socket = context.socket(zmq.REP)
        socket.connect(path)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        return socket, lambda: (socket.close(0), context.term())[0]


class Engine(ScriptedEngine):
    """A stock SGLang's receiver; `refuses` is what its loader says, `mute` whether it never connects."""

    ways: QueueWays
    refuses = ""
    mute = False

    def _behave(self, path: str, body: dict[str, Any]) -> Any:
        return self._from_ipc(body) if path == IPC else super()._behave(path, body)

    async def _from_ipc(self, body: dict[str, Any]) -> Any:
        if self.mute:
            return Answer(
                400, {"success": False, "message": "ImportError checkpoint-engine is not installed"}
            )
        got: list[HostTensor] = []

        def load(found: list[tuple[str, torch.Tensor]]) -> None:
            if self.refuses:
                raise ValueError(self.refuses)
            got.extend(as_host(*each) for each in found)

        def run() -> None:
            port, close = self.ways.receiver(body["zmq_handles"][UUID])
            try:
                receive(port, load)
            finally:
                close()  # here: the handler may be cancelled while this thread still uses the socket

        try:
            await asyncio.to_thread(run)
        except RuntimeError as fault:
            return Answer(400, {"success": False, "message": str(fault)})
        self.root, self.label = root_of(got), body["weight_version"]
        assert body["flush_cache"] is True
        return {"success": True, "message": ""}


def on(folder: Path, ways: QueueWays, use: Callable[[Updater, list[Engine]], Any]) -> None:
    async def main() -> None:
        async with Engine("e0") as one, Engine("e1") as two:
            store = WeightStore(folder / "w", DiskStore(), assets(folder / "assets"), 200)
            store.open("run", 0, BASE.root)
            for engine in (one, two):
                engine.root, engine.ways = BASE.root, ways
            clock = RealClock()
            transport = CheckpointEngineTransport(store, clock, 40, ways)
            updater = Updater(transport, [engine.client(clock) for engine in (one, two)], Log(), clock)
            await updater.adopt(BASE, 20.0)
            await asyncio.wait_for(use(updater, [one, two]), 30)

    asyncio.run(main())
    assert segments() == []


async def update(updater: Updater, seed: int) -> WeightVersion:
    begun = updater.begin(lambda: model(seed), seed, 10.0)
    await begun.publish()
    await begun.prepare()
    return await begun.commit()


@pytest.fixture(params=["queues", "zeromq"])
def ways(request) -> QueueWays:
    if request.param == "queues":
        return QueueWays()
    pytest.importorskip("zmq", reason="pyzmq, of the extra checkpoint-engine, is not installed")
    return ZmqWays()


def test_versions_reach_every_engine(tmp_path, ways):
    async def use(updater: Updater, engines: list[Engine]) -> None:
        for seed in (1, 2):
            version = await update(updater, seed)
            assert version.root == root_of(model(seed))
            assert [(e.root, e.label) for e in engines] == [(version.root, version.label)] * 2

    on(tmp_path, ways, use)


@pytest.mark.parametrize(
    ("set_up", "said"),
    [
        ({"refuses": "no such parameter"}, "no such parameter"),
        ({"mute": True}, "checkpoint-engine is not installed"),
    ],
)
def test_a_failure_aborts_the_update_with_its_reason_and_the_next_one_works(tmp_path, ways, set_up, said):
    async def use(updater: Updater, engines: list[Engine]) -> None:
        for name, value in set_up.items():
            setattr(engines[1], name, value)
        with pytest.raises(WeightError, match=said):
            await update(updater, 1)
        assert updater.current == BASE
        engines[1].refuses, engines[1].mute = "", False
        version = await update(updater, 2)
        assert [(e.root, e.label) for e in engines] == [(version.root, version.label)] * 2

    on(tmp_path, ways, use)


def test_without_cuda_nothing_is_begun(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    store = WeightStore(tmp_path / "w", DiskStore(), assets(tmp_path / "assets"), 200)
    with pytest.raises(WeightError, match="sees no CUDA device; use --update-weight-transport disk"):
        CheckpointEngineTransport(store, RealClock(), 40)
