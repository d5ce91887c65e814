"""Rank 0 of a sharded engine: starts the other ranks, drives them, and ends with them.

Owns the ranks' processes and the channels to them. Promises: all ranks take part in the same steps and swaps in the
same order; each wait has a deadline; a rank that ends, fails or does not answer ends the whole engine with one line
that names it (status CRASH_STATUS): an engine without a part of its weights must not look alive; the ranks end when
this process does, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from turnout.core.errors import EngineDead
from turnout.engine.model import LoadedModel, read_config
from turnout.engine.parallel_channel import Channel
from turnout.engine.parallel_group import Group
from turnout.engine.parallel_model import ParallelForward, Shard, check_split, load_shard
from turnout.engine.parallel_plan import VICTIM_STATUS, RankReport
from turnout.engine.parallel_storage import ParallelStorage, ShardStorage
from turnout.engine.parallel_update import ShardedReceiver, SliceReceiver
from turnout.engine.runner import Runner
from turnout.engine.settings import EngineSettings
from turnout.engine.step import StepInput, StepOutput

log = logging.getLogger(__name__)
CRASH_STATUS = 70
START_DEADLINE_S = 300.0
BLAME_S = 2.0  # how long ranks may take to end after a sum that failed
STOP_S = 2.0
POLL_S = 0.1


class Crew:
    """The other ranks. `steps` is for the thread that computes, `weights` for any: a rank serves the two from two
    threads, so that an update is staged while steps run."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings, self._closing, self._losing = settings, threading.Event(), threading.Lock()
        self.processes: list[subprocess.Popen[bytes]] = []
        steps: list[socket.socket] = []
        weights: list[socket.socket] = []
        for rank in range(1, settings.tp_size):
            pairs = socket.socketpair(), socket.socketpair()
            self.processes.append(_spawn(settings.engine_id, rank, [theirs for _, theirs in pairs]))
            for ends, (ours, theirs) in zip((steps, weights), pairs):
                theirs.close()
                ends.append(ours)
        self.steps = Channel(steps, START_DEADLINE_S, self.lost)
        self.weights = Channel(weights, START_DEADLINE_S, self.lost)
        threading.Thread(target=self._watch, name="turnout-ranks", daemon=True).start()

    def blame(self, fault: RuntimeError) -> NoReturn:
        """Ends the engine after a sum over the ranks failed, naming the rank that did not take part. One that
        ends with VICTIM_STATUS waited for another one, as this process did."""
        end = time.monotonic() + BLAME_S
        while time.monotonic() < end and all(p.poll() in (None, VICTIM_STATUS) for p in self.processes):
            time.sleep(POLL_S)
        states = [(rank, process.poll()) for rank, process in enumerate(self.processes, 1)]
        for rank, status in states:
            if status not in (None, VICTIM_STATUS):
                self.lost(rank, _ending(status))
        for rank, status in states:
            if status is None:
                self.lost(rank, f"did not take part in a step within {self.settings.rank_timeout_s:g} s")
        self.lost(1, f"and others lost one another: {fault}")

    def lost(self, rank: int, what: str) -> NoReturn:
        """Ends this process: an engine without a part of its weights must not look alive. While the engine is
        being stopped it raises EngineDead instead, in whatever thread still works."""
        if self._closing.is_set():
            raise EngineDead(self.settings.engine_id, "stop", "of no rank", f"rank {rank} {what}")
        with self._losing:  # the first to notice tells it; whoever comes later waits for the end here
            pid = self.processes[rank - 1].pid
            log.critical("engine %s ends: rank %d (process %d) %s", self.settings.engine_id, rank, pid, what)
            logging.shutdown()
            os._exit(CRASH_STATUS)

    def close(self) -> None:
        """Ends the ranks; those that do not end in time are killed."""
        self._closing.set()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
                continue
            process.kill()
            process.wait(STOP_S)
        self.steps.close()
        self.weights.close()

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            for rank, process in enumerate(self.processes, 1):
                status = process.poll()
                if status == VICTIM_STATUS:
                    time.sleep(2 * BLAME_S)  # this process waits in the same sum, and `blame` knows more
                if status is not None and not self._closing.is_set():
                    self.lost(rank, _ending(status))


class ParallelRunner(Runner):
    """Rank 0's part of each step; the others are told first."""

    def __init__(self, shard: Shard, group: Group, crew: Crew) -> None:
        forward = ParallelForward(shard.module, crew.settings.row_block, group)
        self.part = ShardStorage(shard)
        super().__init__(
            shard.model, crew.settings, (forward, ParallelStorage(self.part, crew.steps, crew.weights))
        )
        self._crew = crew
        self.receiver = ShardedReceiver(SliceReceiver(self.part), crew.weights)

    def release_cache(self) -> int:
        return super().release_cache() + sum(self._crew.steps.ask(("release_cache",)))

    def restore_cache(self) -> None:
        self._crew.steps.ask(("restore_cache",))
        super().restore_cache()

    def run(self, step: StepInput) -> StepOutput:
        self._crew.steps.tell(("run", step))
        try:
            return super().run(step)
        except RuntimeError as fault:
            self._crew.blame(fault)


@dataclass(frozen=True)
class ParallelEngine:
    """What EngineCore takes in place of one process's runner. `reports`: one per rank."""

    model: LoadedModel
    runner: ParallelRunner
    crew: Crew
    reports: tuple[RankReport, ...]


def start(settings: EngineSettings) -> ParallelEngine:
    """Starts the ranks and builds rank 0's part; weights are undefined until the first update. Raises ModelError
    for a model that is not served or cannot be divided so, before anything is started."""
    check_split(read_config(settings), settings)
    crew = Crew(settings)
    with tempfile.TemporaryDirectory(prefix="turnout-ranks-") as folder:
        store = Path(folder) / "store"
        crew.steps.tell(("start", settings, store, START_DEADLINE_S))
        group = Group(store, 0, settings.tp_size, START_DEADLINE_S)
    shard = load_shard(settings, 0, group)
    runner = ParallelRunner(shard, group, crew)
    others = crew.steps.ask(("report",))
    group.limit(settings.rank_timeout_s)
    crew.steps.limit(settings.rank_timeout_s)
    crew.weights.limit(settings.rank_timeout_s)
    mine = RankReport(0, os.getpid(), runner.part.nbytes, runner.cache.nbytes)
    return ParallelEngine(shard.model, runner, crew, (mine, *others))


def _spawn(engine_id: str, rank: int, ends: list[socket.socket]) -> subprocess.Popen[bytes]:
    numbers = [end.fileno() for end in ends]
    command = [sys.executable, "-m", "turnout.engine.parallel_worker"]
    command += ["--engine-id", engine_id, "--rank", str(rank), "--parent-pid", str(os.getpid())]
    command += ["--channels", *map(str, numbers)]
    return subprocess.Popen(command, pass_fds=numbers, stdin=subprocess.DEVNULL)


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by signal {-status}"
    return f"ended with status {status}"
