"""Followers that are killed at every kind of moment, and what a restart makes of it.

    python -m tests.follower_kills --json benchmarks/results/follower_kills.json

Scripted kills end one in a world of its own (tests/follower_world.py) at a step drawn evenly over the phases, some
a second time while it recovers, half with a loss of power. Real ones send SIGKILL to a process, beside a real
engine, at instants drawn over the phases that it tells. After each: what lies on disk is, bit for bit, one of the
versions that it could be; a restart ends at the newest; the engine serves just that. For publishers and engines see
tests/update_kills.py.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine_process import EngineProcess
from tests.engine_process import engine as engine_of
from tests.followed import FollowerProcess, serves, stepped, tiny, tiny_publisher
from tests.follower_world import World, make_store
from tests.published import bits_of
from tests.update_kills import ENGINE_PHASES, PUBLISHER_PHASES, engine_kills, publisher_kills
from turnout.transfer.follower import ATTEST, LOAD
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.local_checkpoint import (
    FETCH,
    JOURNAL_FSYNC,
    JOURNAL_WRITE,
    OVERWRITE,
    STATE_MOVE,
    SWITCH,
    VERIFY,
    LocalCheckpoint,
)

PHASES = (FETCH, VERIFY, JOURNAL_WRITE, JOURNAL_FSYNC, OVERWRITE, STATE_MOVE, SWITCH, LOAD, ATTEST)
EACH = 3
Store = tuple[Path, dict[int, Any]]


def scripted(seed: int, store: Store, folder: Path) -> str:
    """One world; returns the phase of the kill. Raises AssertionError with the seed."""
    rng = random.Random(seed)
    begin = rng.choice([0, 1, 2, 3, 4, 5])
    end = rng.randrange(begin + 1, 7)
    world = World(*store, folder / "host", seed)
    if begin:
        world.life(begin)
    trail = _rehearsed(world, end, folder)
    phase = rng.choice(sorted({p for p in trail if p in PHASES}))
    at = rng.choice([n for n, p in enumerate(trail, 1) if p == phase])
    power = rng.random() < 0.5
    fate = world.life(end, at, power)
    assert fate.dead and fate.phase == phase, f"seed {seed}: killed in {fate.phase}, not in {phase}"
    _check(world, begin, end, folder)
    if rng.random() < 0.5:
        again = _rehearsed(world, end, folder)
        world.life(end, rng.randrange(1, len(again) + 1), power)
        _check(world, begin, end, folder)
    world.life(end)
    held, found = world.looked()
    assert (held, found) == (end, bits_of(store[1][end])), f"seed {seed}: held {held}, not {end}"
    assert world.engine.tensors == found, f"seed {seed}: the engine serves other weights"
    left = {p.name for p in (world.host / ".turnout").iterdir()} - {"lock", "state.json"}
    assert not left, f"seed {seed}: left behind {left}"
    return phase


def _rehearsed(world: World, end: int, folder: Path) -> list[str]:
    """The phases of the steps that a life without a kill would take from here."""
    copy = World(world.store, world.history, folder / "copy", world.seed)
    shutil.rmtree(copy.host, ignore_errors=True)
    if world.host.exists():
        shutil.copytree(world.host, copy.host)
    copy.engine.served, copy.engine.served_label = world.engine.served, world.engine.served_label
    return copy.life(end).trail


def _check(world: World, begin: int, end: int, folder: Path) -> None:
    """What a restart finds is a version between begin and end, whole; what was held once is never lost."""
    copy = World(world.store, world.history, folder / "look", world.seed)
    shutil.rmtree(copy.host, ignore_errors=True)
    shutil.copytree(world.host, copy.host)
    held, found = copy.looked()
    if held is None:
        assert begin == 0, f"seed {world.seed}: version {begin} was held, and nothing is now"
        return
    assert begin <= held <= end, f"seed {world.seed}: {held} is none of {begin} to {end}"
    assert found == bits_of(world.history[held]), f"seed {world.seed}: not version {held}, but a mix"


def scripted_kills(seeds: range, folder: Path) -> Counter[str]:
    """Kills by phase over so many worlds."""
    root = folder / "store" / "weights"
    store = (root, make_store(root))
    table: Counter[str] = Counter()
    for seed in seeds:
        place = folder / f"world-{seed}"
        place.mkdir()
        table[scripted(seed, store, place)] += 1
        shutil.rmtree(place)
    return table


class RealKills:
    """A follower process that is killed over and over beside one engine; `table` counts kills by the last phase
    that the process told."""

    def __init__(self, engine: EngineProcess, folder: Path, seed: int) -> None:
        self.engine, self.folder, self.rng, self.seed = engine, folder, random.Random(seed), seed
        self.store, self.host = folder / "weights", folder / "host"
        self.publisher = tiny_publisher(self.store)
        self.publisher.full()
        self.table: Counter[str] = Counter()
        self.follower = self._started()

    def kill_in(self, phase: str) -> str:
        """Publishes a version, kills the follower a moment after it has entered the phase, starts it again and
        has it end at that version; returns the phase in which the kill came."""
        before = self.publisher.version
        after = stepped(self.publisher.now, self.rng.randrange(1 << 30))
        full = phase == SWITCH or (phase in (FETCH, VERIFY) and self.rng.random() < 0.5)
        version = self.publisher.full(after) if full else self.publisher.delta(after, "ranked")
        self.follower.line(f"PHASE {phase}")
        time.sleep(self.rng.choice([0.0, self.rng.random() * 0.01]))
        self.follower.process.send_signal(signal.SIGKILL)
        assert self.follower.ended()[0] == -signal.SIGKILL
        told = [line.removeprefix("PHASE ") for line in self.follower.lines if line.startswith("PHASE ")]
        self._looked(before.counter, version.counter)
        self.follower = self._started()
        assert serves(self.engine, version), f"seed {self.seed}: the engine serves another version"
        assert bits_of(list(read_checkpoint(self.host))) == bits_of(after), f"seed {self.seed}: other weights"
        self.table[told[-1]] += 1
        return told[-1]

    def _started(self) -> FollowerProcess:
        """A follower that has proved the newest version."""
        follower = FollowerProcess(
            self.store, self.host, "--engine", self.engine.url, seed=self.rng.randrange(1 << 30)
        )
        follower.line(f"{self.publisher.version.label}  read")
        return follower

    def _looked(self, *counters: int) -> None:
        copy = self.folder / "look"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.host, copy)
        local = LocalCheckpoint(copy)
        local.open()
        held = local.held
        local.close()
        assert held is not None and held.counter in counters, f"seed {self.seed}: {held} of {counters}"
        found = bits_of(list(read_checkpoint(copy)))
        assert found == bits_of(self.publisher.history[held.counter]), f"seed {self.seed}: a mix"


def real_kills(kills: int, folder: Path, seed: int = 0) -> Counter[str]:
    """At least so many, and at least EACH in every phase; by phase."""
    (folder / "engine").mkdir()
    with engine_of(tiny()[0], folder / "engine") as running:
        world = RealKills(running, folder, seed)
        try:
            while True:
                lacking = [phase for phase in PHASES if world.table[phase] < EACH]
                if not lacking and world.table.total() >= kills:
                    return world.table
                assert world.table.total() < 4 * kills, f"phases never met: {lacking}"
                world.kill_in(world.rng.choice(lacking or PHASES))
        finally:
            world.follower.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--scripted", type=int, default=400)
    parser.add_argument("--real", type=int, default=30)
    arguments = parser.parse_args()
    parts: dict[str, tuple[tuple[str, ...], Callable[[Path], Counter[str]]]] = {
        "scripted": (PHASES, lambda folder: scripted_kills(range(arguments.scripted), folder)),
        "follower": (PHASES, lambda folder: real_kills(arguments.real, folder)),
        "publisher": (PUBLISHER_PHASES, lambda folder: publisher_kills(EACH, folder)),
        "engine": (ENGINE_PHASES, lambda folder: engine_kills(EACH, folder)),
    }
    report: dict[str, Any] = {}
    for name, (phases, run) in parts.items():
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            table = run(Path(folder))
        assert all(table[phase] >= EACH for phase in phases), table
        report[name] = {
            "kills": table.total(),
            "by_phase": dict(sorted(table.items())),
            "seconds": round(time.monotonic() - began, 1),
        }
        print(name, json.dumps(report[name]), flush=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
