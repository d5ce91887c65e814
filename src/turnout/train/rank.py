"""One rank of the trainer: `python -m turnout.train.rank`, started by turnout.train.rank_launch only.

Takes calls from the controller, one at a time, in the order they come (turnout.train.rank_wire); every rank gets
the same ones. Promises: torch is loaded after the thread counts of the environment are set; the process ends with
the controller, however that ends; an error of a call is told, and the rank goes on to serve; it says where it is
also while it computes.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from turnout.core.types import TrainBatch
from turnout.placement.interface import interface_of
from turnout.placement.parent import die_with
from turnout.placement.processes import collector_off
from turnout.placement.stacks import where
from turnout.train.backend import Copying, Offloading, TrainBackend
from turnout.train.batch_bytes import samples_of
from turnout.train.data_transport import read_data
from turnout.train.rank_wire import BACK, Message, Wire, WireClosed, fault_row, hello, listening
from turnout.train.settings import TrainerSettings
from turnout.weights.tensors import HostTensor

log = logging.getLogger(__name__)
TOKEN_VARIABLE = "TURNOUT_RANK_TOKEN"  # noqa: S105 - the variable's name, not a secret
BACKLOG = 64
INTERFACE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # by which the ranks reach one another


class Rank:
    """The trainer's part of this process, and its calls by name."""

    def __init__(self, rank: int, host: str, back: socket.socket | None = None) -> None:
        """`host`: the address of this machine for the other ranks; `back` takes what has no file to go into."""
        self._rank, self._host, self._back = rank, host, back
        self._owed: memoryview | None = None
        self._meeting: socket.socket | None = None
        self._backend: TrainBackend | None = None
        self._export: Iterator[HostTensor] = iter(())
        self._calls: dict[str, Callable[[Message], Message]] = {
            "meet": self._meet,
            "start": self._start,
            "train": self._train,
            "logprobs": self._logprobs,
            "export": self._begin_export,
            "tensor": self._tensor,
            "save": lambda call: self._done(self.backend.save(Path(call["folder"]))),
            "load": lambda call: self._done(self.backend.load(Path(call["folder"]))),
            "copy": self._copy,
            "offload": lambda _: asdict(self._offloading.offload()),
            "onload": lambda _: self._done(self._offloading.onload()),
            "written": self._written,
        }
        self._copied: Callable[[Path], None] | None = None
        self._writing: Future[None] | None = None

    def answer(self, call: Message) -> Message:
        """The result of a call. One between the tensors of an export ends the export."""
        if call["call"] not in ("tensor", "written"):
            self._export = iter(())
        return self._calls[call["call"]](call)

    def fault(self, error: Exception) -> Message:
        """An error of a call, and how many steps are done in spite of it."""
        done = None if self._backend is None else self._backend.steps_done
        return {"fault": fault_row(error), "steps_done": done}

    @property
    def backend(self) -> TrainBackend:
        if self._backend is None:
            raise RuntimeError("the backend was not started")
        return self._backend

    @property
    def _offloading(self) -> Offloading:
        if not isinstance(self.backend, Offloading):
            raise TypeError(f"{type(self.backend).__name__} can't give its memory back")
        return self.backend

    def _meet(self, call: Message) -> Message:  # noqa: ARG002
        """At rank 0: opens the place where the ranks meet, at a port that was free."""
        self._meeting = listening(self._host, BACKLOG)
        return {"host": self._host, "port": self._meeting.getsockname()[1]}

    def _start(self, call: Message) -> Message:
        """Joins the group of ranks and loads the model."""
        settings = TypeAdapter(TrainerSettings).validate_python(call["settings"])
        with collector_off():
            self._join(settings.ranks, call["host"], call["port"], timedelta(seconds=call["deadline_s"]))
            self._backend = sharded_backend(settings)
        return self._done(None)

    def _join(self, size: int, host: str, port: int, limit: timedelta) -> None:
        import torch  # noqa: PLC0415 - its import takes seconds, and the controller waits for the connection
        from torch import distributed  # noqa: PLC0415

        own = None if self._meeting is None else self._meeting.detach()
        store = distributed.TCPStore(
            host, port, size, self._rank == 0, limit, wait_for_workers=False, master_listen_fd=own
        )
        interface = interface_of(self._host)
        if interface is None:
            log.warning("no network interface is known to have %s: Gloo and NCCL choose one", self._host)
        else:
            os.environ.update({name: interface for name in INTERFACE if name not in os.environ})
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, store=store, rank=self._rank, world_size=size, timeout=limit)

    def _copy(self, call: Message) -> Message:  # noqa: ARG002
        if not isinstance(self.backend, Copying):
            raise TypeError(f"{type(self.backend).__name__} makes no copies")
        self._copied = self.backend.copied()
        return {}

    def write(self, folder: Path) -> None:
        """Begins to write the copy on another thread, beside what is computed."""
        copied, self._copied = self._copied, None
        future = self._writing = Future[None]()

        def work() -> None:
            try:
                if copied is None:
                    raise RuntimeError("there is no copy to write")
                future.set_result(copied(folder))
            except Exception as error:  # noqa: BLE001 - told to who asks whether it is written
                future.set_exception(error)

        threading.Thread(target=work, daemon=True, name="checkpoint").start()

    def _written(self, call: Message) -> Message:  # noqa: ARG002
        """Whether the copy is written, or what went wrong: no fault of this call, the trainer goes on."""
        if self._writing is None or not self._writing.done():
            return {"done": False, "fault": None}
        error = self._writing.exception()
        return {"done": True, "fault": None if error is None else fault_row(error)}

    def _train(self, call: Message) -> Message:
        samples = samples_of(read_data(call["data"]))
        report = self.backend.train(TrainBatch(call["step"], call["version"], samples))
        return {"report": asdict(report), **self._done(None)}

    def _logprobs(self, call: Message) -> Message:
        found = self.backend.logprobs(samples_of(read_data(call["data"])))
        if self._rank == 0:
            flat = np.concatenate(found) if found else np.empty(0, np.float32)
            self._give(flat.astype(np.float32), call["path"])
        return {}

    def _begin_export(self, call: Message) -> Message:  # noqa: ARG002
        self._export = self.backend.export()
        return {}

    def _tensor(self, call: Message) -> Message:
        """The next tensor of the export; no name where there is none left."""
        tensor = next(self._export, None)
        if tensor is None or self._rank:
            return {"name": None}
        self._give(tensor.bits, call["path"])
        return {"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape}

    def _give(self, values: NDArray[Any], path: str | None) -> None:
        """Into the file `path`, or, without one, to go back when the call is answered."""
        rest = values.view(np.uint8).data
        if path is None:
            self._owed = rest
            return
        with Path(path).open("r+b", buffering=0) as out:
            while rest:
                rest = rest[out.write(rest) or 0 :]

    def pay(self) -> None:
        """Sends what the answer has told of. Raises OSError where the controller is gone."""
        owed, self._owed = self._owed, None
        if owed is not None and self._back is not None:
            self._back.sendall(owed)

    def _done(self, nothing: None) -> Message:  # noqa: ARG002
        return {"steps_done": self.backend.steps_done}


def sharded_backend(settings: TrainerSettings) -> TrainBackend:
    """This rank's part of the trainer, in the group that it has joined."""
    from turnout.train.sharded import ShardedBackend  # noqa: PLC0415 - imports torch

    return ShardedBackend(settings)


def serve(rank: Rank, wire: Wire) -> NoReturn:
    """Answers calls on this thread; another one takes them in, says where this one is, and ends the process when
    the controller is gone."""
    calls: SimpleQueue[Message] = SimpleQueue()
    main = threading.get_ident()

    def take_in() -> None:
        try:
            while True:
                call = wire.receive()
                if call["call"] == "where":
                    wire.send({"where": where(main)})
                elif call["call"] == "write":
                    rank.write(Path(call["folder"]))
                else:
                    calls.put(call)
        except WireClosed:
            os._exit(0)

    threading.Thread(target=take_in, daemon=True, name="calls").start()
    while True:
        call = calls.get()
        try:
            answer: Message = {"result": rank.answer(call)}
        except Exception as error:
            log.warning("%s failed", call["call"], exc_info=error)
            answer = rank.fault(error)
        try:
            wire.send({"id": call["id"], **answer})
            rank.pay()
        except (WireClosed, OSError):
            os._exit(0)


def main(argv: list[str] | None = None) -> NoReturn:
    build = argparse.ArgumentParser(prog="turnout-trainer-rank")
    build.add_argument("--rank", type=int, required=True)
    build.add_argument("--controller", required=True, help="address and port")
    build.add_argument("--host", required=True, help="address of this machine for the other ranks")
    build.add_argument(
        "--give-back", action="store_true", help="tensors go to the controller by a connection"
    )
    build.add_argument("--folder", type=Path, required=True, help="of the logs; names the run to who looks")
    build.add_argument("--parent-pid", type=int, help="end when this process is no longer the parent")
    asked = build.parse_args(argv)
    if asked.parent_pid is not None:
        die_with(asked.parent_pid)
    form = f"%(asctime)s %(levelname)s rank {asked.rank}: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    host, _, port = asked.controller.rpartition(":")
    token = os.environ.pop(TOKEN_VARIABLE)

    def connected(number: int) -> socket.socket:
        connection = socket.create_connection((host, int(port)))
        connection.sendall(hello(number, token))
        return connection

    wire = Wire(connected(asked.rank))
    serve(Rank(asked.rank, asked.host, connected(BACK) if asked.give_back else None), wire)


if __name__ == "__main__":
    main(sys.argv[1:])
