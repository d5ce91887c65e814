"""The processes of the trainer's ranks: started, met, watched and ended together.

Each is a process of the cluster (turnout.train.rank_start), on this machine or on a node of it; it connects back to
the controller and shows a secret that only the ranks' environment has. Promises: all of them have connected when
`start_ranks` returns, or none is left and the error names those that did not; a rank ends with the controller,
however that ends; none is left after `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from turnout.core.errors import ConfigError, DeadlineExceeded, EngineError, Fault, TrainerLost, TurnoutError
from turnout.core.ports import Clock
from turnout.placement.cluster import Cluster, Place, Process, ThisMachine
from turnout.placement.devices import VISIBLE, visible_gpus
from turnout.placement.processes import ODD_STATES, last_words
from turnout.placement.ray_bundles import rank_name
from turnout.placement.shared_memory import new_file, sweep
from turnout.placement.tasks import first, together
from turnout.protocol.folder_probe import probe_file
from turnout.train.data_transport import DataTransport, LocalData
from turnout.train.rank_start import RankStart, Shared, answer_file, appears, log_of, not_shared, start_rank
from turnout.train.rank_wire import BACK, HELLO_BYTES, Back, Wire, listening, rank_of

log = logging.getLogger(__name__)
STOP_GRACE_S = 2.0
HELLO_S = 5.0
LAST_WORDS_S = 3.0  # from the loss of a connection until the process is known to have ended


@dataclass(frozen=True)
class RankPlan:
    """How the ranks are started: `count` of them with `threads` each, logs in `folder`, all connected within
    `deadline_s`, which is also that of every call. `data` takes batches to them. `shared`: they are elsewhere, and
    these folders, that of the logs among them, must be the same there; empty: they are children of this process."""

    count: int
    threads: int
    folder: Path
    deadline_s: float
    data: DataTransport = field(default_factory=LocalData)
    shared: Shared = ()


@dataclass
class Started:
    """A rank that was started: `name` for people."""

    process: Process
    name: str


class Ranks:
    """Ranks that run. Made by `start_ranks`; call `stop` in every case. `back`: the way of tensors and log-probs of
    ranks that are elsewhere; None: they come in a file of this machine's shared memory, one at a time."""

    def __init__(
        self, plan: RankPlan, started: Sequence[Started], wires: Sequence[Wire], back: Back | None = None
    ) -> None:
        self.plan, self.wires, self.back = plan, wires, back
        self.processes, self.names = [one.process for one in started], [one.name for one in started]
        self.places: dict[int, str] = {}  # where ranks are that have not answered for a while
        self.busy = False  # a call is under way
        self.killed = False
        self.cause: TurnoutError | OSError | None = None  # what a call failed with, so that they were killed
        self.file = new_file() if back is None else None
        self._loop = asyncio.get_running_loop()
        self._cuts = [asyncio.ensure_future(self._cut(rank)) for rank in range(plan.count) if plan.shared]

    async def ended(self) -> str:
        """Waits for the end of any rank, and says how it ended."""
        return await first(*(process.ended() for process in self.processes))

    async def _cut(self, rank: int) -> None:
        """The loss of a node closes no connection to it: who waits there is woken."""
        await self.processes[rank].ended()
        self.wires[rank].cut()
        if rank == 0 and self.back is not None:
            self.back.cut()

    def ending(self, rank: int) -> str:
        """How a rank ended that has closed its connection. For another thread than the event loop's."""
        words = asyncio.run_coroutine_threadsafe(self.processes[rank].ended(), self._loop)
        try:
            return words.result(LAST_WORDS_S)
        except TimeoutError:
            words.cancel()
            process = f"process {self.processes[rank].pid} of {self.names[rank]}"
            return f"{process} closed its connection{self.words(rank)}"

    def words(self, rank: int) -> str:
        """The end of its log, for an error."""
        return last_words(log_of(self.plan.folder, rank))

    def kill(self, cause: TurnoutError | OSError | None = None) -> None:
        """Ends all at once, from any thread; they are reaped by `stop`."""
        self.killed, self.cause = True, cause
        for process in self.processes:
            process.kill()

    def standing(self, rank: int) -> str:
        """What there is to say of a rank that does not answer."""
        process, place = self.processes[rank], self.places.get(rank)
        odd = ODD_STATES.get(process.state)
        at = f"is in {place}" if place else "does not say where it is"
        return f"{self.names[rank]}: process {process.pid} {odd or at}"

    async def stop(self) -> None:
        self.kill()  # they keep nothing that would need an end in good order
        for cut in self._cuts:
            cut.cancel()
        await asyncio.gather(*(process.stop(STOP_GRACE_S) for process in self.processes))
        for wire in self.wires:
            wire.close()
        if self.back is not None:
            self.back.close()
        if self.file is not None:
            self.file.unlink(missing_ok=True)


async def start_ranks(plan: RankPlan, clock: Clock, cluster: Cluster | None = None) -> Ranks:
    """On the places that the cluster has for them. Raises TrainerLost, with nothing left running, where a rank ends
    or does not connect in time; ConfigError where there are GPUs, but fewer than ranks, and where a folder is not
    shared with all nodes."""
    sweep()
    cluster = ThisMachine(clock) if cluster is None else cluster
    token, started = secrets.token_hex(32), dict[int, Started]()
    missing = {*range(plan.count), *((BACK,) if plan.shared else ())}
    with listening(cluster.here, len(missing)) as listener:
        listener.setblocking(False)
        try:
            await _start_all(_starts(plan, token, listener), plan.deadline_s, started, (cluster, clock))
            met = clock.within(plan.deadline_s, "the trainer's ranks", _met(listener, token, missing, clock))
            found = await first(met, *(_lost(one.process) for one in started.values()))
            wires = [Wire(found[rank], asked=True) for rank in range(plan.count)]
            back = Back(found[BACK]) if BACK in found else None
            return Ranks(plan, [started[rank] for rank in range(plan.count)], wires, back)
        except BaseException as fault:
            await asyncio.gather(*(one.process.stop(STOP_GRACE_S) for one in started.values()))
            if isinstance(fault, DeadlineExceeded):
                names = ", ".join(started[rank].name for rank in sorted(missing & started.keys()))
                raise TrainerLost(f"{fault}: {names}; see the logs in {plan.folder}") from fault
            raise


def _starts(plan: RankPlan, token: str, listener: socket.socket) -> list[RankStart]:
    address, port = listener.getsockname()[:2]
    common = ((address, port), token, plan.threads, plan.folder)
    devices, probe = ([""] * plan.count, secrets.token_hex(16)) if plan.shared else (_devices(plan.count), "")
    return [RankStart(rank, *common, device, plan.shared, probe) for rank, device in enumerate(devices)]


async def _start_all(
    starts: Sequence[RankStart], deadline_s: float, started: dict[int, Started], by: tuple[Cluster, Clock]
) -> None:
    """All at once; `started` has those that were, also where another could not be."""
    cluster, clock = by
    asked = [probe_file(folder, starts[0].probe) for _, folder in starts[0].shared]

    async def begin(start: RankStart) -> None:
        place = Place(rank_name(start.rank))
        try:
            process, told = await cluster.start(place, partial(start_rank, start), deadline_s)
        except EngineError as fault:
            raise TrainerLost(f"the trainer can't start: {place.name}: {fault.reason}") from fault
        started[start.rank] = Started(process, told["name"])
        faults = [
            not_shared(option, folder, told["host"], "a file that was written there does not show here")
            for option, folder in start.shared
            if not await appears(answer_file(folder, start.probe, start.rank), clock)
        ]
        if faults:
            raise ConfigError(faults)

    try:
        for path in asked:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        await together(begin(start) for start in starts)
    finally:
        for start in starts:
            for _, folder in start.shared:
                answer_file(folder, start.probe, start.rank).unlink(missing_ok=True)
        for path in asked:
            path.unlink(missing_ok=True)


def _devices(count: int) -> list[str]:
    gpus = visible_gpus() or 0
    if 0 < gpus < count:
        reason = f"{count} ranks need a GPU each, {gpus} can be seen here"
        remedy = f"give {gpus}, or none are to be seen: {VISIBLE}= trains on CPUs"
        raise ConfigError(Fault("--actor-num-gpus-per-node", str(count), reason, remedy))
    kind = "cuda" if gpus else "cpu"
    log.info("trainer: %d ranks on %s, %d GPUs are visible", count, "CPUs" if kind == "cpu" else "GPUs", gpus)
    return [f"{kind}:{rank}" for rank in range(count)]


async def _lost(process: Process) -> dict[int, socket.socket]:
    raise TrainerLost(f"the trainer can't start: {await process.ended()}")


async def _met(
    listener: socket.socket, token: str, missing: set[int], clock: Clock
) -> dict[int, socket.socket]:
    """The connections of all that are missing, by number; whoever else connects is sent away."""
    loop, found = asyncio.get_running_loop(), dict[int, socket.socket]()
    while missing:
        connection, _ = await loop.sock_accept(listener)
        connection.setblocking(False)
        said = bytearray()
        with contextlib.suppress(DeadlineExceeded, OSError):
            await clock.within(HELLO_S, "a rank to say who it is", _hears(loop, connection, said))
        rank = rank_of(bytes(said), token)
        if rank is None:
            connection.close()
        else:
            missing.discard(rank)
            found[rank] = connection
    return found


async def _hears(loop: asyncio.AbstractEventLoop, connection: socket.socket, said: bytearray) -> None:
    while len(said) < HELLO_BYTES and (piece := await loop.sock_recv(connection, HELLO_BYTES - len(said))):
        said += piece
