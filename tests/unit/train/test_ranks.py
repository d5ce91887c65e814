"""What the controller makes of its ranks' answers, silences and ends, and who is taken for a rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from turnout.core.errors import ConfigError, Fault, InvariantBroken, ModelError, TrainerLost, TrainError
from turnout.core.types import TrainBatch
from turnout.placement.devices import VISIBLE
from turnout.placement.processes import ChildProcess
from turnout.placement.real import RealClock
from turnout.placement.tasks import first
from turnout.schedule import parts
from turnout.schedule.parts import TrainerThread
from turnout.train import rank_launch, rank_start, ranks
from turnout.train.backend import GivenBack, Offloading
from turnout.train.rank import Rank
from turnout.train.rank_launch import RankPlan, Ranks, start_ranks
from turnout.train.rank_wire import BACK, Back, Message, Wire, WireClosed, fault_row, hello
from turnout.train.ranks import RankedBackend
from turnout.train.settings import TrainerSettings

Script = Callable[[int, Message], Message | None]  # rank and call -> what it answers; None: nothing
END = {"end": True}


class Scripted:
    """Two ranks that answer as a script says, in the form that RankedBackend takes."""

    def __init__(self, script: Script, folder: Path) -> None:
        self.plan = RankPlan(2, 1, folder, 20.0)
        self.busy, self.killed, self.places = False, False, dict[int, str]()
        self.file: Path | None = folder / "file"
        self.processes = [
            SimpleNamespace(pid=os.getpid(), state="", alive=False, kill=lambda: None) for _ in (0, 1)
        ]
        self.names = [f"trainer rank {n} (cpu:{n})" for n in (0, 1)]
        self.back: Back | None = None
        with socket.create_server(("127.0.0.1", 0)) as server:
            pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(2)]
        self.wires = [Wire(ours, asked=True) for ours, _ in pairs]
        for rank, (_, theirs) in enumerate(pairs):
            threading.Thread(target=self._serve, args=(rank, Wire(theirs), script), daemon=True).start()

    def _serve(self, rank: int, wire: Wire, script: Script) -> None:
        with contextlib.suppress(WireClosed):
            while True:
                call = wire.receive()
                if call["call"] == "where":
                    wire.send(
                        {"where": "distributed_c10d.py:1 all_reduce" if rank == 0 else "loader.py:2 read"}
                    )
                else:
                    threading.Thread(
                        target=self._answer, args=(rank, wire, script, call), daemon=True
                    ).start()

    def _answer(self, rank: int, wire: Wire, script: Script, call: Message) -> None:
        if call["call"] in ("meet", "start"):
            answer: Message | None = {"result": {"host": "h", "port": 1, "steps_done": 0}}
        else:
            answer = script(rank, call)
        if answer is END:
            wire._socket.shutdown(socket.SHUT_RDWR)
        elif answer is not None:
            with contextlib.suppress(WireClosed):
                wire.send({"id": call["id"], **answer})

    def ending(self, rank: int) -> str:
        return f"rank {rank} was killed"

    cause = None

    async def ended(self) -> str:
        while not self.killed:  # noqa: ASYNC110 - set by any thread
            await asyncio.sleep(0.01)
        return "trainer rank 0 was killed by SIGKILL"

    standing, kill, words = Ranks.standing, Ranks.kill, Ranks.words


def test_mem_01_ranks_give_their_memory_back_together_and_one_that_keeps_its_own_is_named(tmp_path) -> None:
    """Nineteen twentieths have come back in all, but not of each."""
    gives = {0: 95 << 30, 1: 4 << 30}

    def script(rank: int, call: Message) -> Message:
        if call["call"] == "offload":
            return {"result": {"asked": 95 << 30 if rank == 0 else 5 << 30, "fell": gives[rank]}}
        return {"result": {"steps_done": 0}}

    backend, _ = made(script, tmp_path)
    assert isinstance(backend, Offloading)
    with pytest.raises(
        TrainError, match=r"trainer rank 1 \(cpu:1\) gave back 4294967296 of 5368709120 bytes"
    ):
        backend.offload()
    gives[1] = 5 << 30
    assert backend.offload() == GivenBack(100 << 30, 100 << 30)
    backend.onload()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SETTLE_S", 0.3)
    monkeypatch.setattr(ranks, "LOOK_S", 0.1)


def made(script: Script, folder: Path) -> tuple[RankedBackend, Scripted]:
    scripted = Scripted(script, folder)
    return RankedBackend(TrainerSettings(folder, ranks=2), cast("Any", scripted)), scripted


def faulty(error: BaseException, steps_done: int | None = None) -> Message:
    return {"fault": fault_row(error), "steps_done": steps_done}


BROKEN = ModelError(Fault("w", "(2,)", "the model has shape (3,)"))
CUT = RuntimeError("Connection closed by peer")
FINE = {"result": {"steps_done": 3}}

# what each rank answers to `load`, what is raised, and whether the ranks can go on
CASES: list[tuple[tuple[Message | None, Message | None], type[Exception], str, bool]] = [
    ((faulty(BROKEN), faulty(BROKEN)), ModelError, str(BROKEN), True),
    ((None, faulty(BROKEN)), ModelError, str(BROKEN), False),
    ((faulty(TrainError("too many")), FINE), TrainError, "too many", False),
    ((faulty(OSError(28, "No space left on device", "f")), None), OSError, "No space left", False),
    ((faulty(CUT), END), TrainerLost, "in phase 'load': rank 1 was killed", False),
    ((faulty(TrainError("the others are gone")), END), TrainerLost, "rank 1 was killed", False),
    ((END, END), TrainerLost, "rank 0 was killed; rank 1 was killed", False),
    ((None, faulty(CUT)), TrainerLost, f"in phase 'load': trainer rank 1 (cpu:1): {CUT!r}", False),
    ((faulty(CUT), faulty(CUT)), TrainerLost, f"trainer rank 0 (cpu:0), trainer rank 1 (cpu:1): {CUT!r}", False),
]  # fmt: skip


@pytest.mark.parametrize(("answers", "kind", "text", "go_on"), CASES)
def test_one_error_tells_of_a_call_that_failed(
    answers: tuple[Message | None, Message | None],
    kind: type[Exception],
    text: str,
    go_on: bool,
    tmp_path: Path,
) -> None:
    calls: list[str] = []

    def script(rank: int, call: Message) -> Message | None:
        calls.append(call["call"])
        return answers[rank] if call["call"] == "load" else FINE

    backend, scripted = made(script, tmp_path)
    with pytest.raises(kind) as raised:
        backend.load(tmp_path)
    assert type(raised.value) is kind and text in str(raised.value)
    assert scripted.killed != go_on
    if go_on:
        backend.save(tmp_path)
    else:
        with pytest.raises(TrainerLost, match="no save: "):
            backend.save(tmp_path)


@pytest.mark.parametrize("awaited", [True, False])
def test_the_end_of_the_ranks_that_a_failed_call_brought_is_not_told_as_the_cause(
    awaited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not awaited:  # as of a checkpoint that is written beside training
        monkeypatch.setattr(parts, "RANKS_SAY_S", 0.1)
    backend, scripted = made(
        lambda rank, _: faulty(TrainError("the loss is a number")) if rank else FINE, tmp_path
    )

    async def run() -> None:
        trainer = TrainerThread(RealClock(), 60.0)
        trainer.hold(backend)
        trainer._ranks = cast("Any", scripted)

        async def loop() -> None:
            try:
                await trainer.call("to save", lambda it: it.save(tmp_path))
            finally:  # what it had under way ends
                await (asyncio.sleep(0.3) if awaited else asyncio.Event().wait())

        await first(loop(), *trainer.watches)

    with pytest.raises(TrainError) as raised:
        asyncio.run(run())
    assert type(raised.value) is TrainError and str(raised.value) == "the loss is a number"


@pytest.mark.parametrize(("silent", "named"), [((1,), (1,)), ((0, 1), (1,)), ((0,), (0,))])
def test_a_deadline_names_who_does_not_wait_for_others(
    silent: tuple[int, ...], named: tuple[int, ...], tmp_path: Path
) -> None:
    backend, scripted = made(lambda rank, _: None if rank in silent else FINE, tmp_path)
    scripted.plan = RankPlan(2, 1, tmp_path, 0.5)
    with pytest.raises(TrainerLost, match=r"no answer within 0\.5 s") as raised:
        backend.save(tmp_path)
    for rank in (0, 1):
        assert (f"rank {rank} (cpu:{rank})" in str(raised.value)) == (rank in named)
    assert ("loader.py:2 read" in str(raised.value)) == (1 in named)


def test_a_rank_that_stands_long_is_known_while_the_others_wait(tmp_path: Path) -> None:
    go = threading.Event()

    def script(rank: int, call: Message) -> Message:
        assert rank == 0 or go.wait(20)
        return FINE

    backend, scripted = made(script, tmp_path)
    seen: list[str] = []

    def look() -> None:
        while not any("loader.py" in line for line in seen):
            seen.extend(scripted.standing(rank) for rank in list(scripted.places))
        go.set()

    threading.Thread(target=look, daemon=True).start()
    backend.save(tmp_path)
    assert all("trainer rank 1" in line for line in seen) and not scripted.places


def test_an_error_that_follows_a_step_tells_that_the_step_is_done(tmp_path: Path) -> None:
    low = TrainError("the effective sample size is 0.1")
    backend, scripted = made(lambda *_: faulty(low, 1), tmp_path)
    with pytest.raises(TrainError, match="effective"):
        backend.train(TrainBatch(0, "", ()))
    assert backend.steps_done == 1 and not scripted.killed
    served = Rank(0, "h")
    assert served.fault(low) == faulty(low)
    served._backend = cast("Any", SimpleNamespace(steps_done=1))
    assert served.fault(low) == faulty(low, 1)


def test_a_copy_that_cannot_be_written_is_no_end_of_the_ranks(tmp_path: Path) -> None:
    full = fault_row(OSError(28, "No space left on device", "f"))

    def script(rank: int, call: Message) -> Message | None:
        if call["call"] == "written":
            return {"result": {"done": True, "fault": full if rank else None}}
        return FINE if call["call"] != "write" else None

    backend, scripted = made(script, tmp_path)
    with pytest.raises(OSError, match="No space left"):
        backend.copied()(tmp_path)
    backend.save(tmp_path)
    assert not scripted.killed


def test_an_export_that_another_call_cuts_says_so(tmp_path: Path) -> None:
    def script(rank: int, call: Message) -> Message:
        if call["call"] == "tensor" and rank == 0:
            Path(call["path"]).write_bytes(b"\1\0\2\0")
            return {"result": {"name": "w", "dtype": "BF16", "shape": [2]}}
        return {"result": {"steps_done": 0, "name": None}}

    backend, _ = made(script, tmp_path)
    export = backend.export()
    one = next(export)
    assert (one.name, one.dtype, one.shape, one.bits.tolist()) == ("w", "BF16", (2,), [1, 2])
    backend.save(tmp_path)
    with pytest.raises(InvariantBroken, match="while its weights were read"):
        next(export)


def test_tensors_of_another_machine_come_by_a_connection(tmp_path: Path) -> None:
    """More than a socket holds, after the answer; a rank that ends amid one is named as in every call."""
    size, theirs = 1 << 21, list[socket.socket]()

    def script(rank: int, call: Message) -> Message:
        if call["call"] == "tensor" and rank == 0:
            assert call["path"] is None
            threading.Thread(target=theirs[0].sendall, args=(b"\1\0" * size,), daemon=True).start()
            return {"result": {"name": "w", "dtype": "BF16", "shape": [2, size // 2]}}
        return {"result": {"steps_done": 0, "name": None}}

    backend, scripted = made(script, tmp_path)
    ours, other = socket.socketpair()
    theirs.append(other)
    scripted.file, scripted.back = None, Back(ours)
    one = next(backend.export())
    assert (one.name, one.shape) == ("w", (2, size // 2)) and set(one.bits.ravel().tolist()) == {1}
    other.sendall(b"12345")
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(TrainerLost, match="in phase 'logprobs': rank 0 was killed"):
        backend._given_back("logprobs", "float32", 3)


def test_only_who_knows_the_secret_is_a_rank(tmp_path: Path) -> None:
    token = "a" * 64

    async def meet() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        where = listener.getsockname()
        met = asyncio.ensure_future(rank_launch._met(listener, token, {0, 1, BACK}, RealClock()))
        strangers = [socket.create_connection(where) for _ in range(3)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"x" * 70)
        for rank in (0, 1):
            strangers[1 + rank].sendall(hello(rank, "b" * 64))
        ranks = {number: socket.create_connection(where) for number in (BACK, 1, 0)}
        for number, rank in ranks.items():
            rank.sendall(hello(number, token))
        found = await asyncio.wait_for(met, 10)
        for number, rank in ranks.items():
            Wire(rank).send({"rank": number})
            assert Wire(found[number]).receive() == {"rank": number}
        for stranger in strangers:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        listener.close()

    asyncio.run(meet())


def test_a_rank_that_cannot_start_is_named_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", "print('no such library', flush=True); raise SystemExit(3)"]
    monkeypatch.setattr(rank_start, "command_of", lambda *_: command)
    with pytest.raises(
        TrainerLost, match=r"trainer rank \d \(cpu:\d\) ended: exit status 3.*no such library"
    ):
        asyncio.run(start_ranks(RankPlan(2, 1, tmp_path, 30.0), RealClock()))


def test_no_rank_is_left_where_there_is_no_room_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ChildProcess] = []

    async def stays(process: ChildProcess) -> dict[int, socket.socket]:
        seen.append(process)
        await process.ended()
        return {}

    async def met(*_: object) -> dict[int, socket.socket]:
        return dict.fromkeys((0, 1), socket.socket())

    def full() -> Path:
        raise OSError(28, "No space left on device")

    command = [sys.executable, "-c", "import time; time.sleep(100)"]
    monkeypatch.setattr(rank_start, "command_of", lambda *_: command)
    for name, value in (
        ("_lost", stays),
        ("_met", met),
        ("new_file", full),
    ):
        monkeypatch.setattr(rank_launch, name, value)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(start_ranks(RankPlan(2, 1, tmp_path, 30.0), RealClock()))
    assert len(seen) == 2 and not any(process.alive for process in seen)


@pytest.mark.parametrize(("gpus", "devices"), [("", "cpu"), ("0", None), ("0,1", "cuda"), ("4,5,6", "cuda")])
def test_ranks_have_a_gpu_each_or_none_has_one(
    gpus: str, devices: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, gpus)
    if devices is not None:
        assert rank_launch._devices(2) == [f"{devices}:0", f"{devices}:1"]
        return
    with pytest.raises(
        ConfigError, match=r"--actor-num-gpus-per-node = 2: 2 ranks need a GPU each, 1 can be"
    ):
        rank_launch._devices(2)


def test_more_faults_than_one_come_out_as_they_went_in() -> None:
    faults = [Fault("--lr", "-1", "must be 0 or more", "give 0"), Fault("w", "", "is missing")]
    found = ranks.error_of(fault_row(ConfigError(faults)))
    assert isinstance(found, ConfigError) and list(found.faults) == faults
