"""Publishers and engines that are killed in the middle of an update, beside a follower that goes on.

A publisher is killed at an instant drawn over staging, syncing, renaming and recording a version, and goes on as
the next incarnation from the newest version that its store names. An engine is killed while it loads, attests,
or serves. After each: every version that the store names is what its manifest says and what its step
makes; the follower's engine ends bit-equal to the newest.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.engine_process import EngineProcess
from tests.engine_process import engine as engine_of
from tests.followed import FollowerProcess, Lines, serves, stepped, tiny, tiny_publisher
from tests.publisher_child import FSYNC, RECORD, RENAME, STAGE, weights_at
from turnout.placement.real import DiskStore
from turnout.transfer.follower import ATTEST, LOAD
from turnout.weights.catalog import Catalog, StoreReader
from turnout.weights.depot import FolderDepot
from turnout.weights.digest import root_of
from turnout.weights.verify import verify

PUBLISHER_PHASES = (STAGE, FSYNC, RENAME, RECORD)
SERVING = "serving"
ENGINE_PHASES = (LOAD, ATTEST, SERVING)


class PublisherKills:
    """One store, one engine and its follower; publishers come and are killed."""

    def __init__(self, engine: EngineProcess, folder: Path, seed: int) -> None:
        self.engine, self.root, self.rng, self.seed = engine, folder / "weights", random.Random(seed), seed
        self.incarnation, self.start, self.step = 0, 0, 0
        self.follower = FollowerProcess(self.root, folder / "host", "--engine", engine.url)

    def kill_in(self, phase: str) -> str:
        """One incarnation: publishes some versions, then dies; returns the phase in which that came."""
        words = map(str, (self.root, self.incarnation, self.start, self.step))
        child = Lines(subprocess.Popen(
            [sys.executable, "-m", "tests.publisher_child", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ))  # fmt: skip
        child.line("DONE")
        for _ in range(self.rng.randrange(1, 4)):
            child.line(f"PHASE {phase}")
        time.sleep(self.rng.choice([0.0, self.rng.random() * 0.03]))
        child.process.send_signal(signal.SIGKILL)
        assert child.ended()[0] == -signal.SIGKILL
        told = [line for line in child.lines if line.startswith(("PHASE ", "DONE"))]
        self._check()
        return told[-1].removeprefix("PHASE ") if told[-1].startswith("PHASE ") else "between"

    def _check(self) -> None:
        catalog = StoreReader(FolderDepot(self.root, DiskStore())).look()
        for manifest in catalog.usable():
            verify(self.root / manifest.directory)
            assert manifest.version.root == root_of(weights_at(manifest.step)), f"seed {self.seed}: it lies"
        newest = max(catalog.usable(), key=lambda m: m.version.counter)
        self._follow(catalog)
        self.incarnation, self.start, self.step = self.incarnation + 1, newest.version.counter, newest.step

    def _follow(self, catalog: Catalog) -> None:
        newest = max(m.version for m in catalog.usable())
        end = time.monotonic() + 60
        while not serves(self.engine, newest):
            assert time.monotonic() < end, (
                f"seed {self.seed}: not at {newest.label}: {self.follower.lines[-3:]}"
            )
            time.sleep(0.05)


class EngineKills:
    """One follower; its engine is killed and comes back at the same address with the weights of its start."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng, self.seed = folder, random.Random(seed), seed
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.publisher = tiny_publisher(folder / "weights")
        self.publisher.full()
        self.engine = self._engine()
        words = ("--engine", self.engine.url)
        self.follower = FollowerProcess(folder / "weights", folder / "host", *words, seed=seed)
        self.follower.line(f"{self.publisher.version.label}  read")

    def kill_in(self, phase: str) -> str:
        version = self.publisher.delta(stepped(self.publisher.now, self.rng.randrange(1 << 30)))
        self.follower.line(f"{version.label}  read" if phase == SERVING else f"PHASE {phase}")
        time.sleep(self.rng.random() * 0.02)
        self.engine.process.kill()
        self.engine.process.wait()
        told = [line for line in self.follower.lines if line.startswith("PHASE ") or "  read" in line][-1]
        self.engine = self._engine()
        if phase != SERVING and "  read" not in told:
            self.follower.line(f"{version.label}  read")
        end = time.monotonic() + 60
        while not serves(
            self.engine, version
        ):  # where it had proved the version, its name tells of the restart
            assert time.monotonic() < end, f"seed {self.seed}: {self.follower.lines[-3:]}"
            time.sleep(0.05)
        return told.removeprefix("PHASE ") if told.startswith("PHASE ") else SERVING

    def _engine(self) -> EngineProcess:
        work = self.folder / f"engine-{time.monotonic_ns()}"
        work.mkdir()
        return EngineProcess(tiny()[0], work, "--port", str(self.port)).serving()


def publisher_kills(each: int, folder: Path, seed: int = 0) -> Counter[str]:
    """At least so many in every phase; by phase."""
    (folder / "engine").mkdir()
    with engine_of(tiny()[0], folder / "engine") as running:
        world = PublisherKills(running, folder, seed)
        try:
            return _until(each, PUBLISHER_PHASES, world.kill_in, world.rng)
        finally:
            world.follower.kill()


def engine_kills(each: int, folder: Path, seed: int = 0) -> Counter[str]:
    world = EngineKills(folder, seed)
    try:
        return _until(each, ENGINE_PHASES, world.kill_in, world.rng)
    finally:
        world.follower.kill()
        world.engine.process.kill()
        world.engine.process.wait()


def _until(
    each: int, phases: tuple[str, ...], kill_in: Callable[[str], str], rng: random.Random
) -> Counter[str]:
    table: Counter[str] = Counter()
    while lacking := [phase for phase in phases if table[phase] < each]:
        assert table.total() < 8 * each * len(phases), f"phases never met: {lacking}"
        table[kill_in(rng.choice(lacking))] += 1
    return table
