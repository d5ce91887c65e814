"""The processes of the trainer's ranks: started, met, watched and ended together.

Each is a child in a process group of its own with its own log; it connects back to the controller, on loopback, and
shows a secret that only the children's environment has. Promises: all of them have connected when `start_ranks`
returns, or none is left and the error names the one that did not; a rank ends with the controller, however that
ends (turnout.placement.parent); none is left after `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turnout.core.errors import ConfigError, DeadlineExceeded, Fault, TrainerLost, TurnoutError
from turnout.core.ports import Clock
from turnout.placement.devices import VISIBLE, visible_gpus
from turnout.placement.processes import (
    ODD_STATES,
    ChildProcess,
    child_environment,
    last_words,
    process_state,
    signal_group,
)
from turnout.placement.shared_memory import new_file, sweep
from turnout.placement.tasks import first
from turnout.train.data_transport import DataTransport, LocalData
from turnout.train.rank import TOKEN_VARIABLE
from turnout.train.rank_wire import HELLO_BYTES, Wire, rank_of

log = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
STOP_GRACE_S = 2.0
HELLO_S = 5.0
LAST_WORDS_S = 3.0  # from the loss of a connection until the process is known to have ended


@dataclass(frozen=True)
class RankPlan:
    """How the ranks are started: `count` of them with `threads` each, logs in `folder`, all connected within
    `deadline_s`, which is also that of every call. `data` takes batches to them."""

    count: int
    threads: int
    folder: Path
    deadline_s: float
    data: DataTransport = field(default_factory=LocalData)


class Ranks:
    """Ranks that run. Made by `start_ranks`; call `stop` in every case."""

    def __init__(self, plan: RankPlan, processes: Sequence[ChildProcess], wires: Sequence[Wire]) -> None:
        self.plan, self.processes, self.wires = plan, processes, wires
        self.places: dict[int, str] = {}  # where ranks are that have not answered for a while
        self.busy = False  # a call is under way
        self.killed = False
        self.cause: TurnoutError | OSError | None = None  # what a call failed with, so that they were killed
        self.file = new_file()  # tensors and log-probs come back in it, one at a time
        self._loop = asyncio.get_running_loop()

    async def ended(self) -> str:
        """Waits for the end of any rank, and says how it ended."""
        return await first(*(process.ended() for process in self.processes))

    def ending(self, rank: int) -> str:
        """How a rank ended that has closed its connection. For another thread than the event loop's."""
        words = asyncio.run_coroutine_threadsafe(self.processes[rank].ended(), self._loop)
        try:
            return words.result(LAST_WORDS_S)
        except TimeoutError:
            words.cancel()
            process = self.processes[rank]
            return f"process {process.pid} of {process.name} closed its connection{last_words(process.log)}"

    def kill(self, cause: TurnoutError | OSError | None = None) -> None:
        """Ends all at once, from any thread; they are reaped by `stop`."""
        self.killed, self.cause = True, cause
        for process in self.processes:
            if process.alive:
                signal_group(process.pid, signal.SIGKILL)

    def standing(self, rank: int) -> str:
        """What there is to say of a rank that does not answer."""
        process, place = self.processes[rank], self.places.get(rank)
        odd = ODD_STATES.get(process_state(process.pid))
        at = f"is in {place}" if place else "does not say where it is"
        return f"{process.name}: process {process.pid} {odd or at}"

    async def stop(self) -> None:
        self.kill()  # they keep nothing that would need an end in good order
        await asyncio.gather(*(process.stop(STOP_GRACE_S) for process in self.processes))
        for wire in self.wires:
            wire.close()
        self.file.unlink(missing_ok=True)


async def start_ranks(plan: RankPlan, clock: Clock) -> Ranks:
    """Raises TrainerLost, with nothing left running, where a rank ends or does not connect in time; ConfigError
    where there are GPUs, but fewer than ranks."""
    sweep()
    token, devices = secrets.token_hex(32), _devices(plan.count)
    processes: list[ChildProcess] = []
    with socket.create_server((LOOPBACK, 0), backlog=plan.count) as listener:
        listener.setblocking(False)
        try:
            for rank, device in enumerate(devices):
                name = f"trainer rank {rank} ({device})"
                extra = {TOKEN_VARIABLE: token, **_visible(device)}
                command = _command(plan, rank, listener.getsockname()[1])
                output = plan.folder / f"rank-{rank}.log"
                environment = child_environment(plan.threads, extra)
                processes.append(await ChildProcess.start(name, command, environment, output, clock))
            met = clock.within(plan.deadline_s, "the trainer's ranks", _met(listener, token, plan, clock))
            return Ranks(plan, processes, await first(met, *(_lost(process) for process in processes)))
        except BaseException as fault:
            await asyncio.gather(*(process.stop(STOP_GRACE_S) for process in processes))
            if isinstance(fault, DeadlineExceeded):
                raise TrainerLost(f"{fault}; see the logs in {plan.folder}") from fault
            raise


def _command(plan: RankPlan, rank: int, port: int) -> list[str]:
    words = ["--rank", rank, "--controller", f"{LOOPBACK}:{port}", "--folder", plan.folder]
    return [sys.executable, "-m", "turnout.train.rank", *map(str, words), "--parent-pid", str(os.getpid())]


def _devices(count: int) -> list[str]:
    gpus = visible_gpus() or 0
    if 0 < gpus < count:
        reason = f"{count} ranks need a GPU each, {gpus} can be seen here"
        remedy = f"give {gpus}, or none are to be seen: {VISIBLE}= trains on CPUs"
        raise ConfigError(Fault("--actor-num-gpus-per-node", str(count), reason, remedy))
    kind = "cuda" if gpus else "cpu"
    log.info("trainer: %d ranks on %s, %d GPUs are visible", count, "CPUs" if kind == "cpu" else "GPUs", gpus)
    return [f"{kind}:{rank}" for rank in range(count)]


def _visible(device: str) -> dict[str, str]:
    """A rank sees its own device only, as the first one."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return {VISIBLE: ""}
    named = os.environ.get(VISIBLE)
    return {VISIBLE: index if named is None else named.split(",")[int(index)].strip()}


async def _lost(process: ChildProcess) -> list[Wire]:
    raise TrainerLost(f"the trainer can't start: {await process.ended()}")


async def _met(listener: socket.socket, token: str, plan: RankPlan, clock: Clock) -> list[Wire]:
    """The wires of all ranks, in order; whoever else connects is sent away."""
    loop, found = asyncio.get_running_loop(), dict[int, Wire]()
    while len(found) < plan.count:
        connection, _ = await loop.sock_accept(listener)
        connection.setblocking(False)
        said = bytearray()
        with contextlib.suppress(DeadlineExceeded, OSError):
            await clock.within(HELLO_S, "a rank to say who it is", _hears(loop, connection, said))
        rank = rank_of(bytes(said), token)
        if rank is None:
            connection.close()
        else:
            found[rank] = Wire(connection, asked=True)
    return [found[rank] for rank in range(plan.count)]


async def _hears(loop: asyncio.AbstractEventLoop, connection: socket.socket, said: bytearray) -> None:
    while len(said) < HELLO_BYTES and (piece := await loop.sock_recv(connection, HELLO_BYTES - len(said))):
        said += piece
