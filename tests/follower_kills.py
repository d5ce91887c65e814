"""Followers that are killed at every kind of moment, and what a restart makes of it.

    python -m tests.follower_kills --json benchmarks/results/follower_kills.json

`scripted` kills one in a world of its own (tests/follower_world.py) at a step drawn evenly over the phases, some of
them a second time while it recovers, half of them with a loss of power. After each: what lies on disk is, bit for
bit, one of the versions that it could be; a restart ends at the newest; the engine serves just that.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.follower_world import World, make_store
from tests.published import bits_of
from turnout.transfer.follower import ATTEST, LOAD
from turnout.weights.local_checkpoint import (
    FETCH,
    JOURNAL_FSYNC,
    JOURNAL_WRITE,
    OVERWRITE,
    STATE_MOVE,
    SWITCH,
    VERIFY,
)

PHASES = (FETCH, VERIFY, JOURNAL_WRITE, JOURNAL_FSYNC, OVERWRITE, STATE_MOVE, SWITCH, LOAD, ATTEST)
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--scripted", type=int, default=400)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        table = scripted_kills(range(arguments.scripted), Path(folder))
    report = {"scripted": {"kills": arguments.scripted, "by_phase": {p: table[p] for p in PHASES}}}
    report["seconds"] = round(time.monotonic() - began, 1)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
