"""Giving memory back, measured: what an engine and a trainer release, how long that takes, and what cycles cost.

    python -m benchmarks.colocated --json FILE [--cycles N] [--threads N]

SmolLM2-135M in bf16. The engine is `turnout serve`'s process, the trainer this process. `held` is the PSS of the
process tree, whole (clean pages of files too), plus what of the trainer's file lies in memory: dirty pages, or all
of it on a tmpfs; it is read before a call and 1 s after it. `share` is how much of the bytes asked for came back.
`growth` is what each holds after the last cycle less what it held after the fifth, without clean pages of files,
whose share in the PSS moves with other processes that map them. An update by handle is the way of
`--update-weight-transport tensor`: export, pack into shared memory, read, pack and digest in the engine, activate,
attest (`prepare` and `commit`); `publish`, the digest of the export before it, is told apart. `copy` is the same
bytes copied in memory by this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import machine
from turnout.core.version import WeightVersion
from turnout.observe.eventlog import EventLog
from turnout.placement.footprint import file_bytes, pss_bytes, tree, tree_bytes
from turnout.placement.real import DiskStore, RealClock
from turnout.serving.launcher import Engine, EngineLaunch, launch
from turnout.serving.weights_client import CACHE_TAGS, WEIGHT_TAGS, EngineWeights
from turnout.train.local import LocalBackend
from turnout.train.model_zoo import fetch
from turnout.train.settings import TrainerSettings
from turnout.transfer.tensor import TensorTransport
from turnout.transfer.updater import Updater
from turnout.weights.digest import root_of
from turnout.weights.store import WeightStore

WAIT_S, DEADLINE_S = 1.0, 120.0


def held(pid: int, file: int | None = None) -> int:
    """See the module."""
    texts = [Path(f"/proc/{one}/smaps_rollup").read_text() for one in tree(pid)]
    lines = [line.split() for text in texts for line in text.splitlines()]
    pss = sum(int(words[1]) * 1024 for words in lines if words[0] == "Pss:")
    return pss + (0 if file is None else file_bytes(file))


async def engine_of(model: Path, folder: Path, threads: int) -> Engine:
    flags = {
        "--model-path": model, "--engine-id": "engine-0", "--dtype": "bfloat16", "--threads": threads,
        "--max-total-tokens": 16384, "--allowed-root": folder, "--parent-pid": os.getpid(),
    }  # fmt: skip
    words = tuple(str(word) for pair in flags.items() for word in pair)
    return await launch(EngineLaunch("engine-0", words, threads, folder / "engines", DEADLINE_S), RealClock())


class Side:
    """What one side's releases came to."""

    def __init__(self) -> None:
        self.asked = 0
        self.fell: list[int] = []
        self.gives_s: list[float] = []
        self.takes_s: list[float] = []
        self.after: list[int] = []

    def row(self) -> dict[str, Any]:
        return {
            "asked_bytes": self.asked,
            "share_median": round(median(self.fell) / self.asked, 4),
            "share_min": round(min(self.fell) / self.asked, 4),
            "seconds_gives": round(median(self.gives_s), 3),
            "seconds_takes": round(median(self.takes_s), 3),
            "growth_bytes": self.after[-1] - self.after[min(5, len(self.after) - 1)],
        }


async def measure(cycles: int, threads: int, scratch: Path) -> dict[str, Any]:
    model, clock = fetch(), RealClock()
    trainer = LocalBackend(TrainerSettings(model, threads=threads, offload=scratch / "kept"))
    assert trainer._offload is not None
    file: int = trainer._offload._room._file  # type: ignore[attr-defined]
    trainer.offload()
    process = await engine_of(model, scratch, threads)
    try:
        store = WeightStore(scratch / "store", DiskStore(), model, 512 << 20)
        base = root_of(trainer.export())
        store.open("benchmark", 0, base)
        log = EventLog(scratch / "events.jsonl", clock)
        updater = Updater(TensorTransport(store, clock, 512 << 20), [process.client], log, clock)
        await updater.adopt(WeightVersion(0, 0, base), DEADLINE_S)
        engine, ours = EngineWeights(process.client), (Side(), Side())
        phases: dict[str, list[float]] = {"publish": [], "prepare": [], "commit": []}
        for cycle in range(cycles):
            await _engine_gives(engine, process.process.pid or 0, ours[0])
            _trainer_cycle(trainer, file, ours[1])
            began = time.perf_counter()
            await engine.resume_memory(WEIGHT_TAGS, DEADLINE_S)
            resumed = time.perf_counter()
            update = updater.begin(trainer.export, cycle + 1, DEADLINE_S)
            for phase, seconds in phases.items():
                started = time.perf_counter()
                await getattr(update, phase)()
                seconds.append(time.perf_counter() - started)
            await engine.resume_memory(CACHE_TAGS, DEADLINE_S)
            ours[0].takes_s.append(resumed - began)
            ours[0].after.append(tree_bytes(process.process.pid or 0))
            ours[1].after.append(pss_bytes(os.getpid()) + file_bytes(file))
    finally:
        await process.stop()
    weights = sum(tensor.nbytes for tensor in trainer.export())
    copy, middle = _copy_s(weights), {phase: median(seconds) for phase, seconds in phases.items()}
    moved = middle["prepare"] + middle["commit"]
    return {
        "cycles": cycles,
        "threads": threads,
        "engine": ours[0].row(),
        "trainer": ours[1].row(),
        "weight_bytes": weights,
        "seconds_phases": {phase: round(seconds, 4) for phase, seconds in middle.items()},
        "seconds_update_by_handle": round(moved, 4),
        "seconds_copy": round(copy, 4),
        "ratio_update_to_copy": round(copy / moved, 3),
        "ratio_with_publish": round(copy / (moved + middle["publish"]), 3),
    }


async def _engine_gives(engine: EngineWeights, pid: int, side: Side) -> None:
    before, began = held(pid), time.perf_counter()
    side.asked = await engine.release_memory([*WEIGHT_TAGS, *CACHE_TAGS], DEADLINE_S)
    side.gives_s.append(time.perf_counter() - began)
    await asyncio.sleep(WAIT_S)
    side.fell.append(before - held(pid))


def _trainer_cycle(trainer: LocalBackend, file: int, side: Side) -> None:
    """Takes its memory, and gives it back."""
    began = time.perf_counter()
    trainer.onload()
    side.takes_s.append(time.perf_counter() - began)
    before, began = held(os.getpid(), file), time.perf_counter()
    side.asked = trainer.offload().asked
    side.gives_s.append(time.perf_counter() - began)
    time.sleep(WAIT_S)
    side.fell.append(before - held(os.getpid(), file))


def _copy_s(size: int) -> float:
    """Into memory that is there already, as a bucket's segment and the engine's buffers are filled."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    seconds: list[float] = []
    for _ in range(7):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--threads", type=int, default=machine.cpus())
    asked = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(dir=Path.cwd()))
    try:
        found = asyncio.run(measure(asked.cycles, asked.threads, scratch))
    finally:
        shutil.rmtree(scratch)
    asked.json.write_text(json.dumps({"machine": machine.describe(), **found}, indent=1) + "\n")
    for side in ("engine", "trainer"):
        print(side, json.dumps(found[side]))
    print(f"ratio_update_to_copy {found['ratio_update_to_copy']}")


if __name__ == "__main__":
    main()
