"""A world in which a follower is killed at a chosen step, without processes: the real follower over real files,
beside an engine made of a dictionary.

A kill comes before, within or after any operation on a file, any call of the engine, or between two phases. After
it nothing runs any more; in worlds with `power` what was not synced is then lost in part: blocks of unsynced
files, names whose folder was not synced.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tests.published import Publisher, bits_of, first, moved
from turnout.core.errors import EngineError, WeightError
from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore, RealClock
from turnout.transfer.follower import Follower, FollowPlan, Phases, Tools
from turnout.weights.catalog import StoreReader
from turnout.weights.changes import Bits, Change
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.depot import FolderDepot
from turnout.weights.digest import Sums, root_of
from turnout.weights.hooks import Hook
from turnout.weights.host_files import HostFiles
from turnout.weights.local_checkpoint import LocalCheckpoint
from turnout.weights.tensors import HostTensor

BLOCK = 64


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Fate:
    """Counts steps; raises Killed at step `at` and ever after. `trail` is the phase of each step."""

    at: int | None = None
    trail: list[str] = field(default_factory=list)
    phase: str = "start"
    dead: bool = False

    def enter(self, phase: str) -> None:
        if phase:
            self.phase = phase
        self.tick()

    def tick(self) -> None:
        if self.dead:
            raise Killed
        self.trail.append(self.phase)
        if len(self.trail) == self.at:
            self.dead = True
            raise Killed


class WorldFiles(HostFiles):
    """HostFiles that stop where fate says, in the middle of what they do; a sync is only remembered."""

    def __init__(self, fate: Fate, rng: random.Random) -> None:
        self.fate, self.rng = fate, rng
        self.synced: dict[Path, bytes] = {}  # content at the last sync of files that changed since
        self.undo: list[tuple[Path, Callable[[], None]]] = []  # of names, by the folder that would sync them
        self._paths: dict[int, Path] = {}

    def create(self, path: Path) -> BinaryIO:
        self.fate.tick()
        self.made(path)
        file = super().create(path)
        self._paths[id(file)] = path
        return file

    def append(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self.fate.tick()
        half = len(data) // 2
        super().append(file, memoryview(data)[:half])
        self.fate.tick()
        super().append(file, memoryview(data)[half:])

    def sync(self, file: BinaryIO) -> None:
        self.fate.tick()
        self.synced.pop(self._paths[id(file)], None)
        self.fate.tick()

    def sync_path(self, path: Path) -> None:
        self.fate.tick()
        self.synced.pop(path, None)
        self.undo = [(folder, back) for folder, back in self.undo if folder != path]
        self.fate.tick()

    def rename(self, source: Path, target: Path) -> None:
        self.fate.tick()
        old = target.read_bytes() if target.exists() else None
        super().rename(source, target)
        if source in self.synced:
            self.synced[target] = self.synced.pop(source)

        def back() -> None:
            if not target.exists():
                return
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_bytes(target.read_bytes())
            target.write_bytes(old) if old is not None else target.unlink()

        self.undo.append((target.parent, back))
        self.fate.tick()

    def remove(self, path: Path) -> None:
        self.fate.tick()
        if path.is_file():
            old = path.read_bytes()
            self.undo.append((path.parent, lambda: None if path.exists() else void(path.write_bytes(old))))
        self.synced.pop(path, None)
        super().remove(path)
        self.fate.tick()

    def map(self, path: Path) -> np.ndarray[Any, Any]:
        data = super().map(path)
        self._paths[data.ctypes.data] = path
        return data

    def scatter(self, target: Bits, change: Change) -> Sums:
        self.fate.tick()
        self._touch_map(target)
        half = change.count // 2
        first_half = Change(
            change.name, change.dtype, change.shape, change.positions[:half], change.bits[:half]
        )
        lo = super().scatter(target, first_half)
        self.fate.tick()
        rest = Change(change.name, change.dtype, change.shape, change.positions[half:], change.bits[half:])
        hi = super().scatter(target, rest)
        self.fate.tick()
        return (lo[0] + hi[0]) % (1 << 64), (lo[1] + hi[1]) % (1 << 64)

    def fill(self, target: Bits, bits: Bits) -> Sums:
        self.fate.tick()
        self._touch_map(target)
        half = bits.size // 2
        target[:half] = bits[:half]
        self.fate.tick()
        return super().fill(target, bits)

    def flush(self, path: Path, mapped: np.ndarray[Any, Any]) -> None:
        self.sync_path(path)

    def lose_power(self) -> None:
        """What is not synced is there, or not, or in part."""
        for path, old in self.synced.items():
            if path.exists():
                self._tear(path, old)
        cut = self.rng.randrange(len(self.undo) + 1)
        for _, back in reversed(self.undo[cut:]):
            back()
        self.synced.clear()
        self.undo.clear()

    def _tear(self, path: Path, old: bytes) -> None:
        new = path.read_bytes()
        size = len(new) if len(old) == len(new) else self.rng.choice([len(old), len(new)])
        blocks = []
        for at in range(0, size, BLOCK):
            source = self.rng.choice([old, new])
            blocks.append(source[at : at + BLOCK].ljust(min(BLOCK, size - at), b"\0")[: size - at])
        with path.open("r+b") as file:
            file.write(b"".join(blocks)[:size])
            file.truncate(size)

    def made(self, path: Path) -> None:
        """A file is about to be written anew; its name, where that is new, isn't synced with it."""
        if not path.exists():
            self.undo.append((path.parent, lambda: path.unlink(missing_ok=True)))
        self._touch(path)

    def _touch(self, path: Path) -> None:
        self.synced.setdefault(path, path.read_bytes() if path.exists() else b"")

    def _touch_map(self, target: Bits) -> None:
        """The file that a view lies in; a copy lies in none."""
        at = target.ctypes.data
        for begin, path in self._paths.items():
            if path.suffix == ".safetensors" and path.exists() and 0 <= at - begin < path.stat().st_size:
                self._touch(path)


class WorldDepot(FolderDepot):
    """A store of which only versions up to `visible` show; `bytes_read` counts what was fetched of versions."""

    def __init__(self, root: Path, fate: Fate, files: WorldFiles, visible: int) -> None:
        super().__init__(root, DiskStore())
        self.fate, self.files, self.visible, self.bytes_read = fate, files, visible, 0
        self.fetched: list[str] = []

    def sizes(self, folder: str = "") -> dict[str, int]:
        return {key: size for key, size in super().sizes(folder).items() if _counter(key) <= self.visible}

    def fetch_file(self, key: str, target: Path) -> None:
        self.fate.tick()
        data = (self.root / key).read_bytes()
        self.bytes_read += len(data)
        self.fetched.append(key)
        self.files.made(target)
        target.write_bytes(data[: len(data) // 2])
        self.fate.tick()
        target.write_bytes(data)
        self.fate.tick()

    def put(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


def _counter(key: str) -> int:
    """Of a version's folder or record: its number; 0 for other keys."""
    found = re.match(r"(?:weight_v|PUBLISHED/)(\d+)", key)
    return int(found.group(1)) if found else 0


class WorldEngine:
    """What an engine is to a follower: weights in memory, a name. It outlives the follower."""

    name = "engine"

    def __init__(self) -> None:
        self.served, self.served_label, self.loads = "none", "default", 0
        self.tensors: dict[str, bytes] = {}
        self.trouble: list[str] = []  # what happens at the next loads, first to last
        self.fate = Fate()

    async def label(self) -> str:
        return self.served_label

    async def load(self, folder: Path, label: str, deadline_s: float) -> None:
        self.fate.tick()
        trouble = self.trouble.pop(0) if self.trouble else ""
        self.loads += 1
        if trouble == "fails before":
            raise EngineError(self.name, "update", self.served_label, "no")
        tensors = list(read_checkpoint(folder))
        self.tensors = {t.name: t.bits.tobytes() for t in tensors}
        self.served = root_of(tensors)
        if trouble == "loads wrong":
            self.tensors, self.served = {}, "wrong"
        if trouble == "fails after":
            raise EngineError(self.name, "update", self.served_label, "the cache was not flushed")
        self.served_label = label
        self.fate.tick()

    async def prove(
        self, version: WeightVersion, tensors: Callable[[], Iterable[HostTensor]], deadline_s: float
    ) -> str:
        self.fate.tick()
        if (self.served, self.served_label) != (version.root, version.label):
            raise WeightError(f"{self.served_label} ({self.served}) is not {version.label}")
        self.fate.tick()
        return "memory"

    async def disown(self) -> None:
        self.served_label = "unknown"


class QuietClock(RealClock):
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


@dataclass
class World:
    """One host beside one store. `life` runs a follower until it has nothing left to do, or is killed."""

    store: Path
    history: dict[int, list[HostTensor]]
    host: Path
    seed: int
    engine: WorldEngine = field(default_factory=WorldEngine)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.depot: WorldDepot

    def follower(self, fate: Fate, visible: int, pre_read: Hook | None = None) -> Follower:
        self.files = WorldFiles(fate, self.rng)
        self.engine.fate = fate
        self.depot = WorldDepot(self.store, fate, self.files, visible)
        phases = Phases(QuietClock(), fate.enter)
        local = LocalCheckpoint(self.host, self.files, phases.begin)
        plan = FollowPlan("host-1", audit_interval=2, pre_read=pre_read)
        return Follower(
            StoreReader(self.depot), local, self.engine, plan, Tools(QuietClock(), phases, self.lines.append)
        )

    def life(self, visible: int, at: int | None = None, power: bool = False) -> Fate:
        """Follows until `visible` is served, or until fate strikes at step `at`."""
        fate = Fate(at)
        follower = self.follower(fate, visible)

        async def follow() -> None:
            for _ in range(12):
                fault = await follower.turn()
                held = follower.local.held
                if not fault and held is not None and held.counter == visible:
                    return
            raise AssertionError(f"seed {self.seed}: not at version {visible}: {self.lines[-5:]}")

        try:
            asyncio.run(follow())
        except Killed:
            if power:
                self.files.lose_power()
        finally:
            follower.local.close()
        return fate

    def looked(self) -> tuple[int | None, dict[str, bytes]]:
        """What a restart finds: the counter that is held and the bits of the folder."""
        local = LocalCheckpoint(self.host)
        local.open()
        held = local.held.counter if local.held is not None else None
        found = bits_of(list(read_checkpoint(self.host))) if held is not None else {}
        local.close()
        return held, found


def make_store(root: Path, versions: int = 6) -> dict[int, list[HostTensor]]:
    """A store with a full version 1, deltas, and a full version in the middle; the weights by counter."""
    publisher = Publisher(root, first())
    publisher.full()
    for counter in range(2, versions + 1):
        after = moved(publisher.now, counter)
        publisher.full(after) if counter == 4 else publisher.delta(after)
    return publisher.history


def void(_: object) -> None:
    return None
